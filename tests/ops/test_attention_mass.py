"""The share of global attention on the selected keys: against a dense softmax, at its limits, and its errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import dgt
from dgt.ops import attention_mass as masses
from dgt.ops.attention_mass import (
    attention_mass,
    attention_mass_curve,
    diagnose_selection,
    residual_share,
)

B, H, L, D, G = 2, 3, 37, 8, 5


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and unit centroids."""
    query, key, value = torch.randn(3, B, H, L, D).unbind(0)
    return 2 * query, key, value, functional.normalize(torch.randn(H, G, D), dim=-1)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_mass_is_that_of_a_dense_softmax(
    tensors: tuple[Tensor, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value, centroids = tensors
    monkeypatch.setattr(masses, "CHUNK_ELEMENTS", rows * B * H * L)
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k=6)
    mass = attention_mass(query, key, found.group_ids, found.key_ids)
    weights = (query.double() @ key.double().mT * D**-0.5).softmax(-1)
    for b, h, i in [(0, 0, 0), (1, 2, 36), (0, 1, 17)]:
        keys = found.key_ids[b, h, found.group_ids[b, h, i]]
        assert float(mass[b, h, i]) == pytest.approx(float(weights[b, h, i, keys].sum()), rel=1e-5)


def test_weights_give_the_output_of_the_operator(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, centroids = tensors
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k=6, scale=0.7)
    weights = diagnose_selection(query, key, found.group_ids, found.key_ids, scale=0.7).weights
    ids = torch.take_along_dim(found.key_ids, found.group_ids[..., None], dim=2)  # (B, H, L, K)
    chosen = torch.take_along_dim(value[:, :, None], ids[..., None], dim=3)
    torch.testing.assert_close(torch.einsum("bhik,bhikd->bhid", weights, chosen), found.output)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L))


def test_all_keys_hold_everything(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, centroids = tensors
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k=L)
    mass = attention_mass(query, key, found.group_ids, found.key_ids)
    torch.testing.assert_close(mass, torch.ones(B, H, L))


@pytest.mark.parametrize("residual_keys", [1, 5])
@pytest.mark.parametrize("prefix", [0, 2])
def test_residual_keys_get_what_the_selected_keys_do_not(
    tensors: tuple[Tensor, ...], residual_keys: int, prefix: int
) -> None:
    """Exactly, where every query is a group of its own: it is then its group's mean."""
    query, key = tensors[:2]
    group_ids = torch.arange(L).expand(B, H, L)
    key_ids = torch.rand(B, H, L, L - prefix).argsort(-1)[..., :6] + prefix
    key_ids = torch.cat([torch.arange(prefix).expand(B, H, L, prefix), key_ids], dim=-1)
    share = residual_share(query, key, group_ids, key_ids, residual_keys, num_prefix_tokens=prefix)
    weights = (query.double() @ key.double().mT * D**-0.5).softmax(-1)
    left_out = 1 - weights.gather(-1, key_ids).sum(-1)
    torch.testing.assert_close(share, left_out.float(), rtol=0, atol=1e-5)


def test_residual_keys_get_nothing_of_padding_or_where_nothing_is_left(
    tensors: tuple[Tensor, ...],
) -> None:
    query, key, value, centroids = tensors
    real = torch.arange(L).expand(B, L) < torch.tensor([[L], [20]])
    found = dgt.dynamic_group_attention(
        query, key, value, centroids, top_k=25, query_mask=real, key_mask=real
    )
    share = residual_share(query, key, *found[1:], 1, key_mask=real)
    assert share[0].min() > 0
    assert share[1].max() < 1e-6  # all 20 keys are selected


def test_padding_neither_counts_nor_is_counted(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, centroids = tensors
    real = torch.arange(L).expand(B, L) < torch.tensor([[L], [20]])
    found = dgt.dynamic_group_attention(
        query, key, value, centroids, top_k=25, query_mask=real, key_mask=real
    )
    seen = diagnose_selection(query, key, found.group_ids, found.key_ids)
    short = dgt.dynamic_group_attention(
        *(x[1:, :, :20] for x in (query, key, value)), centroids, top_k=25
    )
    alone = diagnose_selection(query[1:, :, :20], key[1:, :, :20], short.group_ids, short.key_ids)
    torch.testing.assert_close(seen.mass[1:, :, :20], alone.mass)
    torch.testing.assert_close(seen.mass[1, :, :20], torch.ones(H, 20))
    assert seen.mass[1, :, 20:].eq(0).all()
    assert seen.weights[1, :, 20:].eq(0).all()


def test_curve_agrees_with_selection_at_every_k(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, centroids = tensors
    real = torch.arange(L).expand(B, L) < torch.tensor([[L], [20]])
    counts = [1, 5, 19, L]
    groups = dgt.dynamic_group_attention(
        query, key, value, centroids, 1, query_mask=real, key_mask=real
    ).group_ids
    curve = attention_mass_curve(query, key, centroids, groups, counts)
    for place, count in enumerate(counts):
        key_ids = dgt.select_keys(centroids, key, count, real)
        mass = attention_mass(query, key, groups, key_ids).sum(-1) / real.sum(-1)[:, None]
        torch.testing.assert_close(curve[..., place], mass)
    assert (curve.diff(dim=-1) >= 0).all()


def test_autocast_leaves_masses_alone(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, centroids = tensors
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k=6)

    def masses() -> list[Tensor]:
        ids = found.group_ids, found.key_ids
        return [
            attention_mass(query, key, *ids),
            attention_mass_curve(query, key, centroids, ids[0], [3]),
        ]

    with torch.autocast("cpu", torch.bfloat16):
        cast = masses()
    assert all(torch.equal(*pair) for pair in zip(cast, masses(), strict=True))
