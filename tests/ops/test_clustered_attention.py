"""Attention in groups found in the image, with residual keys: against its definition in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt


class Choice(NamedTuple):
    """Fixed ids: groups (B, H, L), keys (B, H, G, K), and clusters of keys (B, H, S); -1 for none."""

    group_ids: Tensor
    key_ids: Tensor
    cluster_ids: Tensor


def attend_in_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    clusters: Tensor,
    scale: float,
    first_order: bool,
) -> Tensor:
    """The definition for the (N, D) queries of one group: its selected keys, and one per cluster for the rest."""
    mean = query.mean(0)
    scores, values = [scale * query @ key[ids].T], [value[ids]]
    masses, spreads, covariances = [], [], []
    for cluster in set(clusters.tolist()) - {-1}:
        members = (clusters == cluster).nonzero()[:, 0]
        left = members[~torch.isin(members, ids)]
        if len(left):
            mass = scale * key[left] @ mean
            share = mass.softmax(0)
            rest = share @ key[left]
            masses.append(mass.logsumexp(0))
            scores.append((scale * query @ rest + masses[-1] - scale * mean @ rest)[:, None])
            values.append((share @ value[left])[None])
            spreads.append(share @ (key[left] - rest).square().sum(-1))
            covariances.append(covariance_of(key, value, members, spreads[-1]))
    if not first_order or not masses:
        return torch.cat(scores, 1).softmax(-1) @ torch.cat(values)
    delta = query - mean
    spread = torch.stack(spreads)
    height = scale**2 * delta.square().sum(-1) / (2 * query.shape[1])
    if spread.max() > 0:
        height = height.minimum(1 / spread.max())
    residual = torch.cat(scores[1:], 1) + height[:, None] * spread
    weight = torch.cat([scores[0], residual], 1).softmax(-1)
    matrix = (torch.stack(masses).softmax(0)[:, None, None] * torch.stack(covariances)).sum(0)
    lost = scale * weight[:, len(ids) :].sum(1, keepdim=True) * (delta @ matrix)
    return weight @ torch.cat(values) + lost


def covariance_of(key: Tensor, value: Tensor, members: Tensor, left: Tensor) -> Tensor:
    """(D, D) of one in four members of a cluster, times the spread of those left, relative to that of all."""
    apart = key - key[members].mean(0)
    spread = apart[members].square().sum(-1).mean()
    if spread == 0:
        return key.new_zeros(key.shape[1], key.shape[1])
    some = members[::4]
    covariance = apart[some].T @ (value[some] - value[members].mean(0)) / len(some)
    return (left / spread).clamp(max=2) * covariance


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choice: Choice,
    scale: float,
    first_order: bool = False,
) -> Tensor:
    """The definition, head by head and group by group; zero for queries in no group."""
    heads = []
    for b, h in ((b, h) for b in range(query.shape[0]) for h in range(query.shape[1])):
        groups, output = choice.group_ids[b, h], torch.zeros_like(query[b, h])
        for group in set(groups.tolist()) - {-1}:
            mine = groups == group
            ids = choice.key_ids[b, h, group]
            ids = ids[ids >= 0]
            clusters = choice.cluster_ids[b, h]
            own = (query[b, h, mine], key[b, h], value[b, h], ids, clusters)
            rows = attend_in_group(*own, scale, first_order)
            output = output.index_put((mine.nonzero()[:, 0],), rows)
        heads.append(output)
    return torch.stack(heads).view(query.shape)


KNOWN: dict[str, tuple[Choice, tuple[Tensor, ...]]] = {}


def once(
    name: str, choice: Choice, compute: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What the definition gives for a case: computed once for all backends that choose alike."""
    known = KNOWN.get(name)
    if known is None or not all(torch.equal(a, b) for a, b in zip(known[0], choice, strict=True)):
        known = choice, compute()
        KNOWN[name] = known
    return known[1]


def check_all(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """Compare output and gradients, relative to the largest value if that is above one."""
    for what, actual, expected in zip(
        ("output", "query", "key", "value"), ours, exact, strict=False
    ):
        allowed = (1e-5 if what == "output" else 1e-4) * max(1.0, expected.abs().max().item())
        error = float((actual - expected).abs().max())
        assert error <= allowed, f"{what}: error {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("number", range(200))
def test_residual_keys_of_given_clusters_equal_the_definition(
    number, fast, draw, with_gradients
) -> None:
    rng = random.Random(number)
    tokens = rng.choice(
        (2, 3, rng.randint(4, 30), rng.randint(30, 80), 400 if number % 50 == 0 else 60)
    )
    count = rng.choice((2, min(tokens, 20), rng.randint(2, min(tokens, 20))))
    channels = rng.choice((1, 3, 8, 24))
    inputs = draw(rng.randint(1, 2), rng.randint(1, 2), tokens, channels, rng.randint(1, 9), number)
    query, key, value, centroids = inputs
    top_k = rng.choice((1, rng.randint(1, 30), tokens))
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k)
    generator = torch.Generator().manual_seed(number)
    clusters = torch.randint(-1, count, key.shape[:3], generator=generator)
    scale = rng.choice((0.1, channels**-0.5, 1.0, -0.4))
    choice = Choice(found.group_ids, found.key_ids, clusters)

    more = {"residual_keys": count, "key_cluster_ids": clusters}

    def run(*qkv: Tensor) -> Tensor:
        output: Tensor = dgt.dynamic_group_attention(
            *qkv, centroids, top_k, scale, backend=fast, **more
        ).output
        return output

    ours = with_gradients(run, (query, key, value))
    doubles = tuple(tensor.double() for tensor in (query, key, value))

    def exact() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = with_gradients(
            lambda *qkv: oracle(*qkv, choice, scale), doubles
        )
        return found

    check_all(ours, once(f"given clusters {number}", choice, exact))


