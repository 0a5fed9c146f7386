"""Every backend equals the dense reference, forward and backward, over random shapes of every kind."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import dgt
from dgt.ops import reference


class Dense(NamedTuple):
    """What the reference finds for a case."""

    group_ids: Tensor
    key_ids: Tensor
    results: tuple[Tensor, ...]  # the output, and the gradients of query, key and value


KNOWN: dict[int, Dense] = {}  # by the numbers of the cases: computed once for all backends


def dense_of(case, inputs, with_gradients) -> Dense:
    if case.number not in KNOWN:
        query, key, value, centroids, key_mask = inputs
        group_ids = dgt.group_queries(query, centroids, key_mask, "reference")
        key_ids = dgt.select_keys(centroids, key, case.top_k, key_mask, "reference")
        ids = group_ids, key_ids, None, "reference"
        KNOWN[case.number] = Dense(
            group_ids, key_ids, with_gradients(dgt.attend, (query, key, value), *ids)
        )
    return KNOWN[case.number]


def test_equals_the_reference(case, fast, build, close, with_gradients) -> None:
    query, key, value, centroids, key_mask = build(case)
    group_ids, key_ids, dense = dense_of(case, build(case), with_gradients)
    assert torch.equal(dgt.group_queries(query, centroids, key_mask, fast), group_ids)
    assert torch.equal(dgt.select_keys(centroids, key, case.top_k, key_mask, fast), key_ids)

    ours = with_gradients(dgt.attend, (query, key, value), group_ids, key_ids, None, fast)

    for what, actual, expected in zip(
        ("output", "query", "key", "value"), ours, dense, strict=True
    ):
        close(actual, expected, what)


@pytest.mark.parametrize("tokens", [40, 400])
def test_groups_and_keys_of_any_origin(tokens, fast, draw, close, with_gradients) -> None:
    """`attend` accepts any ids: empty places anywhere, groups without keys, fewer keys than queries."""
    query, key, value, _ = draw(2, 3, tokens, 8, 6)
    key, value = key[:, :, : tokens - 7], value[:, :, : tokens - 7]
    group_ids = torch.randint(-1, 6, (2, 3, tokens))
    key_ids = torch.rand(2, 3, 6, tokens - 7).argsort(-1)[..., :10]
    key_ids[torch.rand(key_ids.shape) < 0.3] = -1
    key_ids[:, 1, 2] = -1
    inputs = (query, key, value)

    ours = with_gradients(dgt.attend, inputs, group_ids, key_ids, 0.3, fast)
    dense = with_gradients(dgt.attend, inputs, group_ids, key_ids, 0.3, "reference")

    for actual, expected in zip(ours, dense, strict=True):
        close(actual, expected)
    assert not ours[0][group_ids < 0].any()
    assert not ours[0][:, 1][group_ids[:, 1] == 2].any()


@pytest.mark.parametrize("tokens", [60, 700])
def test_repetitions_are_equal_bit_for_bit(tokens, fast, draw, with_gradients) -> None:
    query, key, value, centroids = draw(2, 2, tokens, 32, 9)
    ids = dgt.group_queries(query, centroids), dgt.select_keys(centroids, key, 20)
    first, *others = (
        with_gradients(dgt.attend, (query, key, value), *ids, 0.2, fast) for _ in range(4)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("backend", ["reference", "torch"])  # those that support float64
@pytest.mark.parametrize("tokens", [9, 24])
def test_first_derivatives_in_float64(backend, tokens, draw) -> None:
    query, key, value, centroids = draw(1, 2, tokens, 3, 3, dtype=torch.float64)
    ids = dgt.group_queries(query, centroids), dgt.select_keys(centroids, key, 4)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    assert torch.autograd.gradcheck(lambda *qkv: dgt.attend(*qkv, *ids, backend=backend), inputs)


def test_second_derivatives_of_the_reference(draw) -> None:
    query, key, value, centroids = draw(1, 2, 6, 3, 3, dtype=torch.float64)
    ids = dgt.group_queries(query, centroids), dgt.select_keys(centroids, key, 4)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    assert torch.autograd.gradgradcheck(lambda *qkv: reference.attend(*qkv, *ids, 0.5), inputs)
