"""The top-k keys of every group (Eq. 1): the right set, ties to the lowest index, ascending order, no padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dgt


def oracle(scores: list[float], top_k: int, real: list[bool]) -> list[int]:
    """Ids of the largest scores, ties to the lowest index, ascending, padded with -1."""
    ranked = sorted((i for i in range(len(scores)) if real[i]), key=lambda i: (-scores[i], i))
    chosen = sorted(ranked[:top_k])
    return chosen + [-1] * (min(top_k, len(scores)) - len(chosen))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 2),
    st.integers(1, 80),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 90),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_selection_equals_a_plain_sort(
    backend, seed, heads, tokens, channels, groups, top_k, padding
) -> None:
    """Small integers, so that scores are exact with many ties."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randint(-2, 3, (2, heads, tokens, channels), generator=generator).float()
    centroids = torch.randint(-1, 2, (heads, groups, channels), generator=generator).float()
    mask = torch.rand(2, tokens, generator=generator) >= padding if padding else None
    ids = dgt.select_keys(centroids, key, top_k, mask, backend)
    scores = torch.einsum("hgd,bhld->bhgl", centroids, key)
    for b in range(2):
        real = [True] * tokens if mask is None else mask[b].tolist()
        expected = [oracle(row, top_k, real) for row in scores[b].flatten(0, 1).tolist()]
        assert ids[b].flatten(0, 1).tolist() == expected


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([512, 513, 519, 768, 1025, 2500]),
    st.sampled_from([1, 7, 63, 64, 65, 130, 313]),
    st.sampled_from(["no ties", "ties", "all equal"]),
    st.sampled_from([0.0, 0.3, 0.99]),
)
def test_of_many_keys_those_that_may_be_among_the_largest_are_sorted(
    fast, seed, tokens, top_k, ties, padding
) -> None:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randint(-(2**20), 2**20, (2, 1, tokens, 1), generator=generator) / 2**20
    key = {"no ties": key, "ties": (4 * key).round(), "all equal": key * 0}[ties]
    mask = torch.rand(2, tokens, generator=generator) >= padding if padding else None
    centroids = torch.tensor([[[1.0], [-1.0], [0.5]]])
    expected = dgt.select_keys(centroids, key, top_k, mask, "reference")
    assert torch.equal(dgt.select_keys(centroids, key, top_k, mask, fast), expected)


@pytest.mark.parametrize("place", [0, 511, 512, 599])
def test_nan_is_found_among_many_keys(place) -> None:
    key = torch.randn(1, 1, 600, 4)
    key[..., place, 0] = torch.nan
    with pytest.raises(ValueError, match="key must not contain NaN"):
        dgt.select_keys(torch.ones(1, 2, 4), key, 5)


@pytest.mark.parametrize("tokens", [50, 3000])
def test_equal_keys_are_taken_from_the_front(tokens) -> None:
    key = torch.randn(1, 1, 1, 16).expand(2, 1, tokens, 16)
    centroids = torch.nn.functional.normalize(torch.randn(1, 5, 16), dim=-1)
    assert torch.equal(dgt.select_keys(centroids, key, 7), torch.arange(7).expand(2, 1, 5, 7))


def test_signed_zeros_tie(backend) -> None:
    key = torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0]).view(1, 1, 5, 1)
    centroids = torch.tensor([[[1.0], [-1.0]]])
    assert dgt.select_keys(centroids, key, 2, backend=backend).tolist() == [[[[0, 1], [0, 4]]]]


def test_repeated_keys_are_taken_from_the_front(draw) -> None:
    """The second copy of an image is selected only when the first is used up."""
    _, key, _, centroids = draw(1, 2, 64, 32, 6)
    ids = dgt.select_keys(centroids, torch.cat([key, key], dim=2), 21)
    best = dgt.select_keys(centroids, key, 11)
    first, second = (sorted_ids(ids, half) for half in (0, 64))
    for h in range(2):
        for g in range(6):
            assert first[h][g] == best[0, h, g].tolist()
            assert set(second[h][g]) < set(first[h][g])
            assert len(second[h][g]) == 10


def sorted_ids(ids: torch.Tensor, start: int) -> list[list[list[int]]]:
    """Ids within the 64 tokens from ``start`` on, relative to it, by head and group."""
    return [
        [[i - start for i in row if start <= i < start + 64] for row in head]
        for head in ids[0].tolist()
    ]


def test_scores_that_differ_by_the_last_bit_do_not_tie() -> None:
    key = torch.tensor([1.0, 1.0 + 2**-23, 1.0]).view(1, 1, 3, 1)
    assert dgt.select_keys(torch.ones(1, 1, 1), key, 1).tolist() == [[[[1]]]]


def test_infinite_scores_are_handled(backend) -> None:
    """Infinity is always selected; minus infinity never is."""
    key = torch.tensor([0.0, torch.inf, 1.0, -torch.inf]).view(1, 1, 4, 1)
    assert dgt.select_keys(torch.ones(1, 1, 1), key, 2, backend=backend).tolist() == [[[[1, 2]]]]
    assert dgt.select_keys(torch.ones(1, 1, 1), key, 4, backend=backend).tolist() == [
        [[[0, 1, 2, -1]]]
    ]
