"""Residual keys for the keys that are not selected, and related features: sums, biases, prefixes, other shapes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dgt
from dgt import attend_with_logsumexp, find_centroids, merge_attention, seed_centroids
from dgt.ops.dispatch import choose_steps


def oracle(
    query: Tensor, key: Tensor, value: Tensor, found: dgt.DynamicGroupAttentionOutput, scale: float
) -> Tensor:
    """The definition, group by group in float64: the selected keys, and one residual key for the others."""
    rows = []
    for b, h in ((b, h) for b in range(query.shape[0]) for h in range(query.shape[1])):
        q, k, v, groups = query[b, h], key[b, h], value[b, h], found.group_ids[b, h]
        out = torch.zeros_like(q)
        for group in groups.unique().tolist():
            mine = groups == group
            ids = found.key_ids[b, h, group]
            left = torch.ones(len(k), dtype=torch.bool).index_fill(0, ids, False)
            score = scale * q[mine] @ k[ids].T
            values = v[ids]
            if left.any():
                mean = q[mine].mean(0)
                mass = scale * k[left] @ mean
                share = mass.softmax(0)
                rest = share @ k[left]
                constant = mass.logsumexp(0) - scale * mean @ rest
                score = torch.cat([score, (scale * q[mine] @ rest + constant)[:, None]], dim=1)
                values = torch.cat([values, (share @ v[left])[None]])
            out = out.index_put((mine.nonzero()[:, 0],), score.softmax(-1) @ values)
        rows.append(out)
    return torch.stack(rows).view(query.shape)


@pytest.mark.parametrize("number", range(200))
def test_equals_the_definition(number, fast, draw, close, with_gradients) -> None:
    rng = random.Random(number)
    tokens = rng.choice(
        (1, 2, rng.randint(3, 30), rng.randint(30, 120), 400 if number % 20 == 0 else 60)
    )
    groups, top_k = rng.randint(1, 9), rng.choice((1, rng.randint(1, 30), tokens))
    inputs = draw(
        rng.randint(1, 2), rng.randint(1, 2), tokens, rng.choice((1, 3, 8, 32)), groups, number
    )
    query, key, value, centroids = inputs
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k)
    scale = rng.choice((0.1, query.shape[-1] ** -0.5, 1.0))

    def run(*qkv: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *qkv, centroids, top_k, scale, residual_keys=1, backend=fast
        ).output

    ours = with_gradients(run, (query, key, value))
    exact = with_gradients(
        lambda *qkv: oracle(*qkv, found, scale), tuple(t.double() for t in (query, key, value))
    )
    for what, actual, expected in zip(
        ("output", "query", "key", "value"), ours, exact, strict=True
    ):
        close(actual, expected.float(), what)


@pytest.mark.parametrize("tokens", [30, 300])
def test_of_all_keys_nothing_is_left(tokens, backend, draw, close) -> None:
    query, key, value, centroids = draw(2, 3, tokens, 16, 5)
    found = dgt.dynamic_group_attention(
        query, key, value, centroids, tokens, backend=backend, residual_keys=1
    )
    close(found.output, F.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("top_k", [1, 7])
def test_is_exact_where_the_queries_of_a_group_are_equal(top_k, draw, close) -> None:
    query, key, value, centroids = draw(1, 2, 50, 8, 4)
    query = 3 * centroids.repeat_interleave(13, dim=1)[None, :, :50]
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k, residual_keys=1)
    weights = (query @ key.mT * 8**-0.5).softmax(-1)
    mass = weights.gather(
        -1, torch.take_along_dim(found.key_ids, found.group_ids[..., None], 2)
    ).sum(-1)
    assert mass.max() < 0.95
    # The residual key's mass is exact, and so is its value, the mean of the other keys' values.
    close(found.output, weights @ value)


def test_padding_is_no_part_of_it(backend, draw, close) -> None:
    query, key, value, centroids = draw(2, 2, 60, 8, 4)
    mask = torch.zeros(2, 60, dtype=torch.bool)
    mask[:, :41] = True
    whole = dgt.dynamic_group_attention(
        query, key, value, centroids, 6, None, mask, backend, query_mask=mask, residual_keys=1
    ).output
    alone = (tensor[:, :, :41] for tensor in (query, key, value))
    found = dgt.dynamic_group_attention(*alone, centroids, 6, None, None, backend, residual_keys=1)
    close(whole[:, :, :41], found.output)
    assert not whole[:, :, 41:].any()


def test_comes_nearer_to_global_attention(draw) -> None:
    query, key, value, _ = draw(2, 2, 400, 16, 1)
    # Eight kinds of queries.
    query = 0.3 * query + 0.6 * torch.randn(2, 2, 8, 16).repeat(1, 1, 50, 1)
    centroids = seed_centroids(query.transpose(0, 1).flatten(1, 2), 8)
    whole = F.scaled_dot_product_attention(query, key, value)
    errors = []
    for chosen, residual_keys in (
        (centroids, 0),
        (centroids, 1),
        (find_centroids(query, centroids), 1),
    ):
        output = dgt.dynamic_group_attention(
            query, key, value, chosen, 20, residual_keys=residual_keys
        ).output
        errors.append(float((output - whole).norm() / whole.norm()))
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[1]


@pytest.mark.parametrize("tokens", [40, 500])
def test_two_attentions_over_halves_are_one_over_all(
    tokens, backend, draw, close, with_gradients
) -> None:
    query, key, value, centroids = draw(2, 2, tokens, 16, 4)
    group_ids = dgt.group_queries(query, centroids)
    key_ids = dgt.select_keys(centroids, key, 24)

    def in_parts(*qkv: Tensor) -> Tensor:
        parts = (
            attend_with_logsumexp(*qkv, group_ids, ids, None, backend)
            for ids in key_ids.split(10, dim=-1)
        )
        return merge_attention(*parts)[0]

    whole = with_gradients(dgt.attend, (query, key, value), group_ids, key_ids, None, backend)
    for actual, expected in zip(with_gradients(in_parts, (query, key, value)), whole, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("tokens", [40, 500])
def test_logarithms_of_sums(tokens, backend, draw) -> None:
    query, key, value, centroids = draw(2, 2, tokens, 16, 4)
    group_ids = dgt.group_queries(query, centroids).index_fill(2, torch.tensor([3]), -1)
    key_ids = dgt.select_keys(centroids, key, 12)
    output, found = attend_with_logsumexp(query, key, value, group_ids, key_ids, 0.3, backend)
    score = 0.3 * query.double() @ key.double().mT
    chosen = score.gather(
        -1, torch.take_along_dim(key_ids, group_ids.clamp(min=0)[..., None], 2)
    ).logsumexp(-1)
    real = group_ids >= 0
    assert float((found.double() - chosen)[real].abs().max()) < 1e-6 * float(chosen.abs().max())
    assert found[~real].isneginf().all()
    assert torch.allclose(
        output, dgt.attend(query, key, value, group_ids, key_ids, 0.3, backend), atol=1e-6
    )
    merged, sums = merge_attention((output, found), (output, torch.full_like(found, -torch.inf)))
    assert torch.equal(merged, output)
    assert torch.equal(sums, found)


@pytest.mark.parametrize("tokens", [12, 90])
def test_gradients_of_all_that_is_new(tokens, draw) -> None:
    query, key, value, centroids = draw(1, 2, tokens, 4, 3, dtype=torch.float64)
    group_ids, key_ids = dgt.group_queries(query, centroids), dgt.select_keys(centroids, key, 5)
    bias = torch.randn(1, 2, tokens, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, b: attend_with_logsumexp(q, k, v, group_ids, key_ids, None, "torch", b),
        leaves,
        fast_mode=True,
    )
    assert torch.autograd.gradcheck(
        lambda *qkv: (
            dgt.dynamic_group_attention(*qkv, centroids, 5, backend="torch", residual_keys=1).output
        ),
        leaves[:3],
        fast_mode=True,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_prefix_tokens_attend_to_all_and_are_seen_by_all(masked, backend, draw, close) -> None:
    query, key, value, centroids = draw(2, 2, 50, 8, 4)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, [0, 20, 49]] = False
    mask = mask if masked else None
    found = dgt.dynamic_group_attention(
        query, key, value, centroids, 6, None, mask, backend, num_prefix_tokens=3
    )
    assert found.output.shape == query.shape
    assert (found.group_ids[..., :3] == -1).all()
    for b in range(2):
        real = torch.arange(50) if mask is None else mask[b].nonzero()[:, 0]
        q, k, v = (tensor[b, :, real] for tensor in (query, key, value))
        first = int((real < 3).sum())
        close(found.output[b][:, real[:first]], F.scaled_dot_product_attention(q[:, :first], k, v))
        for h in range(2):
            groups = dgt.group_queries(query, centroids)[b, h]
            for token in real[first:].tolist():
                ids = found.key_ids[b, h, groups[token]]
                ids = ids[ids >= 0]
                assert set(ids[ids < 3].tolist()) == set(real[:first].tolist())
                assert len(ids) == first + 6
                weights = (k.new_tensor(8**-0.5) * key[b, h, ids] @ query[b, h, token]).softmax(0)
                close(found.output[b, h, token], weights @ value[b, h, ids])


def test_other_numbers_of_keys_and_of_their_heads(draw, close) -> None:
    query, _, _, centroids = draw(2, 4, 30, 8, 3)
    _, key, value, _ = draw(2, 2, 70, 8, 3, seed=1)
    found = dgt.dynamic_group_attention(query, key, value, centroids, 70)
    close(found.output, F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    mask = torch.arange(70).expand(2, 70) < torch.tensor([[70], [20]])
    found = dgt.dynamic_group_attention(
        query, key, value, centroids, 70, key_mask=mask, residual_keys=1
    )
    expected = F.scaled_dot_product_attention(
        query, key, value, mask[:, None, None], enable_gqa=True
    )
    close(found.output, expected)
    assert (found.group_ids >= 0).all()


def test_centroids_of_every_image(draw, close) -> None:
    query, key, value, centroids = draw(3, 2, 40, 8, 4)
    own = find_centroids(query, centroids, steps=3)
    assert own.shape == (3, 2, 4, 8)
    together = dgt.dynamic_group_attention(query, key, value, own, 9, residual_keys=1)
    for b in range(3):
        alone = dgt.dynamic_group_attention(
            *(t[b : b + 1] for t in (query, key, value)), own[b], 9, residual_keys=1
        )
        for all_images, one in zip(together, alone, strict=True):
            assert torch.allclose(all_images[b], one[0], atol=1e-6)
    same = find_centroids(query, own, steps=0)
    assert torch.equal(same, own)
    assert same.data_ptr() != own.data_ptr()
    assert torch.equal(find_centroids(query, centroids, steps=0), centroids.expand(3, -1, -1, -1))
    with pytest.raises(ValueError, match=r"centroids must have shape .* to match query, got \(2, "):
        find_centroids(query, own[:2])


@pytest.mark.parametrize("residual_keys", [0, 1])
@pytest.mark.parametrize("tokens", [40, 500])
def test_activation_checkpointing(tokens, residual_keys, fast, draw, close, with_gradients) -> None:
    query, key, value, centroids = draw(2, 2, tokens, 16, 4)

    def run(*qkv: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *qkv, centroids, 8, residual_keys=residual_keys, backend=fast
        ).output

    again = with_gradients(
        lambda *qkv: checkpoint(run, *qkv, use_reentrant=False), (query, key, value)
    )
    for actual, expected in zip(again, with_gradients(run, (query, key, value)), strict=True):
        close(actual, expected)


def test_keys_that_are_alike_share_their_gradient(fast, close, with_gradients) -> None:
    """Scores tie except for rounding: a maximum is reached in many places, and its gradient goes to some of them."""
    query, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 199, 8)
    key = torch.randn(1, 1, 1, 8).expand(1, 1, 199, 8).contiguous()
    ids = torch.zeros(1, 1, 4, dtype=torch.int64), torch.arange(5).view(1, 1, 1, 5)

    def run(backend):
        steps = choose_steps(backend, query)
        clusters = torch.zeros(1, 1, 199, dtype=torch.int64)
        return lambda q, k: steps.summarize_clusters(
            q, k, value, *ids, scale=0.4, key_cluster_ids=clusters, residual_keys=1
        )[2]

    for ours, theirs in zip(
        *(with_gradients(run(b), (query, key)) for b in (fast, "reference")), strict=True
    ):
        close(ours, theirs, "constant")


def test_autocast_leaves_prefix_tokens_alone(draw) -> None:
    *tensors, centroids = (4 * tensor for tensor in draw(1, 2, 40, 8, 4))

    def run():
        return dgt.dynamic_group_attention(*tensors, centroids / 4, 9, num_prefix_tokens=3).output

    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    assert torch.equal(cast, run())
