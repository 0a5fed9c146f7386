"""Every backend equals the dense reference, forward and backward, over random shapes of every kind."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

import dgt
from dgt.ops import reference

KINDS = ("plain", "plain", "strided", "masked", "masked", "padded image", "one group", "zero queries")


class Case(NamedTuple):
    number: int
    batch: int
    heads: int
    tokens: int
    channels: int
    groups: int
    top_k: int
    kind: str


def draw_case(number: int) -> Case:
    """A shape by its number: most are small, every tenth is medium-sized, and some reach 5000 tokens.

    Odd numbers have few groups and keys, so that many of them fall into the many-token regime.
    """
    rng = random.Random(number)
    tokens = rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, 200), rng.randint(60, 200)))
    if number % 10 == 0:
        tokens = rng.randint(300, 900)
    if number % 33 == 1:
        tokens = 5000 if number == 1 else rng.randint(1500, 5000)
    batch, heads = (1, 1) if tokens > 900 else (rng.randint(1, 3), rng.randint(1, 3))
    groups, top_k = rng.randint(1, 48), rng.choice((1, rng.randint(1, 60), tokens, 2 * tokens))
    if number % 2 or tokens > 900:
        groups, top_k = rng.randint(1, 10), rng.randint(1, 12 if tokens < 900 else 128)
    return Case(number, batch, heads, tokens, rng.choice((1, 3, 8, 32)), groups, top_k, rng.choice(KINDS))


CASES = [draw_case(number) for number in range(220)]


def build(case: Case, draw) -> tuple:
    """The tensors of a case: query, key, value, centroids, key_mask."""
    query, key, value, centroids = draw(case.batch, case.heads, case.tokens, case.channels, case.groups, case.number)
    key_mask = None
    if case.kind == "strided":  # as after a joint projection
        packed = torch.stack([query, key, value]).permute(1, 3, 0, 2, 4).contiguous()
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        assert case.tokens == 1 or case.heads == case.batch == 1 or not key.is_contiguous()
    elif case.kind == "one group":
        query = centroids[None, :, -1:] + 0.001 * query
    elif case.kind == "zero queries":
        query = torch.zeros_like(query)
    elif case.kind in ("masked", "padded image"):
        key_mask = torch.rand(case.batch, case.tokens, generator=torch.Generator().manual_seed(case.number)) < 0.6
        key_mask[0] = case.kind == "masked"  # the first image has no padding, or no real token at all
    return query, key, value, centroids, key_mask


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-L{case.tokens}-k{case.top_k}-{case.kind}")
def test_equals_the_reference(case, fast, draw, close, with_gradients) -> None:
    query, key, value, centroids, key_mask = build(case, draw)
    group_ids = dgt.group_queries(query, centroids, key_mask, "reference")
    key_ids = dgt.select_keys(centroids, key, case.top_k, key_mask, "reference")
    assert torch.equal(dgt.group_queries(query, centroids, key_mask, fast), group_ids)
    assert torch.equal(dgt.select_keys(centroids, key, case.top_k, key_mask, fast), key_ids)

    ours = with_gradients(dgt.attend, (query, key, value), group_ids, key_ids, None, fast)
    dense = with_gradients(dgt.attend, (query, key, value), group_ids, key_ids, None, "reference")

    for what, actual, expected in zip(("output", "query", "key", "value"), ours, dense, strict=True):
        close(actual, expected, what)


def test_the_cases_are_of_every_kind() -> None:
    assert {case.kind for case in CASES} == set(KINDS)
    assert {min(case.tokens for case in CASES), max(case.tokens for case in CASES)} == {1, 5000}
    assert any(case.top_k > case.tokens for case in CASES)


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
    first, *others = (with_gradients(dgt.attend, (query, key, value), *ids, 0.2, fast) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("backend", ["reference", "torch"])  # those that support float64
@pytest.mark.parametrize("tokens", [9, 60])
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
