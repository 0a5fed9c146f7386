"""Centroids as state: when they change and by how much, in any plain training loop, and their precision."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

import dgt
from dgt.layers import renormalize_centroids

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def is_unit(centroids: torch.Tensor) -> bool:
    return bool((centroids.norm(dim=-1) - 1).abs().max() < 1e-6)


def seeded(layer, tokens, step, **options) -> dgt.DGAttention:
    """A layer after one step."""
    attention = layer(**options)
    step(attention, torch.optim.SGD(attention.parameters(), lr=1e-3), tokens(0))
    return attention


def test_a_new_layer_has_fixed_random_unit_centroids(layer) -> None:
    first, second = layer(), dgt.DGAttention(16, 2, num_groups=5, top_k=6)
    assert torch.equal(first.centroids, second.centroids)
    assert is_unit(first.centroids)
    assert first.centroids.dtype == torch.float32
    assert "centroids" not in dict(first.named_parameters())


def test_evaluation_changes_nothing(layer, tokens, step) -> None:
    """Neither before any training nor after."""
    for attention in (layer(), seeded(layer, tokens, step)):
        before = {name: buffer.clone() for name, buffer in attention.eval().named_buffers()}
        optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
        step(attention, optimizer, tokens(1))
        assert all(torch.equal(before[name], buffer) for name, buffer in attention.named_buffers())


def test_the_first_training_batch_seeds(layer, tokens) -> None:
    attention = layer()
    before = attention.centroids.clone()
    query = attention.split_heads(tokens(0))[0].detach()
    attention(tokens(0))
    assert attention.num_updates == 0
    assert is_unit(attention.centroids)
    closeness = torch.einsum(
        "bhld,hgd->bhlg", nn.functional.normalize(query, dim=-1), attention.centroids
    )
    old = torch.einsum("bhld,hgd->bhlg", nn.functional.normalize(query, dim=-1), before)
    assert closeness.amax(-1).mean() > old.amax(-1).mean() + 0.1


def test_forwards_alone_do_not_move_centroids(layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    before = attention.centroids.clone()
    for i in range(3):
        attention(tokens(i)).sum().backward()
    assert torch.equal(attention.centroids, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_moves_them_once_as_equations_3_and_4_say(name, layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    optimizer = OPTIMIZERS[name](attention.parameters())
    for i in range(1, 4):
        query = attention.split_heads(tokens(i))[0].detach()
        groups = dgt.group_queries(query, attention.centroids)
        expected = dgt.update_centroids(attention.centroids, query, groups, 0.3)
        updates = int(attention.num_updates)
        step(attention, optimizer, tokens(i))
        torch.testing.assert_close(attention.centroids, expected, rtol=0, atol=1e-6)
        assert attention.num_updates == updates + 1
        assert is_unit(attention.centroids)


def test_two_micro_batches_equal_the_joined_batch(layer, tokens, step) -> None:
    joined = seeded(layer, tokens, step)
    apart = copy.deepcopy(joined)
    for i in range(1, 4):
        for attention, batches in ((joined, [tokens(i)]), (apart, tokens(i).split([3, 1]))):
            step(attention, torch.optim.SGD(attention.parameters(), lr=1e-3), *batches)
        torch.testing.assert_close(apart.centroids, joined.centroids, rtol=0, atol=1e-6)
    torch.testing.assert_close(apart.qkv.weight, joined.qkv.weight, rtol=0, atol=1e-5)


def test_only_the_owner_of_the_weights_moves_them(layer, tokens, step) -> None:
    attention, other = seeded(layer, tokens, step), nn.Linear(3, 3)
    before = attention.centroids.clone()
    attention(tokens(1)).sum().backward()
    other(torch.randn(2, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert torch.equal(attention.centroids, before)
    torch.optim.SGD([attention.proj.bias], lr=0.1).step()
    assert not torch.equal(attention.centroids, before)


@pytest.mark.parametrize(("tau_weighs", "rate"), [("new", 0.02), ("old", 0.98)])
def test_without_tau_it_follows_the_current_learning_rate(
    tau_weighs, rate, layer, tokens, step
) -> None:
    attention = seeded(layer, tokens, step, tau=None, tau_weighs=tau_weighs)
    optimizer = torch.optim.SGD(attention.parameters(), lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.2  # as a scheduler does
    query = attention.split_heads(tokens(1))[0].detach()
    groups = dgt.group_queries(query, attention.centroids)
    expected = dgt.update_centroids(attention.centroids, query, groups, rate)
    (attention(tokens(1)).square().mean() * 1e-3).backward()
    optimizer.step()
    torch.testing.assert_close(attention.centroids, expected, rtol=0, atol=1e-6)


class WithoutRate(torch.optim.Optimizer):
    """Finds its learning rate itself, as Adafactor does."""

    def step(self) -> None:
        """Leave the weights as they are."""


@pytest.mark.parametrize("seen", [{"lr": None}, {}])
def test_an_optimizer_without_a_learning_rate_needs_tau(seen, layer, tokens) -> None:
    for tau in (None, 0.3):
        attention = layer(tau=tau)
        optimizer = WithoutRate(attention.parameters(), seen)
        attention(tokens(0)).sum().backward()
        before = attention.centroids.clone()
        if tau is None:
            with pytest.raises(ValueError, match="tau must be a number from 0 to 1 where the opt"):
                optimizer.step()
        else:
            optimizer.step()
            assert not torch.equal(attention.centroids, before)


@pytest.mark.parametrize("tau_weighs", ["old", "new"])
def test_tau_weighs_the_term_it_is_told_to(tau_weighs, layer, tokens, step) -> None:
    """With tau = 0 the centroids stay, or are replaced by the new mean."""
    attention = seeded(layer, tokens, step, tau=0.0, tau_weighs=tau_weighs)
    before = attention.centroids.clone()
    query = attention.split_heads(tokens(1))[0].detach()
    mean = dgt.update_centroids(before, query, dgt.group_queries(query, before), 1.0)
    step(attention, torch.optim.SGD(attention.parameters(), lr=1e-3), tokens(1))
    torch.testing.assert_close(
        attention.centroids, before if tau_weighs == "new" else mean, rtol=0, atol=1e-6
    )


def test_padding_never_counts(layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    other = copy.deepcopy(attention)
    mask = torch.rand(4, 6, 5) < 0.6
    noisy = torch.where(mask[..., None], tokens(1), 50 * torch.randn(4, 6, 5, 16))
    for model, x in ((attention, tokens(1)), (other, noisy)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(x, mask).sum().backward()
        optimizer.step()
    torch.testing.assert_close(attention.centroids, other.centroids, rtol=0, atol=1e-6)


def test_padding_never_seeds(layer, tokens) -> None:
    mask = torch.rand(4, 6, 5) < 0.6
    noisy = torch.where(mask[..., None], tokens(1), 50 * torch.randn(4, 6, 5, 16))
    first, second = layer(), layer()
    first(tokens(1), mask)
    second(noisy, mask)
    assert torch.equal(first.centroids, second.centroids)


def test_a_batch_of_padding_alone_is_survived(layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    before = attention.centroids.clone()
    attention(tokens(1), torch.zeros(4, 6, 5, dtype=torch.bool)).sum().backward()
    torch.optim.SGD(attention.parameters(), lr=0.1).step()
    torch.testing.assert_close(attention.centroids, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_neither_gradients_nor_centroids(
    reentrant, layer, tokens
) -> None:
    """From the very first batch on, which initializes them."""
    plain, saving = layer(), layer()
    for i in range(3):
        grads = []
        for attention in (plain, saving):
            x = tokens(i).requires_grad_()
            out = (
                checkpoint(attention, x, use_reentrant=reentrant)
                if attention is saving
                else attention(x)
            )
            optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
            grads.append([x.grad, *(p.grad for p in attention.parameters())])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain.centroids, saving.centroids, rtol=0, atol=1e-6)


def test_a_skipped_step_moves_nothing(layer, tokens, step) -> None:
    """As with a gradient scaler on overflow: no optimizer step, then a normal one."""
    attention = seeded(layer, tokens, step)
    before = attention.centroids.clone()
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflow in (True, False):
        optimizer.zero_grad()
        loss = attention(tokens(1)).square().sum()
        scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(attention.centroids, before) == overflow
    assert is_unit(attention.centroids)


@pytest.mark.parametrize("cast", ["half", "to"])
def test_casting_the_layer_keeps_centroids_exact(cast, layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    before = attention.centroids.clone()
    attention = attention.to(torch.bfloat16) if cast == "to" else getattr(attention, cast)()
    assert attention.centroids.dtype == torch.float32
    assert torch.equal(attention.centroids, before)
    x = tokens(1).to(attention.qkv.weight.dtype)
    assert attention(x).dtype == x.dtype
    step(attention, torch.optim.SGD(attention.parameters(), lr=1e-3), x)
    assert attention.centroids.dtype == torch.float32
    assert is_unit(attention.centroids)
    assert not torch.equal(attention.centroids, before)
    assert torch.equal(
        attention.float().centroids.bfloat16().float(), attention.centroids.bfloat16().float()
    )


def test_autocast_keeps_centroids_exact(layer, tokens) -> None:
    """Under autocast the update is that of float32, applied to the queries that autocast produced."""
    attention = layer()
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
    for i in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            query = attention.split_heads(tokens(i))[0].detach()
            attention(tokens(i)).float().square().sum().backward()
        assert query.dtype == torch.bfloat16
        groups = dgt.group_queries(query, attention.unit_centroids())
        expected = dgt.update_centroids(attention.unit_centroids(), query, groups, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        assert attention.centroids.dtype == torch.float32
        torch.testing.assert_close(attention.centroids, expected, rtol=0, atol=1e-6)
        assert is_unit(attention.centroids)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
def test_a_copy_lives_on_its_own(duplicate, layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    other = duplicate(attention)
    before = attention.centroids.clone()
    step(other, torch.optim.SGD(other.parameters(), lr=1e-3), tokens(1))
    assert torch.equal(attention.centroids, before)
    assert not torch.equal(other.centroids, before)


def test_a_saved_state_goes_on_where_it_was(layer, tokens, step) -> None:
    attention, other = seeded(layer, tokens, step), layer()
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other.centroids, attention.centroids)
    for model in (attention, other):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3), tokens(1))
    assert torch.equal(other.centroids, attention.centroids)
    assert torch.equal(other.num_updates, attention.num_updates)


def test_centroids_that_were_copied_in_place_stay(layer, tokens, step) -> None:
    """As DDP copies those of its first rank: nothing tells the host that they have been learned."""
    attention, other = seeded(layer, tokens, step), layer()
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            tensor.copy_(attention.state_dict()[name])
    for model in (attention, other):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3), tokens(1))
    assert torch.equal(other.centroids, attention.centroids)


def test_a_state_in_half_precision_is_brought_to_float32(layer, tokens, step) -> None:
    state = seeded(layer, tokens, step).bfloat16().state_dict()
    other = layer()
    other.load_state_dict({**state, "centroids": state["centroids"].bfloat16()}, assign=True)
    assert (other.centroids.dtype, other.qkv.weight.dtype) == (torch.float32, torch.bfloat16)


def test_layers_may_be_built_while_an_optimizer_steps(layer, tokens, step) -> None:
    attention = layer()
    parameters = list(attention.parameters())
    others = []
    attention.parameters = lambda: others.append(layer()) or iter(parameters)
    step(attention, torch.optim.SGD(parameters, lr=1e-3), tokens(0))
    assert others


def test_layers_are_built_on_a_cpu_whatever_the_default_device(tokens) -> None:
    with torch.device("meta"):
        attention = dgt.DGAttention(16, 2, device="cpu")
    assert torch.equal(attention.centroids, dgt.DGAttention(16, 2).centroids)


def test_the_state_of_an_untrained_layer_is_still_to_be_seeded(layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    attention.load_state_dict(layer().state_dict())
    other = layer()
    for model in (attention, other):
        model(tokens(1))
    assert torch.equal(attention.centroids, other.centroids)


def train_with_average(attention, average, tokens, step) -> None:
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
    for i in range(5):
        step(attention, optimizer, tokens(i) * torch.tensor([1.0, -1.0])[i % 2])
        average(attention)


@pytest.mark.parametrize("kind", ["timm", "torch", "torch with buffers", "torch mean with buffers"])
def test_averaged_weights_use_unit_centroids(kind, layer, tokens, step) -> None:
    attention = layer(tau=0.9)
    if kind == "timm":
        ema = ModelEmaV3(attention, decay=0.6)
        averaged, update = ema.module, ema.update
    else:
        average = None if kind == "torch mean with buffers" else get_ema_avg_fn(0.6)
        ema = AveragedModel(attention, avg_fn=average, use_buffers=kind != "torch")
        averaged, update = ema.module, ema.update_parameters
    train_with_average(attention, update, tokens, step)
    averaged.eval()
    assert averaged.centroids.dtype == torch.float32
    assert is_unit(averaged.unit_centroids())
    if kind != "torch":
        assert not is_unit(averaged.centroids), (
            "the averages must have left the sphere for this test to mean something"
        )
    before = averaged(tokens(9))
    renormalize_centroids(averaged)
    assert is_unit(averaged.centroids)
    torch.testing.assert_close(averaged(tokens(9)), before, rtol=0, atol=1e-6)
    assert is_unit(attention.centroids)


def test_renormalizing_leaves_other_models_alone() -> None:
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(other.state_dict())
    renormalize_centroids(other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("backend", "dynamic", "batches", "graphs"),
    [
        ("aot_eager", True, (5, 2, 7), 1),  # as many images as groups, in the first batch
        ("aot_eager", None, (5, 2, 7), 2),
        ("inductor", None, (4, 4), 1),
    ],
)
def test_a_compiled_training_step_is_the_same(
    backend, dynamic, batches, graphs, layer, tokens, step
) -> None:
    """From the first on, which seeds; compiled for other batches once at most."""
    plain, other = layer(tau=None), layer(tau=None)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(other, fullgraph=True, dynamic=dynamic, backend=backend)
    for i, batch in enumerate(batches):
        x = tokens(i, batch, width=4)
        step(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), x)
        step(compiled, torch.optim.AdamW(other.parameters(), lr=1e-2), x)
        torch.testing.assert_close(other.centroids, plain.centroids, rtol=0, atol=1e-5)
        assert plain.num_updates == other.num_updates == i + 1
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_frozen_part_of_a_training_model_stays(layer, tokens, step) -> None:
    model = nn.ModuleList([seeded(layer, tokens, step), seeded(layer, tokens, step)])
    model[0].eval()
    before = [attention.centroids.clone() for attention in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    (model[0](tokens(1)) + model[1](tokens(1))).square().sum().backward()
    optimizer.step()
    assert torch.equal(model[0].centroids, before[0])
    assert not torch.equal(model[1].centroids, before[1])


def test_dropped_layers_are_forgotten(layer) -> None:
    dropped = weakref.ref(layer())
    assert dropped() is None


@pytest.mark.parametrize("use_buffers", [False, True])
def test_training_goes_on_from_averaged_weights(use_buffers, layer, tokens, step) -> None:
    """They are not initialized again: learned centroids stay."""
    attention = layer(tau=0.0)
    ema = AveragedModel(attention, avg_fn=get_ema_avg_fn(0.5), use_buffers=use_buffers)
    train_with_average(attention, ema.update_parameters, tokens, step)
    before = ema.module.unit_centroids().clone()
    ema.module.train()(-tokens(9))
    torch.testing.assert_close(ema.module.unit_centroids(), before)


@pytest.mark.parametrize("how", ["assigned", "set"])
def test_a_layer_that_is_given_its_weights_on_the_meta_device_learns(
    how, layer, tokens, step
) -> None:
    """With `load_state_dict`, or one by one and then `train`, as transformers does."""
    source = seeded(layer, tokens, step)
    made = dgt.DGAttention(16, 2, num_groups=5, top_k=6, tau=0.3, tau_weighs="new", device="meta")
    if how == "assigned":
        made.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    else:
        for name, buffer in source.named_buffers():
            setattr(made, name, buffer.clone())
        for name, weight in source.named_parameters():
            parent, _, child = name.rpartition(".")
            setattr(made.get_submodule(parent), child, nn.Parameter(weight.detach().clone()))
        made.eval().train()
    for model in (source, made):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3), tokens(1))
    assert torch.equal(made.centroids, source.centroids)


def test_a_frozen_layer_in_an_optimizer_stays(layer, tokens, step) -> None:
    attention, head = layer(), nn.Linear(16, 1)
    model = nn.Sequential(attention, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, tokens(0))
    attention.requires_grad_(False)
    before = attention.centroids.clone()
    step(model, optimizer, tokens(1))
    dgt.step_centroids(model, 0.1)
    assert torch.equal(attention.centroids, before)


def test_a_layer_that_was_always_frozen_stays_as_it_was_made(layer, tokens, step) -> None:
    attention, head = layer().requires_grad_(False), nn.Linear(16, 1)
    before = {name: buffer.clone() for name, buffer in attention.named_buffers()}
    model = nn.Sequential(attention, head)
    with pytest.warns(UserWarning, match=r"are random, and stay so.*dgt.calibrate\(model"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens(1))
    assert all(torch.equal(before[name], buffer) for name, buffer in attention.named_buffers())


class Adapted(nn.Module):
    """As of LoRA: a frozen linear, and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.extra = nn.Linear(base.in_features, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


@pytest.mark.parametrize("part", ["qkv", "proj"])
def test_adapters_leave_the_centroids_of_their_model(part, layer, tokens, step) -> None:
    """They are saved without buffers. Also where weights beside them are still trained."""
    attention = seeded(layer, tokens, step)
    before = {name: buffer.clone() for name, buffer in attention.named_buffers()}
    setattr(attention, part, Adapted(getattr(attention, part)))
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(2):
            step(attention, optimizer, tokens(i))
    assert all(torch.equal(before[name], buffer) for name, buffer in attention.named_buffers())


@pytest.mark.parametrize("nothing", ["no image", "padding alone", "NaN"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_first_batch_without_queries_seeds_nothing(nothing, joined, layer, tokens, step) -> None:
    attention, other = layer(), layer()
    if joined:
        dgt.convert_sync_centroids(attention)
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
    if nothing == "no image":
        step(attention, optimizer, tokens(0)[:0])
        assert all(weight.grad is not None for weight in attention.parameters())
    elif nothing == "padding alone":
        attention(tokens(0), torch.zeros(4, 6, 5, dtype=torch.bool)).sum().backward()
        optimizer.step()
    else:
        with pytest.raises(ValueError, match="NaN"):
            attention(tokens(0) * torch.nan)
    other.load_state_dict(attention.state_dict())
    assert attention.num_updates == 0
    for model in (attention, other):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3), tokens(1))
    assert torch.equal(attention.centroids, other.centroids)
    assert attention.num_updates == 1


@pytest.mark.parametrize("change", ["load", "assign", "reset"])
def test_training_goes_on_after_a_change_in_inference_mode(change, layer, tokens, step) -> None:
    attention = seeded(layer, tokens, step)
    state = copy.deepcopy(attention.state_dict())
    with torch.inference_mode():
        if change == "load":
            attention.load_state_dict(state)
        elif change == "assign":
            state["centroids"] = state["centroids"].double()
            attention.load_state_dict(state, assign=True)
        elif change == "reset":
            attention.reset_parameters()
        attention.eval()(tokens(0))
    updates = int(attention.num_updates)
    step(attention.train(), torch.optim.SGD(attention.parameters(), lr=1e-3), tokens(1))
    assert attention.num_updates == updates + 1


COUNT_CALLS = """
import sys
import torch


def calls_of_a_step():
    weights = [torch.ones(1, requires_grad=True) for _ in range(1000)]
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.step()
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    optimizer.step()
    sys.setprofile(None)
    return counted


before = calls_of_a_step()
import dgt
print(before, calls_of_a_step())
"""


def test_an_import_adds_no_call_to_the_steps_of_optimizers() -> None:
    said = subprocess.run(
        [sys.executable, "-c", COUNT_CALLS], capture_output=True, text=True, check=True
    )
    before, after = map(int, said.stdout.split())
    assert before > 1000
    assert after == before


def by_hand(attention: dgt.DGAttention, how: str) -> None:
    """A step of 0.1 that no optimizer makes."""
    for weight in attention.parameters():
        if how == "data":
            weight.data -= 0.1 * weight.grad
        elif how == "no_grad":
            with torch.no_grad():
                weight -= 0.1 * weight.grad
        else:  # an optimizer of float32 copies
            master = weight.detach().clone().requires_grad_()
            master.grad = weight.grad
            torch.optim.SGD([master], lr=0.1).step()
            weight.data.copy_(master)


@pytest.mark.parametrize("how", ["data", "no_grad", "master weights"])
def test_a_step_that_cannot_be_seen_is_told_of_once(how, layer, tokens) -> None:
    attention = layer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(4):
            attention.zero_grad()
            attention(tokens(i)).square().mean().backward()
            by_hand(attention, how)
    assert [str(each.message).count("dgt.step_centroids(model,") for each in caught] == [1]
    assert attention.num_updates == 0


def test_a_look_at_weights_nearby_is_no_missed_step(layer, tokens) -> None:
    """Sharpness-aware minimization: gradients at weights nearby, then a step from where they were."""
    attention = layer()
    optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            attention(tokens(i)).square().mean().backward()
            before = [weight.detach().clone() for weight in attention.parameters()]
            by_hand(attention, "data")
            attention.zero_grad()
            attention(tokens(i)).square().mean().backward()
            for weight, value in zip(attention.parameters(), before, strict=True):
                weight.data.copy_(value)
            optimizer.step()
    assert attention.num_updates == 3


@pytest.mark.parametrize("how", ["data", "no_grad", "master weights"])
def test_a_call_moves_centroids_as_the_step_of_an_optimizer_does(how, layer, tokens) -> None:
    seen, other = layer(tau=None), layer(tau=None)
    optimizer = torch.optim.SGD(seen.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            for model in (seen, other):
                model.zero_grad()
                model(tokens(i)).square().mean().backward()
            optimizer.step()
            dgt.step_centroids(seen, 0.1)  # nothing is left to do
            by_hand(other, how)
            dgt.step_centroids(other, 0.1)
    torch.testing.assert_close(other.centroids, seen.centroids, rtol=0, atol=1e-6)
    assert seen.num_updates == other.num_updates == 3


@pytest.mark.parametrize("change", ["load", "reset", "cast"])
def test_no_step_is_missed_where_weights_were_only_set(change, layer, tokens, step) -> None:
    attention = layer()
    attention(tokens(0))
    if change == "load":
        attention.load_state_dict(
            {name: value + 1 for name, value in attention.state_dict().items()}
        )
    elif change == "reset":
        attention.reset_parameters()
    else:
        attention.bfloat16().float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(tokens(1))


def test_a_transform_of_torch_func_is_refused_in_training(layer, tokens) -> None:
    attention = layer()
    before = {name: buffer.clone() for name, buffer in attention.named_buffers()}
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(ValueError, match="eval"):
            transform(lambda x: attention(x).sum())(tokens(0))
    assert all(torch.equal(before[name], buffer) for name, buffer in attention.named_buffers())


def test_nested_and_split_optimizers_move_centroids_once(layer, tokens, step) -> None:
    class Outer(torch.optim.Optimizer):
        """As those that average weights, or share them out: its step makes that of another."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(
                [p for group in inner.param_groups for p in group["params"]], {"lr": 1.0}
            )
            self.inner = inner

        def step(self) -> None:
            self.inner.step()

    plain = layer()
    matrices = [plain.qkv.weight, plain.proj.weight]
    biases = [plain.qkv.bias, plain.proj.bias]
    joined = dgt.convert_sync_centroids(layer())
    nested = layer()
    for i in range(3):
        first, second = torch.optim.SGD(matrices, lr=1e-3), torch.optim.SGD(biases, lr=1e-3)
        plain.zero_grad()
        plain(tokens(i)).square().sum().backward()
        first.step()
        second.step()
        for model in (joined, nested):
            step(model, Outer(torch.optim.SGD(model.parameters(), lr=1e-3)), tokens(i))
    assert plain.num_updates == joined.num_updates == nested.num_updates == 3
    for model in (joined, nested):
        torch.testing.assert_close(model.centroids, plain.centroids, rtol=0, atol=1e-6)


def test_joined_layers_alone_are_as_others_also_in_copies(layer, tokens, step) -> None:
    plain, joined = layer(), dgt.convert_sync_centroids(nn.ModuleList([layer(), layer()]))
    for model in (plain, *joined, *copy.deepcopy(joined)):
        step(model, torch.optim.SGD(model.parameters(), lr=1e-3), tokens(0))
        assert torch.equal(model.centroids, plain.centroids)


def test_unit_centroids_follow_whatever_changes_the_buffer() -> None:
    layer = dgt.DGAttention(16, num_heads=2, num_groups=4, top_k=3).eval()
    names = list(layer.state_dict())

    def follows() -> bool:
        return torch.equal(layer.unit_centroids(), F.normalize(layer.centroids, dim=-1))

    layer.centroids.data.add_(torch.randn(2, 4, 8))
    assert follows()
    layer.half()
    assert layer.unit_centroids().dtype == torch.float32
    assert follows()
    layer.centroids = torch.randn(2, 4, 8)
    assert follows()
    assert list(layer.state_dict()) == names


def test_weights_that_change_inside_of_a_step_are_no_missed_steps() -> None:
    """LBFGS changes them several times in one; `functional_call` puts others in their place."""
    layer = dgt.DGAttention(16, 2, num_groups=3, top_k=4)
    x = torch.randn(1, 12, 16)
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.01, max_iter=5)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = layer(x).square().mean()
        value.backward()
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            weights = {name: weight + step for name, weight in layer.named_parameters()}
            torch.func.functional_call(layer, weights, x)
        for _ in range(3):
            optimizer.step(loss)
    assert layer.num_updates == 3
