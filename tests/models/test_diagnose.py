"""`dgt.diagnose`: against dense attention by hand, at its limits, with padding, on other models; its errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dgt

CHOICES = ("selected", "random", "window", "best_for_all", "best_for_group", "best_for_query")


class Bare(nn.Module):
    """A third-party model: one layer that gets its tokens without a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dgt.DGAttention(dim=16, num_heads=2, num_groups=3, top_k=5)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.inner(
            functional.avg_pool2d(images, 8).flatten(2).mT.repeat(1, 1, 8)[..., :16]
        )
        return tokens


def sharpen(model: nn.Module) -> nn.Module:
    """Larger weights, so that attention is far from uniform."""
    torch.manual_seed(3)
    for layer in model.modules():
        if isinstance(layer, dgt.DGAttention):
            nn.init.normal_(layer.qkv.weight, std=0.6)
    return model


def test_a_layer_by_hand(small: Callable[..., dgt.DynamicGroupTransformer]) -> None:
    """Every measure of the first layer from a dense softmax, with keys selected one query or group at a time."""
    model, images = sharpen(small()), torch.randn(2, 3, 40, 56)
    found = dgt.diagnose(model, images)[0]
    record = dgt.group_records(model, images)[0]
    rows, columns = record.grid
    assert (found.name, found.tokens, found.groups, found.top_k) == (
        "stages.0.blocks.0.attn",
        rows * columns,
        5,
        7,
    )
    (first, *_), _ = dgt.models.capture(model, images, lambda seen: seen.layer.split_heads(seen.x))
    query, key, _ = first
    weights = (
        query.detach().double() @ key.detach().double().mT * query.shape[-1] ** -0.5
    ).softmax(-1)
    sums = dict.fromkeys(CHOICES, 0.0)
    batch, heads, tokens = record.attention.group_ids.shape
    for b in range(batch):
        for h in range(heads):
            groups = record.attention.group_ids[b, h]
            for i in range(tokens):
                mine, group = weights[b, h, i], groups[i]
                sums["selected"] += float(mine[record.attention.key_ids[b, h, group]].sum())
                sums["best_for_query"] += float(mine.topk(7).values.sum())
                sums["best_for_group"] += float(
                    mine[weights[b, h, groups == group].sum(0).topk(7).indices].sum()
                )
            sums["best_for_all"] += float(weights[b, h].sum(0).topk(7).values.sum())
    count = batch * heads * tokens
    for choice in ("selected", "best_for_all", "best_for_group", "best_for_query"):
        assert getattr(found, choice) == pytest.approx(sums[choice] / count, rel=1e-4)
    assert found.random == pytest.approx(7 / tokens)
    sizes = torch.bincount(record.attention.group_ids.flatten(), minlength=5).double()
    share = sizes / sizes.sum()  # one head
    assert found.perplexity == pytest.approx(float(torch.special.entr(share).sum().exp()))
    assert found.groups_in_use == int((sizes > 0).sum())
    distinct, overlaps = [], []
    for b in range(batch):
        used = record.attention.group_ids[b, 0].unique().tolist()
        lists = [set(record.attention.key_ids[b, 0, group].tolist()) for group in used]
        distinct.append(len(set.union(*lists)))
        overlaps += [len(one & other) / 7 for one, other in permutations(lists, 2)]
    assert found.distinct_keys == pytest.approx(sum(distinct) / batch)
    assert found.overlap == pytest.approx(sum(overlaps) / len(overlaps))


def test_the_order_that_must_hold(small: Callable[..., dgt.DynamicGroupTransformer]) -> None:
    """Nothing beats a query's own best keys, nor the best keys per group among group selections; k = L is exact."""
    model = sharpen(small())
    for block in dgt.diagnose(model, torch.randn(3, 3, 64, 64)):
        if block.top_k < block.tokens:
            assert block.random <= block.best_for_all <= block.best_for_group
            assert block.selected <= block.best_for_group <= block.best_for_query < 1
            assert block.window is not None
            assert block.window <= block.best_for_query
        assert 1 <= block.perplexity_per_image <= block.groups
        assert block.perplexity <= block.groups_in_use <= block.groups
    dgt.set_attention(model, top_k=10_000)
    for block in dgt.diagnose(model, torch.randn(1, 3, 64, 64)):
        assert [getattr(block, choice) for choice in CHOICES] == pytest.approx([1.0] * 6)


