"""Attention in groups that are found in the image, with residual keys: against its definition in float64."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dgt
from dgt.ops.backends import load_backend
from dgt.ops.native_loader import reason_against_native
from dgt.ops.remainder import add_remainder

FAST = ("torch", *(["native"] if reason_against_native() is None else []))


class Choice(NamedTuple):
    """What is held fixed: groups (B, H, L), keys (B, H, G, K) and clusters of keys (B, H, S); -1 for none."""

    group_ids: Tensor
    key_ids: Tensor
    cluster_ids: Tensor


def attend_in_group(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor, clusters: Tensor, scale: float
) -> Tensor:
    """The definition for the (N, D) queries of one group: its selected keys, and one for the rest of every cluster."""
    mean = query.mean(0)
    scores, values = [scale * query @ key[ids].T], [value[ids]]
    for cluster in set(clusters.tolist()) - {-1}:
        left = clusters == cluster
        left[ids] = False
        if left.any():
            mass = scale * key[left] @ mean
            share = mass.softmax(0)
            rest = share @ key[left]
            constant = mass.logsumexp(0) - scale * mean @ rest
            scores.append((scale * query @ rest + constant)[:, None])
            values.append((share @ value[left])[None])
    return torch.cat(scores, 1).softmax(-1) @ torch.cat(values)


def oracle(query: Tensor, key: Tensor, value: Tensor, choice: Choice, scale: float) -> Tensor:
    """The definition, head by head and group by group; zero for queries of no group."""
    heads = []
    for b, h in ((b, h) for b in range(query.shape[0]) for h in range(query.shape[1])):
        groups, output = choice.group_ids[b, h], torch.zeros_like(query[b, h])
        for group in set(groups.tolist()) - {-1}:
            mine = groups == group
            ids = choice.key_ids[b, h, group]
            ids = ids[ids >= 0]
            clusters = choice.cluster_ids[b, h]
            rows = attend_in_group(query[b, h, mine], key[b, h], value[b, h], ids, clusters, scale)
            output = output.index_put((mine.nonzero()[:, 0],), rows)
        heads.append(output)
    return torch.stack(heads).view(query.shape)


def check_all(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """Compare output and gradients, relative to the largest value where that is above one."""
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

    def run(*qkv: Tensor) -> Tensor:
        output: Tensor = dgt.dynamic_group_attention(
            *qkv, centroids, top_k, scale, remainder=count, key_cluster_ids=clusters, backend=fast
        ).output
        return output

    ours = with_gradients(run, (query, key, value))
    doubles = tuple(tensor.double() for tensor in (query, key, value))
    check_all(ours, with_gradients(lambda *qkv: oracle(*qkv, choice, scale), doubles))


class Call(NamedTuple):
    """A call of :func:`dgt.clustered_attention`."""

    num_groups: int
    top_k: int
    num_residual_keys: int
    num_prefix_tokens: int
    scale: float | None
    key_mask: Tensor | None
    share_key_clusters: bool


def choose(query: Tensor, key: Tensor, call: Call, backend: str) -> Choice:
    """Groups, keys and clusters of a call, by the public steps."""
    prefix, mask = call.num_prefix_tokens, call.key_mask
    batch, heads = query.shape[:2]
    key_mask = None if mask is None else mask[:, prefix:]
    query_mask = key_mask if query.shape[2] == key.shape[2] else None
    groups = dgt.cluster_tokens(
        query[:, :, prefix:], call.num_groups, mask=query_mask, backend=backend
    )
    sign = -1.0 if call.scale is not None and call.scale < 0 else 1.0
    lists = []
    for b in range(batch):
        own = None if key_mask is None else key_mask[b : b + 1]
        lists.append(
            dgt.select_keys(sign * groups.centroids[b], key[b : b + 1, :, prefix:], call.top_k, own)
        )
    key_ids = torch.cat(lists)
    key_ids = (key_ids + prefix).where(key_ids >= 0, -1)
    first = (
        torch.arange(prefix)
        if mask is None
        else torch.arange(prefix).where(mask[:, :prefix], -1)[:, None, None]
    )
    key_ids = torch.cat([first.expand(*key_ids.shape[:3], -1), key_ids], -1)
    if call.num_residual_keys == 0:
        clusters = torch.full((batch, heads, key.shape[2] - prefix), -1)
    elif call.num_residual_keys == 1:
        real = torch.ones(batch, key.shape[2]).bool() if mask is None else mask
        clusters = torch.zeros(batch, heads, key.shape[2] - prefix).long()
        clusters = clusters.masked_fill(~real[:, None, prefix:], -1)
    else:
        own_key = key[:, :, prefix:]
        if call.share_key_clusters:
            own_key = own_key.transpose(1, 2).flatten(2)[:, None]
        clusters = dgt.cluster_tokens(
            own_key, call.num_residual_keys, mask=key_mask, backend=backend
        ).ids
        clusters = clusters.expand(-1, heads, -1)
    return Choice(
        F.pad(groups.ids, (prefix, 0), value=-1), key_ids, F.pad(clusters, (prefix, 0), value=-1)
    )


def draw_call(rng: random.Random, queries: int, keys: int, batch: int) -> Call:
    prefix = rng.choice((0, 0, rng.randint(0, min(queries, keys) - 1)))
    behind = keys - prefix
    mask = None
    if rng.random() < 0.4:
        mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(keys)) < 0.7
        mask[:, prefix] = True
    return Call(
        num_groups=rng.randint(1, min(queries - prefix, 20)),
        top_k=rng.choice((1, rng.randint(1, behind), behind + 3)),
        num_residual_keys=rng.choice((0, 1, min(2, behind), rng.randint(1, min(behind, 30)))),
        num_prefix_tokens=prefix,
        scale=rng.choice((None, 0.3, -0.4)),
        key_mask=mask,
        share_key_clusters=rng.random() < 0.3,
    )


@pytest.mark.parametrize("number", range(200))
def test_equals_the_definition(number, fast, draw, with_gradients) -> None:
    rng = random.Random(number)
    queries = rng.choice((1, 2, 3, rng.randint(4, 30), rng.randint(30, 100)))
    keys = rng.choice((queries, queries, rng.randint(1, 90)))
    batch, heads, channels = rng.randint(1, 2), rng.randint(1, 3), rng.choice((1, 3, 8, 17, 24))
    query = draw(batch, heads, queries, channels, 1, number)[0]
    _, key, value, _ = draw(batch, heads, keys, channels, 1, number + 1000)
    call = draw_call(rng, queries, keys, batch)
    choice = choose(query, key, call, fast)
    prefix = call.num_prefix_tokens
    scale = channels**-0.5 if call.scale is None else call.scale

    def run(*qkv: Tensor) -> Tensor:
        return dgt.clustered_attention(*qkv, **call._asdict(), backend=fast)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = oracle(q, k, v, choice, scale)
        score = scale * q[:, :, :prefix] @ k.mT
        real = torch.ones(batch, keys).bool() if call.key_mask is None else call.key_mask
        whole = score.masked_fill(~real[:, None, None], -torch.inf).softmax(-1) @ v
        if queries == keys:
            whole = whole * real[:, None, :prefix, None]
        return torch.cat([whole, output[:, :, prefix:]], 2)

    inputs = (query, key, value)
    expected = with_gradients(exact, tuple(tensor.double() for tensor in inputs))
    check_all(with_gradients(run, inputs), expected)
    check_all((run(*inputs),), expected[:1])  # without gradients another kernel may serve


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


@pytest.mark.parametrize("count", [1, 7])
def test_is_exact_where_the_queries_of_a_group_are_equal(count, backend, draw, close) -> None:
    kinds, key, value, _ = draw(1, 2, 90, 8, 1)
    query = kinds[:, :, :6].repeat(1, 1, 15, 1)
    sizes = {"num_groups": 30, "top_k": 3, "num_residual_keys": count, "backend": backend}
    groups = dgt.cluster_tokens(query, 30, backend=backend).ids.view(1, 2, 15, 6)
    assert (groups == groups[:, :, :1]).all()  # all tokens of a kind are in one group
    assert all(len(set(groups[0, h, 0].tolist())) == 6 for h in range(2))
    output = dgt.clustered_attention(query, key, value, **sizes)
    close(output, F.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [50, 300])
def test_one_residual_key_is_the_remainder(tokens, masked, backend, draw, close) -> None:
    query, key, value, _ = draw(2, 2, tokens, 8, 1)
    mask = (
        torch.arange(tokens).expand(2, tokens) < torch.tensor([[tokens], [tokens - 9]])
        if masked
        else None
    )
    ours = dgt.clustered_attention(
        query, key, value, num_groups=5, top_k=6, key_mask=mask, backend=backend
    )
    for b in range(2):
        one = None if mask is None else mask[b : b + 1]
        inputs = tuple(tensor[b : b + 1] for tensor in (query, key, value))
        groups = dgt.cluster_tokens(inputs[0], 5, mask=one, backend=backend)
        ids = groups.ids, dgt.select_keys(groups.centroids[0], inputs[1], 6, one)
        rest = load_backend(backend, query).summarize_unselected(*inputs, *ids, 8**-0.5, one)
        more = add_remainder(*inputs[1:], ids[1], rest)
        expected = dgt.attend(
            inputs[0], more.key, more.value, ids[0], more.key_ids, key_bias=more.key_bias
        )
        close(ours[b], expected[0])


def test_heads_of_keys_that_serve_several_heads_of_queries(backend, draw, close) -> None:
    query, _, _, _ = draw(2, 4, 80, 8, 1)
    _, key, value, _ = draw(2, 2, 80, 8, 1, seed=1)
    sizes = {
        "num_groups": 6,
        "top_k": 9,
        "num_residual_keys": 5,
        "num_prefix_tokens": 1,
        "backend": backend,
    }
    few = dgt.clustered_attention(query, key, value, **sizes)
    many = dgt.clustered_attention(
        query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1), **sizes
    )
    close(few, many)


@pytest.mark.parametrize("masked", [False, True])
def test_clusters_are_those_of_the_reference(masked, fast, draw, close) -> None:
    tokens = draw(2, 3, 250, 17, 1).query
    mask = torch.rand(2, 250, generator=torch.Generator().manual_seed(0)) < 0.6 if masked else None
    ours = dgt.cluster_tokens(tokens, 11, mask=mask, backend=fast)
    theirs = dgt.cluster_tokens(tokens, 11, mask=mask, backend="reference")
    assert torch.equal(ours.ids, theirs.ids)
    close(ours.centroids, theirs.centroids)
    assert not masked or torch.equal(ours.ids >= 0, mask[:, None].expand_as(ours.ids))


def test_centroids_are_means_and_an_empty_cluster_keeps_its_own(backend) -> None:
    tokens = torch.tensor([0.0, 0.0, 1.0, 9.0]).view(1, 1, 4, 1)
    centroids, ids = dgt.cluster_tokens(tokens, 4, backend=backend)
    assert ids.unique().tolist() == [0, *sorted(set(ids.flatten().tolist()) - {0})]
    for token, cluster in zip(tokens.flatten(), ids.flatten(), strict=True):
        assert centroids[0, 0, cluster, 0] == token
    assert sorted(centroids.flatten().tolist()) == [0, 0, 1, 9]


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


SIZES = {"num_groups": 9, "top_k": 12, "num_residual_keys": 7, "num_prefix_tokens": 2}


@pytest.mark.parametrize("prefix", [0, 3])
def test_a_remainder_of_several_keys_finds_its_clusters(prefix, backend, draw, close) -> None:
    query, _, _, centroids = draw(2, 4, 60, 8, 5)
    _, key, value, _ = draw(2, 2, 60, 8, 1, seed=1)
    mask = torch.arange(60).expand(2, 60) < torch.tensor([[60], [50]])
    clusters = dgt.cluster_tokens(key[:, :, prefix:], 6, mask=mask[:, prefix:], backend=backend).ids
    clusters = F.pad(clusters, (prefix, 0)).repeat_interleave(2, dim=1)
    sizes = {"key_mask": mask, "num_prefix_tokens": prefix, "remainder": 6, "backend": backend}
    own = dgt.dynamic_group_attention(query, key, value, centroids, 8, **sizes)
    given = dgt.dynamic_group_attention(
        query, key, value, centroids, 8, **sizes, key_cluster_ids=clusters
    )
    close(own.output, given.output)  # the prefix is selected, whatever its cluster


def test_a_remainder_of_several_keys_with_centroids_of_every_image(backend, draw, close) -> None:
    query, key, value, centroids = draw(3, 2, 40, 8, 4)
    own = dgt.find_centroids(query, centroids)
    sizes = {"top_k": 9, "remainder": 5, "backend": backend}
    together = dgt.dynamic_group_attention(query, key, value, own, **sizes).output
    for b in range(3):
        alone = (tensor[b : b + 1] for tensor in (query, key, value))
        close(together[b], dgt.dynamic_group_attention(*alone, own[b], **sizes).output[0])


def test_is_the_same_in_every_run_and_with_any_threads(draw) -> None:
    query, key, value, _ = draw(1, 3, 1500, 24, 1)
    sizes = {"num_groups": 40, "top_k": 50, "num_residual_keys": 30, "num_prefix_tokens": 1}
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 3, 2, 1):
            torch.set_num_threads(threads)
            outputs.append(dgt.clustered_attention(query, key, value, **sizes))
    finally:
        torch.set_num_threads(before)
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("share", [False, True])
def test_strides_do_not_matter(share, fast, draw) -> None:
    packed = torch.randn(2, 70, 3, 4, 24, generator=torch.Generator().manual_seed(0))
    views = packed.permute(2, 0, 3, 1, 4).unbind()
    copies = tuple(view.contiguous() for view in views)
    ours, same = (
        dgt.clustered_attention(*inputs, **SIZES, share_key_clusters=share, backend=fast)
        for inputs in (views, copies)
    )
    assert torch.allclose(ours, same, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_result_of_float32(dtype, fast, draw) -> None:
    inputs = tuple(tensor.to(dtype) for tensor in draw(1, 2, 200, 16, 1)[:3])
    output = dgt.clustered_attention(*inputs, **SIZES, backend=fast)
    expected = dgt.clustered_attention(
        *(tensor.float() for tensor in inputs), **SIZES, backend=fast
    )
    assert output.dtype == dtype
    # Residual keys are rounded where PyTorch's kernels take them: twice the rounding of a value below 4.
    assert float((output.float() - expected).abs().max()) < 8 * torch.finfo(dtype).eps


def test_double_precision_is_kept(draw, close) -> None:
    inputs = draw(1, 2, 80, 8, 1, dtype=torch.float64)[:3]
    output = dgt.clustered_attention(*inputs, **SIZES)
    assert output.dtype == torch.float64
    close(output.float(), dgt.clustered_attention(*(tensor.float() for tensor in inputs), **SIZES))


def test_where_no_key_is_real_the_output_is_zero(backend, draw) -> None:
    query, key, value, _ = draw(2, 2, 40, 8, 1)
    mask = torch.tensor([[True], [False]]).expand(2, 40)
    for keys in (40, 30):
        output = dgt.clustered_attention(
            query,
            key[:, :, :keys],
            value[:, :, :keys],
            **SIZES,
            key_mask=mask[:, :keys],
            backend=backend,
        )
        assert output.isfinite().all()
        assert not output[1].any()


def test_compiles_without_a_break_and_gives_the_same(fast, draw) -> None:
    inputs = [tensor.requires_grad_(fast == "torch") for tensor in draw(1, 2, 80, 8, 1)[:3]]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dgt.clustered_attention(query, key, value, **SIZES, backend=fast)

    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), attention(*inputs))


class Attention(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dgt.clustered_attention(query, key, value, **SIZES)


def test_a_file_holds_it_as_one_operator_for_any_size(draw) -> None:
    tokens = torch.export.Dim("tokens", min=32, max=4096)
    shapes = {name: {2: tokens} for name in ("query", "key", "value")}
    program = torch.export.export(
        Attention(), tuple(draw(1, 2, 80, 8, 1)[:3]), dynamic_shapes=shapes
    )
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.dgt.clustered_attention.default in calls
    other = tuple(draw(1, 2, 133, 8, 1, seed=5)[:3])
    assert torch.allclose(program.module()(*other), Attention()(*other), atol=1e-6)


def test_operators_pass_the_checks_of_pytorch(draw) -> None:
    inputs = tuple(draw(2, 2, 60, 8, 1)[:3])
    arguments = (*inputs, 5, 8, 4, 1, 0.3, torch.arange(60).expand(2, 60) < 50, True)
    torch.library.opcheck(torch.ops.dgt.clustered_attention.default, arguments)
    if "native" in FAST:
        torch.library.opcheck(torch.ops.dgt.native_clustered_attention.default, arguments)
        torch.library.opcheck(
            torch.ops.dgt.native_cluster_tokens.default, (inputs[0], 5, 2, 3, None)
        )


def test_meta_tensors_give_shapes() -> None:
    tokens = torch.empty(2, 3, 50, 8, device="meta")
    assert dgt.clustered_attention(tokens, tokens, tokens, **SIZES).shape == tokens.shape
    assert [tuple(x.shape) for x in dgt.cluster_tokens(tokens, 7)] == [(2, 3, 7, 8), (2, 3, 50)]


def test_operations_are_counted() -> None:
    query = torch.randn(1, 2, 400, 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        dgt.clustered_attention(query, query, query, num_groups=10, top_k=20, num_residual_keys=10)
    clusters = 2 * 2 * 400 * 10 * (1 + 5 / 8) * 8
    products = 3 * 10 * 400 + 2 * 400 * 30
    if "native" in FAST:
        assert counter.get_total_flops() == 2 * clusters + 2 * 2 * 8 * products


def test_autocast_leaves_it_alone(fast, draw) -> None:
    inputs = draw(1, 2, 90, 8, 1)[:3]
    plain = dgt.clustered_attention(*inputs, **SIZES, backend=fast)
    with torch.autocast("cpu", torch.bfloat16):
        cast = dgt.clustered_attention(*inputs, **SIZES, backend=fast)
    assert torch.equal(plain, cast)


@pytest.mark.skipif("native" not in FAST, reason="the native kernels are not built here")
def test_memory_does_not_grow_with_groups_times_tokens() -> None:
    """Scores of all groups with all keys would be 96 MB here, and residual keys of all groups 180 MB."""
    code = """
import resource, torch, dgt
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
query, key, value = torch.randn(3, 1, 2, 12_000, 16)
torch.set_num_threads(2)
dgt.clustered_attention(*(x[:, :, :200] for x in (query, key, value)), num_groups=4, top_k=4, num_residual_keys=4)
before = peak()
with torch.no_grad():
    dgt.clustered_attention(query, key, value, num_groups=1000, top_k=4, num_residual_keys=700)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60
