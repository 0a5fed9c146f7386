"""Assignment of queries to groups, the update of centroids (Eqs. 3-4), and seeding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import dgt
from dgt.ops.grouping import blend_centroids, group_statistics


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 90),
    st.integers(1, 9),
    st.integers(1, 20),
)
def test_the_nearest_centroid_wins_and_ties_go_to_the_lowest(
    backend, seed, heads, tokens, channels, groups
) -> None:
    """Small integers, so that scores are exact with many ties; the oracle is a plain loop."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(-2, 3, (2, heads, tokens, channels), generator=generator).float()
    centroids = torch.randint(-1, 2, (heads, groups, channels), generator=generator).float()
    scores = torch.einsum("bhld,hgd->bhlg", query, centroids).flatten(0, 2).tolist()
    expected = [max(range(groups), key=lambda g, row=row: (row[g], -g)) for row in scores]
    assert dgt.group_queries(query, centroids, backend=backend).flatten().tolist() == expected


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_queries_and_signed_zeros_tie(zero) -> None:
    query = torch.full((1, 1, 5, 3), zero)
    centroids = torch.eye(3)[None] * torch.tensor([-1.0, 1.0, -1.0])[:, None]
    assert dgt.group_queries(query, centroids).tolist() == [[[0] * 5]]


def test_duplicated_centroids_leave_the_later_ones_empty(draw) -> None:
    query, _, _, centroids = draw(2, 2, 300, 32, 8)
    twice = torch.cat([centroids, centroids], dim=1)
    assert torch.equal(dgt.group_queries(query, twice), dgt.group_queries(query, centroids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_are_float32_whatever_the_type(dtype, draw) -> None:
    query, key, _, centroids = draw(2, 2, 100, 32, 16, dtype=dtype)
    assert torch.equal(
        dgt.group_queries(query, centroids), dgt.group_queries(query.float(), centroids)
    )
    assert torch.equal(
        dgt.select_keys(centroids, key, 9), dgt.select_keys(centroids, key.float(), 9)
    )


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.3, 1 - 1e-4, 1.0])
def test_update_is_equations_3_and_4(rate, draw) -> None:
    """Head by head and group by group, in a plain float64 loop."""
    query, _, _, centroids = draw(3, 2, 50, 8, 7)
    mask = torch.rand(3, 50) < 0.7
    group_ids = dgt.group_queries(query, centroids, mask)
    group_ids[group_ids == 4] = 2  # group 4 is empty
    updated = dgt.update_centroids(centroids, query, group_ids, rate)
    for h in range(2):
        for g in range(7):
            members = F.normalize(query[:, h][group_ids[:, h] == g].double(), dim=-1)
            old = centroids[h, g].double()
            new = (
                old
                if len(members) == 0
                else F.normalize((1 - rate) * old + rate * members.mean(0), dim=0)
            )
            torch.testing.assert_close(updated[h, g].double(), new, rtol=0, atol=1e-6)
    assert torch.equal(updated[:, 4], centroids[:, 4])
    torch.testing.assert_close(updated.norm(dim=-1), torch.ones(2, 7), rtol=0, atol=1e-6)


def test_the_update_leaves_its_arguments_and_keeps_their_type(draw) -> None:
    query, _, _, centroids = draw(1, 2, 20, 8, 3)
    group_ids = dgt.group_queries(query, centroids)
    copies = query.clone(), centroids.clone(), group_ids.clone()
    assert dgt.update_centroids(centroids.double(), query, group_ids, 0.5).dtype == torch.float64
    dgt.update_centroids(centroids, query, group_ids, 0.5)
    assert all(
        torch.equal(a, b) for a, b in zip((query, centroids, group_ids), copies, strict=True)
    )


def test_statistics_of_parts_add_up(draw) -> None:
    query, _, _, centroids = draw(4, 2, 60, 8, 5)
    group_ids = dgt.group_queries(query, centroids, torch.rand(4, 60) < 0.8)
    whole = group_statistics(query, group_ids, 5)
    parts = [group_statistics(query[i : i + 2], group_ids[i : i + 2], 5) for i in (0, 2)]
    for total, *pieces in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(pieces), total, rtol=0, atol=1e-5)
    assert whole[1].sum() == (group_ids >= 0).sum()


def test_a_diverged_step_moves_nothing(draw) -> None:
    query, _, _, centroids = draw(1, 1, 20, 8, 4)
    group_ids = dgt.group_queries(query, centroids)
    sums, counts = group_statistics(query, group_ids, 4)
    sums[0, 1] = torch.nan
    sums[0, 2] = torch.inf
    moved = blend_centroids(centroids, sums, counts, 0.5)
    assert torch.equal(moved[0, 1:3], centroids[0, 1:3])
    assert moved.isfinite().all()
    assert not torch.equal(moved[0, 0], centroids[0, 0])


def test_seeding_separates_clear_clusters() -> None:
    """Seven distant directions with 40 noisy tokens each: each gets its own group."""
    directions = torch.eye(8)[:7]
    tokens = directions.repeat_interleave(40, dim=0) + 0.05 * torch.randn(280, 8)
    tokens = tokens * (0.1 + 5 * torch.rand(280, 1))  # norms carry no information
    centroids = dgt.seed_centroids(torch.stack([tokens, tokens.flip(0)]), 7)
    groups = dgt.group_queries(tokens[None, None], centroids[:1])[0, 0].view(7, 40)
    assert all(len(set(row)) == 1 for row in groups.tolist())
    assert len(set(groups[:, 0].tolist())) == 7


@pytest.mark.parametrize(("count", "groups"), [(300, 12), (5, 12), (1, 3), (12, 12)])
def test_seeding_is_deterministic_and_of_unit_norm(count, groups) -> None:
    """Also with fewer tokens than groups, and for any global random state."""
    tokens = torch.randn(2, count, 16)
    first = dgt.seed_centroids(tokens, groups)
    torch.manual_seed(99)
    assert torch.equal(dgt.seed_centroids(tokens, groups), first)
    assert (first.shape, first.dtype) == ((2, groups, 16), torch.float32)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(2, groups))


def test_seeding_draws_nothing_from_the_global_random_state() -> None:
    before = torch.get_rng_state()
    dgt.seed_centroids(torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(1)), 5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_the_default_type_changes_no_first_centroids(kind) -> None:
    tokens = torch.randn(2, 300, 16)
    before = (dgt.seed_centroids(tokens, 8), dgt.DGAttention(32, 2).centroids)
    torch.set_default_dtype(kind)
    try:
        after = (dgt.seed_centroids(tokens, 8), dgt.DGAttention(32, 2).centroids)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, before, after))


def test_seeding_survives_equal_tokens() -> None:
    centroids = dgt.seed_centroids(torch.ones(1, 30, 4), 6)
    torch.testing.assert_close(centroids, torch.full((1, 6, 4), 0.5))


def test_opposite_queries_cannot_push_a_centroid_to_zero() -> None:
    """The old centroid and the mean cancel: the result must still be a direction."""
    centroids = torch.tensor([[[1.0, 0.0]]])
    query = torch.tensor([[[[-1.0, 0.0]]]])
    updated = dgt.update_centroids(centroids, query, torch.zeros(1, 1, 1, dtype=torch.int64), 0.5)
    torch.testing.assert_close(updated.norm(dim=-1), torch.ones(1, 1))


def test_tokens_without_direction_seed_unit_centroids() -> None:
    seeded = dgt.seed_centroids(torch.zeros(1, 9, 4), 3)
    torch.testing.assert_close(seeded.norm(dim=-1), torch.ones(1, 3))