def test_attention_that_looks_near_falls_into_the_window() -> None:
    """Queries that match only the keys of their neighbors: the window holds all the mass, and 9 keys are 3 x 3."""
    side, near = (
        8,
        torch.cdist(places := torch.cartesian_prod(*[torch.arange(8.0)] * 2), places, p=torch.inf)
        <= 1,
    )
    key = torch.eye(side * side)[None, None]
    query = 40.0 * near.float()[None, None]
    groups = torch.zeros(1, 1, side * side, dtype=torch.int64)
    keys = torch.arange(9)[None, None, None]
    masses = dgt.ops.attention_mass.attention_mass_of_choices(
        query, key, groups, keys, 1.0, (side, side)
    )
    torch.testing.assert_close(masses["window"], torch.ones(1, 1, 64))
    torch.testing.assert_close(masses["best_for_query"], torch.ones(1, 1, 64))
    assert masses["selected"][0, 0, -1] < 1e-6


@pytest.mark.parametrize("rows", [1, 5])
def test_slices_of_queries_change_nothing(
    small: Callable[..., dgt.DynamicGroupTransformer], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = sharpen(small()), torch.randn(2, 3, 48, 32)
    whole = dgt.diagnose(model, images)
    monkeypatch.setattr(dgt.ops.attention_mass, "CHUNK_ELEMENTS", rows * 2 * 2 * 96)
    for one, other in zip(whole, dgt.diagnose(model, images), strict=True):
        assert [getattr(one, choice) for choice in CHOICES] == pytest.approx(
            [getattr(other, c) for c in CHOICES]
        )


def test_padding_does_not_count(small: Callable[..., dgt.DynamicGroupTransformer]) -> None:
    """An image that is half padding gives the same result as its real half alone."""
    model, image = sharpen(small()), torch.randn(1, 3, 64, 64)
    mask = torch.zeros(1, 64, 64, dtype=torch.bool)
    mask[:, :, :32] = True
    for one, other in zip(
        dgt.diagnose(model, image, mask),
        dgt.diagnose(model, image[..., :32].contiguous()),
        strict=True,
    ):
        of_groups = (
            "perplexity",
            "perplexity_per_image",
            "groups_in_use",
            "distinct_keys",
            "overlap",
        )
        for measure in (*CHOICES, *of_groups):
            assert getattr(one, measure) == pytest.approx(getattr(other, measure), rel=1e-4), (
                one.name,
                measure,
            )


def test_the_model_is_left_as_it_was(small: Callable[..., dgt.DynamicGroupTransformer]) -> None:
    model = small().train()
    model.stages[1].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dgt.diagnose(model, torch.randn(1, 3, 32, 32))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_foreign_model_without_a_grid() -> None:
    (block,) = dgt.diagnose(Bare(), torch.randn(2, 3, 32, 40))
    assert (block.name, block.tokens, block.window) == ("inner", 20, None)
    assert block.random == pytest.approx(5 / 20)


def test_mistakes(small: Callable[..., dgt.DynamicGroupTransformer]) -> None:
    with pytest.raises(TypeError, match="model must be a module, got str"):
        dgt.diagnose("dgt_nano", torch.randn(1, 3, 32, 32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must contain DGAttention layers, got a Linear"):
        dgt.diagnose(nn.Linear(2, 2), torch.randn(1, 3, 32, 32))
    model = small()
    with pytest.raises(ValueError, match="at least 32 x 32"):
        dgt.diagnose(model, torch.randn(1, 3, 16, 16))
    assert not any(module._forward_pre_hooks for module in model.modules())
    tokens, ids = torch.randn(1, 1, 6, 4), torch.zeros(1, 1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"grid must have 6 cells, one per token, got \(2, 2\)"):
        dgt.ops.attention_mass.attention_mass_of_choices(
            tokens, tokens, ids, ids[:, :, None, :2], grid=(2, 2)
        )
