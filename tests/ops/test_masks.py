"""A mask of keys hides keys, a mask of queries hides queries, whatever the lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dgt

# What computes attention to all keys, of query, key, value and masks.
CALLS: dict[str, dict[str, Any]] = {
    "groups": {},
    "groups and one residual key": {"residual_keys": 1},
    "groups and residual keys": {"residual_keys": 2},
    "clusters": {"residual_keys": 0},
    "clusters and residual keys": {"residual_keys": 2},
    "clusters to first order": {"residual_keys": 2, "first_order": True},
}
LENGTHS = st.integers(2, 40)
NUMBERS = st.integers(0, 2**31)


def attention_of(name: str, top_k: int, backend: str, prefix: int) -> Callable[..., Tensor]:
    more: dict[str, Any] = {"backend": backend, "num_prefix_tokens": prefix, **CALLS[name]}

    def attend(query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
        if name.startswith("clusters"):
            return dgt.clustered_attention(
                query, key, value, num_groups=1, top_k=top_k, **masks, **more
            )
        centroids = F.normalize(torch.ones(query.shape[1], 3, query.shape[3]), dim=-1)
        centroids = centroids * torch.tensor([1.0, -1.0, 1.0])[:, None]
        found = dgt.dynamic_group_attention(query, key, value, centroids, top_k, **masks, **more)
        query_mask = masks["query_mask"]
        if query_mask is not None:
            grouped = found.group_ids[:, :, prefix:] >= 0
            assert torch.equal(grouped, query_mask[:, None, prefix:].expand_as(grouped))
        return found.output

    return attend


def draw_mask(generator: torch.Generator, tokens: int, share: float | None) -> Tensor | None:
    return None if share is None else torch.rand(2, tokens, generator=generator) < share


def draw_inputs(queries: int, keys: int, number: int) -> tuple[torch.Generator, list[Tensor]]:
    generator = torch.Generator().manual_seed(number)
    shapes = ((2, 2, queries, 4), (2, 2, keys, 4), (2, 2, keys, 4))
    return generator, [torch.randn(shape, generator=generator) for shape in shapes]


SHARES = st.sampled_from([None, 0.0, 0.3, 0.9])


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(list(CALLS)), LENGTHS, LENGTHS, st.booleans(), SHARES, SHARES, NUMBERS)
def test_with_all_keys_it_is_pytorchs_attention(
    backend: str,
    name: str,
    queries: int,
    keys: int,
    of_itself: bool,
    share_of_queries: float | None,
    share_of_keys: float | None,
    number: int,
) -> None:
    keys = queries if of_itself else keys
    generator, inputs = draw_inputs(queries, keys, number)
    masks = {
        "query_mask": draw_mask(generator, queries, share_of_queries),
        "key_mask": draw_mask(generator, keys, share_of_keys),
    }
    prefix = number % 2 if queries == keys and keys > 3 else 0
    grad = torch.randn(inputs[0].shape, generator=generator)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key_mask, query_mask = masks["key_mask"], masks["query_mask"]
        sees = None if key_mask is None else key_mask[:, None, None].expand(-1, 1, queries, -1)
        output = F.scaled_dot_product_attention(query, key, value, sees)
        hidden = torch.zeros(2, queries, dtype=torch.bool) if query_mask is None else ~query_mask
        return output.masked_fill(hidden[:, None, :, None], 0.0)

    attend = attention_of(name, keys, backend, prefix)
    expected = with_gradients(exact, [tensor.double() for tensor in inputs], grad.double())
    found = with_gradients(lambda *qkv: attend(*qkv, **masks), inputs, grad)
    with torch.no_grad():
        found = [attend(*inputs, **masks), *found]
    for ours, theirs in zip(found, [expected[0], *expected], strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=2e-5)


def with_gradients(
    attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("keys", [20, 30])
def test_what_is_hidden_changes_nothing(name: str, backend: str, keys: int) -> None:
    """Neither groups, nor clusters, nor means, nor the choice of keys."""
    generator, (query, key, value) = draw_inputs(30, keys, 1)
    query_mask, key_mask = draw_mask(generator, 30, 0.6), draw_mask(generator, keys, 0.6)
    assert query_mask is not None
    assert key_mask is not None
    attend = attention_of(name, 4, backend, prefix=0)
    before = attend(query, key, value, query_mask=query_mask, key_mask=key_mask)
    query = query.where(query_mask[:, None, :, None], 9.0)
    key, value = (x.where(key_mask[:, None, :, None], -9.0) for x in (key, value))
    after = attend(query, key, value, query_mask=query_mask, key_mask=key_mask)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert not before.masked_fill(query_mask[:, None, :, None], 0.0).any()
