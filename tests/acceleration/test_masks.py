"""Masks of accelerated attention: what they hide, what looks at it, and what a recorded graph minds of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from transformers import LightGlueConfig
from transformers.models.lightglue.modeling_lightglue import LightGlueTransformerLayer

import dgt
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement

HEADS, CHANNELS = 2, 8
WIDTH = HEADS * CHANNELS
HIDES = {"-inf": -torch.inf, "finfo.min": torch.finfo(torch.float32).min, "-20000": -2e4}


class Attend(nn.Module):
    """Attention of one sequence to another, or to itself, under the mask that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, one: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        query = self.query(one).unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2)
        rest = self.rest(other).unflatten(-1, (2, HEADS, CHANNELS)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, *rest, mask).transpose(1, 2).flatten(2)


class MultiHead(nn.Module):
    """The same by PyTorch's module, whose mask is ``key_padding_mask``."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, one: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(one, other, other, key_padding_mask=mask, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = kind()

    def forward(self, *arguments: Tensor | None) -> Tensor:
        return self.attn(*arguments)


def accelerated(
    tokens: int, key_tokens: int, kind: type[nn.Module] = Attend, **setting
) -> nn.Module:
    """A model whose attention is in groups: with all keys selected, unless a setting says otherwise."""
    model = Model(kind).eval()
    numbers = {"groups": min(4, tokens), "keys": key_tokens, "least_tokens": 1, **setting}
    choice = numbers.pop("choice", "groups")
    site = AttentionSite(
        "attn.attend" if kind is MultiHead else "attn",
        heads=HEADS,
        tokens=tokens,
        key_tokens=key_tokens,
        channels=CHANNELS,
        measurement=Measurement(Setting(choice, **numbers)),
    )
    install_sites(model, [site])
    return model


def sequences(*lengths: int, images: int = 2, seed: int = 1) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(images, length, WIDTH, generator=draws) for length in lengths]


MASKS = ("none", "keys", "rows", "strided rows", "float keys", "float rows", "bias", "pairs")


def mask_of(kind: str, is_real: Tensor, queries: int, hides: float) -> Tensor | None:
    """A mask of (B, S) keys, as models pass it on."""
    keys = is_real[:, None, None]
    rows = keys.expand(-1, 1, queries, -1)
    values = torch.zeros(keys.shape).masked_fill(~keys, hides)
    generator = torch.Generator().manual_seed(3)
    kinds = {
        "keys": keys,
        "rows": rows.clone(),
        "strided rows": rows,
        "float keys": values,
        "float rows": values.expand(-1, 1, queries, -1).clone(),
        "bias": values + torch.randn(keys.shape, generator=generator),
        "pairs": torch.rand(rows.shape, generator=generator) < 0.7,
    }
    return kinds.get(kind)


def assert_equal_attention(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
@torch.no_grad()
def test_with_all_keys_selected_it_is_the_attention_of_pytorch(data) -> None:
    """Of every query, whatever the mask hides, in lengths that are equal or not."""
    tokens = data.draw(st.integers(2, 40), "queries")
    key_tokens = data.draw(st.one_of(st.just(tokens), st.integers(2, 40)), "keys")
    seed = data.draw(st.integers(0, 9), "seed")
    one, other = sequences(tokens, key_tokens, seed=seed)
    if tokens == key_tokens and data.draw(st.booleans(), "self-attention"):
        other = one
    share = data.draw(st.sampled_from((0.0, 0.3, 0.9)), "share hidden")
    draws = torch.Generator().manual_seed(seed)
    is_real = torch.rand(2, key_tokens, generator=draws) >= share
    kind = data.draw(st.sampled_from((Attend, MultiHead)), "module")
    hides = data.draw(st.sampled_from(tuple(HIDES.values())), "hides by")
    if kind is Attend:
        mask = mask_of(data.draw(st.sampled_from(MASKS), "mask"), is_real, tokens, hides)
    else:
        values = torch.zeros(is_real.shape).masked_fill(~is_real, hides)
        mask = data.draw(st.sampled_from((None, ~is_real, values)), "padding")
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it has NaN where all keys are hidden, not zero
    try:
        expected = Model(kind).eval()(one, other, mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    assert_equal_attention(accelerated(tokens, key_tokens, kind)(one, other, mask), expected)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@torch.no_grad()
def test_masks_whose_memory_holds_none(make) -> None:
    """They are tensors of a class of their own, and stay with PyTorch."""
    one, other = sequences(40, 60)
    for choice in ("groups", "exact"):
        model = accelerated(40, 60, choice=choice)
        assert_equal_attention(model(one, other, make(40, 60)), Model()(one, other, make(40, 60)))


@torch.no_grad()
def test_tokens_that_nobody_sees_read_out_the_others() -> None:
    """Self-attention alone says nothing of queries: those of hidden keys may be all that counts."""
    (x,) = sequences(60)
    is_seen = (torch.arange(60) >= 4).expand(2, 60)
    for kind, mask in ((Attend, is_seen[:, None, None]), (MultiHead, ~is_seen)):
        found = accelerated(60, 60, kind)(x, x, mask)
        assert_equal_attention(found, Model(kind).eval()(x, x, mask))


@torch.no_grad()
def test_both_attentions_of_lightglue() -> None:
    """Its cross-attention is between images of equally many points, padded each for itself."""
    sizes = {"descriptor_dim": 32, "num_attention_heads": 2, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    layer = LightGlueTransformerLayer(LightGlueConfig(**sizes, num_hidden_layers=1), 0).eval()
    points = torch.randn(4, 60, 32)
    turned = torch.randn(4, 60, 16)
    is_real = torch.arange(60)[None] < torch.tensor([60, 20, 35, 50])[:, None]
    arguments = (points, (turned.cos(), turned.sin()), is_real[:, None, None])
    expected = layer(*arguments)[0]
    numbers = Measurement(Setting("groups", groups=4, keys=60, least_tokens=1))
    sizes = {"heads": 2, "tokens": 60, "key_tokens": 60, "channels": 16, "measurement": numbers}
    install_sites(
        layer, [AttentionSite(f"{name}_attention", **sizes) for name in ("self", "cross")]
    )
    assert_equal_attention(layer(*arguments)[0], expected)


def hidden_tail(tokens: int, real: int) -> Tensor:
    return (torch.arange(tokens) < real).expand(2, tokens)


@torch.no_grad()
def test_the_guard_looks_at_every_query() -> None:
    """Only queries in whose place the other sequence is padded are badly served: it sees them."""
    one, other = sequences(200, 200)
    one[:, 150:] *= 30  # sharp: a few keys are not enough
    mask = hidden_tail(200, 150)[:, None, None]
    expected = Model()(one, other, mask)
    allowed = {"groups": 8, "keys": 4, "residual_keys": 0}
    unguarded = accelerated(200, 200, **allowed)(one, other, mask)
    assert (unguarded - expected).norm() > 0.2 * expected.norm()
    guarded = accelerated(200, 200, **allowed, allowed_error=1e-3)
    assert_equal_attention(guarded(one, other, mask), expected)
    (counts,) = dgt.guard_counts(guarded).values()
    assert (counts.checked, counts.dense) == (2, 2)


@pytest.mark.usefixtures("slow_attention")
@torch.no_grad()
def test_the_report_counts_every_query() -> None:
    model = Model()
    items = []
    for seed in range(4):
        one, other = sequences(200, 200, images=1, seed=seed)
        items.append((one, other, hidden_tail(200, 120)[:1, None, None]))
    before = [model(*item) for item in items]
    report = dgt.accelerate(model, items, 0.6)
    assert [row.setting.choice for row in report.layers] == ["groups"]
    squares = [
        ((model(*item) - output).square().sum(), output.square().sum())
        for item, output in zip(items, before, strict=True)
    ]
    checked = dgt.check_plan(model, items)
    error, norm = torch.tensor(squares).sum(0)
    assert checked.measured_error == pytest.approx(float((error / norm).sqrt()), rel=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("record", ["trace", "export"])
@pytest.mark.parametrize("kind", ["keys", "strided rows", "float keys", "rows", "padding"])
@torch.no_grad()
def test_a_recorded_graph_minds_later_masks(kind, record) -> None:
    """Recorded with a mask that hides nothing; where its shape is not enough, it says that it is not accelerated."""
    module = MultiHead if kind == "padding" else Attend
    one, other = sequences(60, 60)
    model = accelerated(60, 60, module)

    def mask(real: int) -> Tensor | None:
        is_real = hidden_tail(60, real)
        return ~is_real if kind == "padding" else mask_of(kind, is_real, 60, -torch.inf)

    def recorded() -> nn.Module:
        arguments = (one, other, mask(60))
        if record == "trace":
            return torch.jit.trace(model, arguments, check_trace=False)
        return torch.export.export(model, arguments).module()

    if kind == "keys":
        graph = recorded()
        assert "attend_in_clusters" in str(getattr(graph, "inlined_graph", graph.graph))
    else:
        with pytest.warns(RuntimeWarning, match=r"is not accelerated in this graph: .*mask"):
            graph = recorded()
    for real in (60, 40, 0):
        expected = Model(module).eval()(one, other, mask(real))
        assert_equal_attention(graph(one, other, mask(real)), expected)


@torch.no_grad()
def test_compiled_with_masks() -> None:
    one, other = sequences(60, 60)
    torch.compiler.reset()
    compiled = torch.compile(accelerated(60, 60), backend="aot_eager", fullgraph=True)
    for real in (60, 40):
        mask = hidden_tail(60, real)[:, None, None]
        assert_equal_attention(compiled(one, other, mask), Model()(one, other, mask))


def test_plans_of_cross_attention(tmp_path: Path) -> None:
    """What a plan says of sizes does not make an attention one of padded sequences."""
    row = {"name": "attn", "heads": HEADS, "channels": CHANNELS, "tokens": 60, "key_tokens": 60}
    row |= {"choice": "groups", "groups": 4, "keys": 60, "residual_keys": 0, "least_tokens": 16}
    report = dict.fromkeys(("asked_error", "predicted_error", "measured_error"), 0.1)
    report |= {"attention_speedup": 2.0, "model_speedup": 1.5, "bound": 2.0, "layers": [row]}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"format": "dgt-plan-2", "report": report}))
    model = Model()
    dgt.apply_plan(model, plan)
    one, other = sequences(60, 60)
    mask = hidden_tail(60, 30)[:, None, None]
    with torch.no_grad():
        assert_equal_attention(model(one, other, mask), Model()(one, other, mask))