class Call(NamedTuple):
    """A call of :func:`dgt.clustered_attention`."""

    num_groups: int
    top_k: int
    residual_keys: int
    num_prefix_tokens: int
    scale: float | None
    query_mask: Tensor | None
    key_mask: Tensor | None
    first_order: bool


def losses_of(key: Tensor, value: Tensor, clusters: Tensor) -> Tensor:
    """What leaving out each of (S, D) keys loses: log(|k - center|^2 |v - center|), with the centers of its cluster."""
    found = torch.zeros(len(key), dtype=torch.float64)
    for cluster in set(clusters.tolist()) - {-1}:
        mine = clusters == cluster
        of_keys, of_values = (
            (tokens[mine].double() - tokens[mine].double().mean(0)).square().sum(-1)
            for tokens in (key, value)
        )
        squared = (of_keys**2 * of_values).clamp(min=torch.finfo(torch.float32).tiny)
        found[mine] = 0.5 * squared.log()
    return found


def best_keys(scores: Tensor, count: int) -> Tensor:
    """The largest of (G, S) scores, ties to the first, by position: (G, K), -1 where none are left."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    ids = order.indices.where(order.values > -torch.inf, scores.shape[1])[:, :count]
    ids = ids.sort(-1).values
    return ids.where(ids < scores.shape[1], -1)


def choose(query: Tensor, key: Tensor, value: Tensor, call: Call, backend: str) -> Choice:
    """Groups and clusters of a call from the public steps, and the keys that it must choose."""
    prefix, mask = call.num_prefix_tokens, call.key_mask
    batch, heads, tokens = query.shape[0], query.shape[1], key.shape[2]
    key_mask = None if mask is None else mask[:, prefix:]
    query_mask = None if call.query_mask is None else call.query_mask[:, prefix:]
    groups = dgt.cluster_tokens(
        query[:, :, prefix:], call.num_groups, mask=query_mask, backend=backend
    )
    real = torch.ones(batch, tokens).bool() if mask is None else mask
    if call.residual_keys < 2:
        clusters = torch.full((batch, heads, tokens - prefix), call.residual_keys - 1)
        clusters = clusters.masked_fill(~real[:, None, prefix:], -1)
    else:
        own_key = key[:, :, prefix:]
        clusters = dgt.cluster_tokens(
            own_key, call.residual_keys, mask=key_mask, backend=backend
        ).ids
    scale = query.shape[3] ** -0.5 if call.scale is None else call.scale
    key_ids = []
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        behind = key[b, h, prefix:].double()
        scores = scale * groups.centroids[b, h].double() @ behind.T
        scores = scores + losses_of(behind, value[b, h, prefix:], clusters[b, h])
        best = best_keys(scores.masked_fill(~real[b, None, prefix:], -torch.inf), call.top_k)
        first = torch.arange(prefix).where(real[b, :prefix], -1).expand(call.num_groups, -1)
        key_ids.append(torch.cat([first, (best + prefix).where(best >= 0, -1)], -1))
    return Choice(
        F.pad(groups.ids, (prefix, 0), value=-1),
        torch.stack(key_ids).view(batch, heads, call.num_groups, -1),
        F.pad(clusters, (prefix, 0), value=-1),
    )


def draw_call(rng: random.Random, queries: int, keys: int, batch: int, first_order: bool) -> Call:
    prefix = rng.choice((0, 0, rng.randint(0, min(queries, keys) - 1)))
    behind = keys - prefix
    mask = None
    if rng.random() < 0.4:
        mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(keys)) < 0.7
        mask[:, prefix] = True
    hidden_queries = mask if queries == keys else None
    return Call(
        num_groups=rng.randint(1, min(queries - prefix, 20)),
        top_k=rng.choice((1, rng.randint(1, behind), behind + 3)),
        residual_keys=rng.choice((0, 1, min(2, behind), rng.randint(1, min(behind, 30)))),
        num_prefix_tokens=prefix,
        scale=rng.choice((None, 0.3, -0.4)),
        query_mask=hidden_queries,
        key_mask=mask,
        first_order=first_order,
    )


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("number", range(200))
def test_equals_the_definition(number, first_order, fast, draw, with_gradients) -> None:
    rng = random.Random(number)
    queries = rng.choice((1, 2, 3, rng.randint(4, 30), rng.randint(30, 100)))
    keys = rng.choice((queries, queries, rng.randint(1, 90)))
    batch, heads, channels = rng.randint(1, 2), rng.randint(1, 3), rng.choice((1, 3, 8, 17, 24))
    query = draw(batch, heads, queries, channels, 1, number)[0]
    _, key, value, _ = draw(batch, heads, keys, channels, 1, number + 1000)
    call = draw_call(rng, queries, keys, batch, first_order)
    choice = choose(query, key, value, call, fast)
    prefix = call.num_prefix_tokens
    scale = channels**-0.5 if call.scale is None else call.scale

    def run(*qkv: Tensor) -> Tensor:
        return dgt.clustered_attention(*qkv, **call._asdict(), backend=fast)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = oracle(q, k, v, choice, scale, first_order)
        score = scale * q[:, :, :prefix] @ k.mT
        real = torch.ones(batch, keys).bool() if call.key_mask is None else call.key_mask
        whole = score.masked_fill(~real[:, None, None], -torch.inf).softmax(-1) @ v
        if call.query_mask is not None:
            whole = whole * call.query_mask[:, None, :prefix, None]
        return torch.cat([whole, output[:, :, prefix:]], 2)

    inputs = (query, key, value)
    doubles = tuple(tensor.double() for tensor in inputs)
    expected = once(f"call {number} {first_order}", choice, lambda: with_gradients(exact, doubles))
    check_all(with_gradients(run, inputs), expected)
    check_all((run(*inputs),), expected[:1])  # without gradients another kernel may be used


@pytest.mark.parametrize("first_order", [False, True])
def test_with_all_keys_it_is_dense_attention(first_order, backend, draw, close) -> None:
    query, key, value, _ = draw(2, 2, 90, 16, 1)
    sizes = {"num_groups": 7, "top_k": 90, "residual_keys": 5, "first_order": first_order}
    output = dgt.clustered_attention(query, key, value, **sizes, backend=backend)
    close(output, F.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("first_order", [False, True])
def test_a_cluster_for_every_key_leaves_nothing_out(first_order, backend, draw, close) -> None:
    query, key, value, _ = draw(2, 2, 60, 16, 1)
    output = dgt.clustered_attention(
        query,
        key,
        value,
        num_groups=7,
        top_k=4,
        residual_keys=59,
        num_prefix_tokens=1,
        first_order=first_order,
        backend=backend,
    )
    close(output, F.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("count", [1, 7])
def test_is_exact_where_the_queries_of_a_group_are_equal(
    count, first_order, backend, draw, close
) -> None:
    kinds, key, value, _ = draw(1, 2, 90, 8, 1)
    query = kinds[:, :, :6].repeat(1, 1, 15, 1)
    sizes = {"num_groups": 30, "top_k": 3, "residual_keys": count, "backend": backend}
    sizes["first_order"] = first_order
    groups = dgt.cluster_tokens(query, 30, backend=backend).ids.view(1, 2, 15, 6)
    assert (groups == groups[:, :, :1]).all()  # all tokens of one kind are in one group
    assert all(len(set(groups[0, h, 0].tolist())) == 6 for h in range(2))
    output = dgt.clustered_attention(query, key, value, **sizes)
    close(output, F.scaled_dot_product_attention(query, key, value))


def test_heads_of_keys_that_serve_several_heads_of_queries(backend, draw, close) -> None:
    query, _, _, _ = draw(2, 4, 80, 8, 1)
    _, key, value, _ = draw(2, 2, 80, 8, 1, seed=1)
    sizes = {
        "num_groups": 6,
        "top_k": 9,
        "residual_keys": 5,
        "num_prefix_tokens": 1,
        "backend": backend,
    }
    few = dgt.clustered_attention(query, key, value, **sizes)
    many = dgt.clustered_attention(
        query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1), **sizes
    )
    close(few, many)


def test_residual_keys_come_nearer_to_dense_attention(backend, draw) -> None:
    query, key, value, _ = draw(1, 2, 400, 16, 1)
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randn(3, 1, 2, 20, 16, generator=generator).repeat(1, 1, 1, 20, 1)
    query, key, value = 0.2 * torch.stack([query, key, value]) + kinds
    whole = F.scaled_dot_product_attention(query, key, value)
    errors = []
    for count, first_order in ((0, False), (1, False), (20, False), (20, True)):
        sizes = {"num_groups": 20, "top_k": 20, "residual_keys": count, "first_order": first_order}
        output = dgt.clustered_attention(query, key, value, **sizes, backend=backend)
        errors.append(float((output - whole).norm() / whole.norm()))
    assert errors[1] < errors[0]
    assert errors[2] < errors[1] / 4
    assert errors[3] < 0.8 * errors[2]
