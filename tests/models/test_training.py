"""Whole models in training: gradients everywhere, checkpointing, compilation, export."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch._dynamo.utils import counters

import dgt

# Two stages: images of 64 x 48 pixels have 192 tokens, more than the keys of a group, and 48, which are fewer.
SHORT = {"dims": (16, 32), "num_heads": (1, 2), "depths": (1, 1), "top_k": 50}


def attention_layers(model) -> list[dgt.DGAttention]:
    return [module for module in model.modules() if isinstance(module, dgt.DGAttention)]


@pytest.mark.parametrize("post_norm", [False, True])
def test_every_parameter_gets_a_gradient(post_norm, small) -> None:
    model = small(post_norm=post_norm).train()
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all()
    ] == []


def test_gradient_checkpointing_changes_neither_gradients_nor_centroids() -> None:
    plain = timm.create_model("dgt_nano", num_classes=10, tau=0.2).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (plain, saving)]
    for step in range(2):  # the first one initializes the centroids
        images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((plain, saving), optimizers, strict=True):
            optimizer.zero_grad()
            model(images).square().mean().backward()
        for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
            allowed = 1e-5 * max(1.0, a.grad.abs().max().item())
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=allowed, msg=name)
        before = [layer.centroids.clone() for layer in attention_layers(plain)]
        for optimizer in optimizers:
            optimizer.step()
        for old, a, b in zip(
            before, attention_layers(plain), attention_layers(saving), strict=True
        ):
            assert not torch.equal(old, a.centroids)
            torch.testing.assert_close(a.centroids, b.centroids, rtol=0, atol=1e-5)


def test_training_lowers_the_loss_and_keeps_centroids_on_the_sphere(small) -> None:
    model = small(tau=None).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = torch.randn(8, 3, 48, 48), torch.arange(8)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    for layer in attention_layers(model):
        assert layer.num_updates == 12
        torch.testing.assert_close(
            layer.centroids.norm(dim=-1), torch.ones(layer.centroids.shape[:2])
        )


@pytest.mark.parametrize("residual_keys", [0, 4])
def test_compiles_without_a_break(residual_keys, small) -> None:
    model, images = small(**SHORT, residual_keys=residual_keys), torch.randn(2, 3, 64, 48)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("residual_keys", "dynamic", "batches"), [(0, True, (4, 2)), (1, None, (2, 2))]
)
def test_a_compiled_training_step_is_the_same(residual_keys, dynamic, batches, small) -> None:
    """One graph, for batches of any size where it is dynamic."""
    plain = small(**SHORT, residual_keys=residual_keys).train()
    other = copy.deepcopy(plain)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(other, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for step, batch in enumerate(batches):
        images = torch.randn(batch, 3, 64, 48, generator=torch.Generator().manual_seed(step))
        for model, owner in ((plain, plain), (compiled, other)):
            optimizer = torch.optim.SGD(owner.parameters(), lr=1e-3)
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-5, msg=name)
        for a, b in zip(attention_layers(plain), attention_layers(other), strict=True):
            torch.testing.assert_close(a.centroids, b.centroids, rtol=0, atol=1e-5)
            assert a.num_updates == b.num_updates == step + 1
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_any_sizes_need_at_most_two_graphs(small) -> None:
    """A square first image makes the compiler assume squares; from the second image on it does not.

    Only for the first image does the second stage have fewer tokens than a group has keys.
    """
    model = small(**SHORT | {"top_k": 80})
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for size in ((64, 64), (96, 64), (75, 101)):
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-4)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def test_exports(small) -> None:
    model, images = small(**SHORT), torch.randn(2, 3, 64, 48)
    exported = torch.export.export(model, (images,))
    torch.testing.assert_close(exported.module()(images), model(images), rtol=0, atol=1e-5)
