"""Key selectors: each does what it claims, on small operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from studies.key_selectors import SELECTORS, Operands, attend_by, lattice, nearest

GRID = (6, 8)


def operands(grid: tuple[int, int] = GRID, batch: int = 2) -> Operands:
    """Random operands of two images and three heads."""
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, batch, 3, grid[0] * grid[1], 8, generator=random)
    centroids = F.normalize(torch.randn(3, 4, 8, generator=random), dim=-1)
    return Operands("layer", 2 * query, key, value, 0.5, grid, centroids)


def full(given: Operands) -> Tensor:
    """Global attention."""
    return F.scaled_dot_product_attention(given.query, given.key, given.value, scale=given.scale)


def masked(given: Operands, sees: Tensor) -> Tensor:
    """Dense attention under a mask."""
    return F.scaled_dot_product_attention(
        given.query, given.key, given.value, attn_mask=sees, scale=given.scale
    )


@pytest.mark.parametrize("choice", SELECTORS)
def test_all_keys_are_global_attention_and_images_do_not_meet(choice: str) -> None:
    """With k = L and beyond; with fewer keys, the first image does not depend on the second."""
    given = operands()
    for top_k in (48, 1000):
        torch.testing.assert_close(attend_by(choice, top_k, given), full(given))
    torch.manual_seed(0)
    some = attend_by(choice, 6, given)
    assert some.shape == given.query.shape
    assert some.isfinite().all()
    assert not torch.allclose(some, full(given))
    for tensor in given[1:4]:
        tensor[1] = torch.randn_like(tensor[1], generator=None)
    torch.manual_seed(0)
    torch.testing.assert_close(attend_by(choice, 6, given)[0], some[0])


@pytest.mark.parametrize("choice", [name for name in SELECTORS if name != "merged (ToMe)"])
def test_equal_values_come_out_as_they_are(choice: str) -> None:
    """Weights sum to 1, whichever keys are seen."""
    given = operands()._replace(value=torch.ones(2, 3, 48, 8))
    torch.testing.assert_close(attend_by(choice, 5, given), given.value)


def test_groups_are_those_of_the_operator_with_and_without_own_centroids() -> None:
    """Shared centroids, or separate ones per image."""
    given = operands()
    for choice, residual_keys in (("groups", 0), ("groups, remainder", 1)):
        want = dgt.dynamic_group_attention(
            *given[1:4], given.centroids, 7, given.scale, residual_keys=residual_keys
        ).output
        torch.testing.assert_close(attend_by(choice, 7, given), want)
        own = given._replace(centroids=given.centroids.expand(2, -1, -1, -1))
        torch.testing.assert_close(attend_by(choice, 7, own), want)


def test_each_query_sees_its_best_keys() -> None:
    """Equal to a mask over all pairs."""
    given = operands()
    scores = given.query @ given.key.mT
    last = scores.topk(5).values[..., -1:]
    torch.testing.assert_close(
        attend_by("best of each query", 5, given), masked(given, scores >= last)
    )


def test_a_window_is_a_square_that_stays_inside() -> None:
    """Centered on the token, shifted inward in a corner; equal to a mask."""
    near = nearest(GRID, 9)
    assert sorted(near[2 * 8 + 3].tolist()) == [10, 11, 12, 18, 19, 20, 26, 27, 28]
    assert {0, 1, 8, 9} <= set(near[0].tolist()) <= {0, 1, 2, 8, 9, 10, 16, 17, 18}
    given = operands()
    sees = torch.zeros(48, 48, dtype=torch.bool).scatter_(1, near, True)
    torch.testing.assert_close(attend_by("window", 9, given), masked(given, sees))


def test_a_lattice_covers_the_grid() -> None:
    """At most k cells with the grid's aspect ratio; all tokens if k is their number."""
    assert lattice((45, 60), 54) == (6, 9)
    for top_k in range(1, 49):
        rows, columns = lattice(GRID, top_k)
        assert rows * columns <= top_k
    assert lattice(GRID, 48) == GRID


def test_strided_keys_and_pooled_ones_lie_on_the_lattice() -> None:
    """12 of 48: the centers or the means of cells of 2 x 2."""
    given = operands()
    ids = [row * 8 + column for row in (1, 3, 5) for column in (1, 3, 5, 7)]
    sees = torch.zeros(48, dtype=torch.bool)
    sees[ids] = True
    torch.testing.assert_close(attend_by("strided", 12, given), masked(given, sees.expand(48, 48)))
    pooled = [
        t.unflatten(2, (3, 2, 4, 2)).mean((3, 5)).flatten(2, 3) for t in (given.key, given.value)
    ]
    want = F.scaled_dot_product_attention(given.query, *pooled, scale=given.scale)
    torch.testing.assert_close(attend_by("pooled", 12, given), want)


def test_blocks_are_seen_whole() -> None:
    """On 8 x 8 tokens 16 keys are one block of 4 x 4: the one whose mean key has the highest score."""
    given = operands((8, 8))
    block = (torch.arange(64) // 8 // 4) * 2 + torch.arange(64) % 8 // 4
    means = torch.stack([given.key[:, :, block == number].mean(2) for number in range(4)], dim=2)
    best = (given.query @ means.mT).argmax(-1)
    torch.testing.assert_close(
        attend_by("blocks", 16, given), masked(given, best[..., None] == block)
    )


def test_merging_equal_keys_loses_nothing() -> None:
    """Equal pairs of keys merged down to half give global attention, even if the values within a pair differ."""
    given = operands()
    given = given._replace(key=given.key[:, :, ::2].repeat_interleave(2, dim=2))
    torch.testing.assert_close(attend_by("merged (ToMe)", 24, given), full(given))


def test_a_remainder_makes_random_keys_exact_where_a_groups_queries_are_equal() -> None:
    """Then one key represents all the others; without the residual key they are lost."""
    given = operands()
    query = given.centroids[:, torch.arange(48) % 4].expand(2, -1, -1, -1).contiguous()
    given = given._replace(query=query)
    torch.testing.assert_close(attend_by("random, remainder", 3, given), full(given))
