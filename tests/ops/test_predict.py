"""The attention in one operator equals the three steps, ties, padding, few and many tokens included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dgt
from dgt.ops import predict as one_operator


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 90),
    st.integers(1, 9),
    st.integers(1, 100),
    st.booleans(),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([1 << 8, 1 << 22]),
)
def test_equals_the_three_steps(seed, batch, heads, tokens, groups, top_k, ties, padding, part) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(3, batch, heads, tokens, 8, generator=generator)
    centroids = torch.randn(heads, groups, 8, generator=generator)
    if ties:
        qkv, centroids = qkv.round(), centroids.sign()
    mask = torch.rand(batch, tokens, generator=generator) >= padding if padding else None
    steps = dgt.dynamic_group_attention(*qkv, centroids, top_k, 0.3, mask, backend="reference").output
    before, one_operator.CHUNK_ELEMENTS = one_operator.CHUNK_ELEMENTS, part
    try:
        whole = torch.ops.dgt.attention(qkv, centroids, top_k, 0.3, mask)
    finally:
        one_operator.CHUNK_ELEMENTS = before
    torch.testing.assert_close(whole, steps.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", [0, 1])
def test_nan_is_refused(what) -> None:
    qkv = torch.randn(3, 1, 1, 20, 8)
    qkv[what, 0, 0, 3, 2] = torch.nan
    with pytest.raises(ValueError, match="must be free of NaN"):
        torch.ops.dgt.attention(qkv, torch.randn(1, 4, 8), 5, 0.3, None)


def test_the_operator_passes_the_checks_of_pytorch() -> None:
    for tokens, mask in ((12, None), (150, None), (12, torch.rand(2, 12) < 0.7)):
        arguments = (torch.randn(3, 2, 2, tokens, 8), torch.randn(2, 4, 8), 7, 0.4, mask)
        torch.library.opcheck(torch.ops.dgt.attention.default, arguments)
