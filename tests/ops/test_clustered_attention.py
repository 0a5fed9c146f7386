"""Attention in groups that are found in the image, with residual keys: against its definition in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: dgt.DynamicGroupAttentionOutput,
    cluster_ids: Tensor,
    scale: float,
) -> Tensor:
    """The definition, group by group: the selected keys, and one more for the rest of every cluster."""
    output = torch.zeros_like(query)
    for b, h in ((b, h) for b in range(query.shape[0]) for h in range(query.shape[1])):
        q, k, v = query[b, h], key[b, h], value[b, h]
        for group in set(found.group_ids[b, h].tolist()) - {-1}:
            mine = found.group_ids[b, h] == group
            ids = found.key_ids[b, h, group]
            ids = ids[ids >= 0]
            mean = q[mine].mean(0)
            scores, values = [scale * q[mine] @ k[ids].T], [v[ids]]
            for cluster in set(cluster_ids[b, h].tolist()) - {-1}:
                left = cluster_ids[b, h] == cluster
                left[ids] = False
                if not left.any():
                    continue
                mass = scale * k[left] @ mean
                share = mass.softmax(0)
                rest = share @ k[left]
                constant = mass.logsumexp(0) - scale * mean @ rest
                scores.append((scale * q[mine] @ rest + constant)[:, None])
                values.append((share @ v[left])[None])
            attended = torch.cat(scores, 1).softmax(-1) @ torch.cat(values)
            place = torch.zeros_like(output).bool()
            place[b, h, mine] = True
            output = output.masked_scatter(place, attended)
    return output


@pytest.mark.parametrize("number", range(100))
def test_residual_keys_of_clusters_equal_the_definition(number, fast, draw, with_gradients) -> None:
    rng = random.Random(number)
    tokens = rng.choice(
        (2, 3, rng.randint(4, 30), rng.randint(30, 120), 400 if number % 20 == 0 else 60)
    )
    count = rng.choice((2, tokens, rng.randint(2, tokens)))
    inputs = draw(
        rng.randint(1, 2),
        rng.randint(1, 2),
        tokens,
        rng.choice((1, 3, 8, 24)),
        rng.randint(1, 9),
        number,
    )
    query, key, value, centroids = inputs
    top_k = rng.choice((1, rng.randint(1, 30), tokens))
    found = dgt.dynamic_group_attention(query, key, value, centroids, top_k)
    clusters = torch.randint(
        -1, count, key.shape[:3], generator=torch.Generator().manual_seed(number)
    )
    scale = rng.choice((0.1, query.shape[-1] ** -0.5, 1.0, -0.4))

    def run(*qkv: Tensor) -> Tensor:
        output: Tensor = dgt.dynamic_group_attention(
            *qkv, centroids, top_k, scale, remainder=count, key_cluster_ids=clusters, backend=fast
        ).output
        return output

    ours = with_gradients(run, (query, key, value))
    doubles = tuple(tensor.double() for tensor in (query, key, value))
    exact = with_gradients(lambda *qkv: oracle(*qkv, found, clusters, scale), doubles)
    for what, actual, expected in zip(
        ("output", "query", "key", "value"), ours, exact, strict=True
    ):
        allowed = (1e-5 if what == "output" else 1e-4) * max(1.0, expected.abs().max().item())
        assert float((actual - expected).abs().max()) <= allowed, what


def test_with_all_keys_it_is_dense_attention(backend, draw, close) -> None:
    query, key, value, _ = draw(2, 2, 90, 16, 1)
    output = dgt.clustered_attention(
        query, key, value, num_groups=7, top_k=90, num_residual_keys=5, backend=backend
    )
    close(output, F.scaled_dot_product_attention(query, key, value))


def test_a_cluster_for_every_key_leaves_nothing_out(backend, draw, close) -> None:
    query, key, value, _ = draw(2, 2, 60, 16, 1)
    output = dgt.clustered_attention(
        query,
        key,
        value,
        num_groups=7,
        top_k=4,
        num_residual_keys=59,
        num_prefix_tokens=1,
        backend=backend,
    )
    close(output, F.scaled_dot_product_attention(query, key, value))


def test_residual_keys_come_nearer_to_dense_attention(backend, draw) -> None:
    query, key, value, _ = draw(1, 2, 400, 16, 1)
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randn(3, 1, 2, 20, 16, generator=generator).repeat(1, 1, 1, 20, 1)
    query, key, value = 0.2 * torch.stack([query, key, value]) + kinds
    whole = F.scaled_dot_product_attention(query, key, value)
    errors = []
    for count in (0, 1, 20):
        output = dgt.clustered_attention(
            query, key, value, num_groups=20, top_k=20, num_residual_keys=count, backend=backend
        )
        errors.append(float((output - whole).norm() / whole.norm()))
    assert errors[1] < errors[0]
    assert errors[2] < errors[1] / 4


BAD = [
    ({"num_groups": 0}, ValueError, "num_groups must be at least 1, got 0"),
    (
        {"num_groups": 10},
        ValueError,
        "num_groups must be at most the 9 queries behind the prefix, got 10",
    ),
    ({"num_groups": 2.0}, TypeError, "num_groups must be an int of at least 1, got 2.0"),
    ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ({"num_residual_keys": -1}, ValueError, "num_residual_keys must be at least 0, got -1"),
    (
        {"num_residual_keys": 10},
        ValueError,
        "num_residual_keys must be at most the 9 keys behind the prefix, got 10",
    ),
    (
        {"num_residual_keys": True},
        TypeError,
        "num_residual_keys must be an int of at least 0, got True",
    ),
    (
        {"num_prefix_tokens": 10},
        ValueError,
        "num_prefix_tokens must be fewer than the queries .* got 10 with 10",
    ),
    ({"share_key_clusters": 1}, TypeError, "share_key_clusters must be True or False, got 1"),
    (
        {"key_mask": torch.ones(1, 9).bool()},
        ValueError,
        r"key_mask must be a bool \(B, L\) = \(1, 10\)",
    ),
    ({"key": torch.randn(1, 2, 10, 5)}, ValueError, "key must have shape .* to match query"),
    ({"query": torch.full((1, 2, 10, 4), torch.nan)}, ValueError, "query must be free of NaN"),
    ({"key": torch.full((1, 2, 10, 4), torch.nan)}, ValueError, "key must be free of NaN"),
    ({"scale": torch.inf}, ValueError, "scale must be finite"),
    ({"backend": "fast"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message) -> None:
    good = {name: torch.randn(1, 2, 10, 4) for name in ("query", "key", "value")}
    sizes = {"num_groups": 3, "top_k": 2, "num_residual_keys": 2, "num_prefix_tokens": 1}
    with pytest.raises(error, match=message):
        dgt.clustered_attention(**{**good, **sizes, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"remainder": -1}, ValueError, "remainder must be at least 0, got -1"),
        (
            {"remainder": 11},
            ValueError,
            "remainder must be at most the 10 keys behind the prefix, got 11",
        ),
        ({"remainder": 2.0}, TypeError, "remainder must be an int of at least 0, got 2.0"),
        ({"remainder": 0}, ValueError, "key_cluster_ids must be None where remainder is 0"),
        (
            {"key_cluster_ids": torch.full((1, 2, 10), 2)},
            ValueError,
            "key_cluster_ids must lie in -1 to 1, got 2",
        ),
        (
            {"key_cluster_ids": torch.zeros(1, 2, 10)},
            TypeError,
            "key_cluster_ids must be a .* int64 tensor",
        ),
        (
            {"key_cluster_ids": torch.zeros(1, 2, 9).long()},
            ValueError,
            "key_cluster_ids must have shape",
        ),
    ],
)
def test_bad_clusters(change, error, message, draw) -> None:
    query, key, value, centroids = draw(1, 2, 10, 4, 3)
    good = {"remainder": 2, "key_cluster_ids": torch.zeros(1, 2, 10, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        dgt.dynamic_group_attention(query, key, value, centroids, 3, **{**good, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"tokens": torch.randn(2, 9, 4)},
            ValueError,
            r"tokens must be a \(B, H, N, D\) floating point tensor",
        ),
        ({"tokens": torch.randn(1, 2, 0, 4)}, ValueError, "tokens must not be empty"),
        ({"tokens": torch.full((1, 2, 9, 4), torch.nan)}, ValueError, "tokens must be free of NaN"),
        ({"num_clusters": 0}, ValueError, "num_clusters must be at least 1, got 0"),
        ({"num_clusters": 10}, ValueError, "num_clusters must be at most the 9 tokens, got 10"),
        ({"steps": -1}, ValueError, "steps must be at least 0, got -1"),
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"mask": torch.ones(1, 9)}, TypeError, r"mask must be a bool \(B, L\) = \(1, 9\) tensor"),
    ],
)
def test_bad_tokens(change, error, message) -> None:
    with pytest.raises(error, match=message):
        dgt.cluster_tokens(**{"tokens": torch.randn(1, 2, 9, 4), "num_clusters": 3, **change})
