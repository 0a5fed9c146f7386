"""What accelerated models need from the kernels: residual keys, prefix, key biases, sums, merging."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.ops.dispatch import OperatorSteps

pytestmark = pytest.mark.usefixtures("poison")


def check(found: Tensor, expected: Tensor) -> None:
    """Compare with a float64 result: 1e-5 in float32, half a percent of its magnitude in float16, no NaN."""
    found, expected = found.detach(), expected.detach()
    error = (found.double() - expected).abs()
    assert error.max() <= (1e-5 if found.dtype == torch.float32 else 0.02) * max(
        1.0, float(expected.abs().max())
    )
    assert error.square().mean().sqrt() <= 0.005 * expected.square().mean().sqrt()


def plain(case: Any) -> list[Tensor]:
    """Queries around one direction, so that residual keys matter; keys and values; no gradients."""
    query, key, value = (tensor.detach() for tensor in case[:3])
    return [query + 2 * query[:, :, :1], key, value]


@pytest.mark.parametrize(
    ("shape", "prefix", "scale", "masked", "dtype"),
    [
        ((1, 2, 50, 16, 2, 9), 0, None, False, torch.float32),
        ((1, 1, 270, 64, 2, 20), 5, None, False, torch.float16),
        ((2, 1, 24, 24, 18, 5), 0, -0.3, True, torch.float32),  # two programs of groups
        ((1, 1, 33, 128, 3, 30), 3, 0.0, False, torch.float32),  # all keys: nothing is left
        ((1, 1, 40, 16, 2, 9), 2, None, True, torch.float32),  # separate operators
    ],
    ids=["residual key", "prefix", "mask", "all keys", "prefix and mask"],
)
def test_equals_the_reference(
    make_case: Any,
    shape: tuple[int, ...],
    prefix: int,
    scale: float | None,
    masked: bool,
    dtype: torch.dtype,
) -> None:
    case = make_case(*shape, masked=masked, dtype=dtype)
    tensors = plain(case)
    rest = (case.centroids, case.top_k, scale, case.key_mask)
    more = {"num_prefix_tokens": prefix, "residual_keys": 1, "query_mask": case.query_mask}
    found = dgt.dynamic_group_attention(*tensors, *rest, "triton", **more)
    wide = dgt.dynamic_group_attention(*(t.double() for t in tensors), *rest, "reference", **more)
    check(found.output, wide.output)
    assert torch.equal(found.group_ids, wide.group_ids)
    assert torch.equal(found.key_ids, wide.key_ids)


def test_other_keys_of_fewer_heads(make_case: Any) -> None:
    """More keys than queries, and one key head for two query heads."""
    case, other = make_case(1, 2, 30, 16, 3, 9), make_case(1, 1, 70, 16, 3, 9)
    tensors = [plain(case)[0], *plain(other)[1:]]
    found = dgt.dynamic_group_attention(
        *tensors, case.centroids, 9, backend="triton", residual_keys=1
    )
    wide = (t.double() for t in tensors)
    check(
        found.output,
        dgt.dynamic_group_attention(*wide, case.centroids, 9, backend="reference", residual_keys=1)[
            0
        ],
    )


def test_centroids_of_every_image(make_case: Any) -> None:
    case = make_case(2, 1, 40, 16, 3, 9)
    own = F.normalize(case.centroids + torch.randn(2, 1, 3, 16).to(case.centroids), dim=-1)
    found = dgt.dynamic_group_attention(*plain(case), own, 9, backend="triton", residual_keys=1)
    wide = (t.double() for t in plain(case))
    check(
        found.output,
        dgt.dynamic_group_attention(*wide, own, 9, backend="reference", residual_keys=1)[0],
    )


def test_constants_of_keys_and_sums(make_case: Any) -> None:
    """Both against the reference; -inf if a query sees nothing; merging two halves of the keys gives the whole."""
    case = make_case(1, 2, 30, 16, 3, 20)
    group_ids, key_ids = case.ids()
    group_ids[:, :, 4] = -1
    key_ids[:, 1, 2] = -1
    bias = torch.randn(1, 2, 30, device=key_ids.device)
    tensors = plain(case)

    def run(ids: Tensor, backend: str, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        return dgt.attend_with_logsumexp(*leaves, group_ids, ids, -0.3, backend, bias)

    found, sums = run(key_ids, "triton", *tensors)
    output, logs = run(key_ids, "reference", *(t.double() for t in tensors))
    check(found, output)
    assert torch.equal(sums.isneginf(), logs.isneginf())
    real = ~logs.isneginf()
    check(sums[real], logs[real])
    merged = dgt.merge_attention(
        *(run(ids, "triton", *tensors) for ids in (key_ids[..., :6], key_ids[..., 6:]))
    )
    check(merged[0], output)


def test_prefix_with_gradients(make_case: Any) -> None:
    """Without residual keys the whole operator supports a prefix, forward and backward."""
    case = make_case(1, 1, 60, 16, 3, 9)
    grad = torch.randn_like(case.query)
    results = []
    for backend in ("triton", "torch"):
        output = dgt.dynamic_group_attention(*case[:5], backend=backend, num_prefix_tokens=3).output
        results.append((output, *torch.autograd.grad(output, case[:3], grad)))
    for ours, theirs in zip(*results, strict=True):
        check(ours, theirs.double())


class Shape(NamedTuple):
    """A call with residual keys."""

    sizes: tuple[int, ...]
    """Batch, heads, tokens, channels, groups and k."""
    scale: float | None = None
    prefix: int = 0
    clusters: int = 1
    masked: bool = False
    dtype: torch.dtype = torch.float32


SHAPES = {
    "one residual key": Shape((1, 2, 50, 16, 2, 9)),
    "masks, two programs of groups": Shape((2, 1, 24, 24, 18, 5), scale=-0.3, masked=True),
    "one key, three channels, more groups than queries": Shape((1, 1, 20, 3, 24, 1)),
    "prefix and masks": Shape((1, 1, 40, 16, 2, 9), prefix=2, masked=True),
    "all keys": Shape((1, 1, 33, 80, 3, 33)),
    "no scale": Shape((1, 1, 30, 8, 2, 5), scale=0.0),
    "half precision, several blocks": Shape((1, 1, 150, 64, 20, 20), dtype=torch.float16),
    "clusters": Shape((1, 2, 50, 16, 2, 9), clusters=7),
    "a cluster for every key": Shape((1, 1, 18, 8, 3, 4), clusters=18),
    "a heavy group": Shape((1, 1, 1030, 8, 2, 3)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_equal_those_of_the_reference(make_case: Any, shape: Shape) -> None:
    case = make_case(*shape.sizes, masked=shape.masked, dtype=shape.dtype)
    tensors = plain(case)
    ids = None
    if shape.clusters > 1:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(-1, shape.clusters, tensors[1].shape[:3], generator=generator)
        ids = ids.to(case.query.device)
    grad = torch.randn_like(tensors[0])

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        output = dgt.dynamic_group_attention(
            *leaves,
            case.centroids,
            case.top_k,
            shape.scale,
            case.key_mask,
            backend,
            query_mask=case.query_mask,
            num_prefix_tokens=shape.prefix,
            residual_keys=shape.clusters,
            key_cluster_ids=ids,
        ).output
        return [output, *torch.autograd.grad(output, leaves, grad.to(dtype))]

    found = run("triton", shape.dtype)
    for ours, theirs in zip(found, run("reference", torch.float64), strict=True):
        check(ours, theirs)


def test_gradients_of_gradients(make_case: Any) -> None:
    case = make_case(1, 1, 30, 8, 3, 5)

    def run(backend: str) -> Tensor:
        leaves = [tensor.double() if backend == "reference" else tensor for tensor in case[:3]]
        output = dgt.dynamic_group_attention(
            *leaves, case.centroids, 5, backend=backend, residual_keys=1
        ).output
        grads = torch.autograd.grad(output.square().sum(), case[:3], create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), case.query)[0]

    check(run("triton"), run("reference").double())


def test_gradients_of_constants_of_keys_and_of_sums(make_case: Any) -> None:
    """Also where a constant hides a key."""
    case = make_case(1, 2, 30, 16, 3, 20)
    group_ids, key_ids = case.ids()
    group_ids[:, :, 4] = -1
    key_ids[:, 1, 2] = -1
    bias = torch.randn(1, 2, 30, device=key_ids.device)
    bias[0, 0, 7] = -torch.inf
    grad = torch.randn_like(case.query)
    of_sums = torch.randn(1, 2, 30, device=key_ids.device)

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*case[:3], bias)]
        *tokens, of_keys = leaves
        output, sums = dgt.attend_with_logsumexp(
            *tokens, group_ids, key_ids, -0.3, backend, of_keys
        )
        sums = sums.where(sums.detach().isfinite(), 0.0)
        results = (output, sums)
        return torch.autograd.grad(results, leaves, (grad.to(dtype), of_sums.to(dtype)))

    found = run("triton", torch.float32)
    for ours, theirs in zip(found, run("reference", torch.float64), strict=True):
        check(ours, theirs)


@pytest.mark.parametrize("first_order", [False, True])
def test_gradients_of_clustered_attention(make_case: Any, first_order: bool) -> None:
    case = make_case(1, 2, 60, 16, 1, 1)
    options: dict[str, Any] = {"num_groups": 5, "top_k": 12, "residual_keys": 4}
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in plain(case)]
        output = dgt.clustered_attention(
            *leaves, **options, first_order=first_order, backend=backend
        )
        results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        check(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "clusters", "scale", "dtype"),
    [
        ((1, 2, 50, 16, 2, 9), 7, None, torch.float32),
        (
            (1, 1, 150, 64, 20, 20),
            3,
            None,
            torch.float16,
        ),  # two programs of groups, several blocks of keys
        ((2, 1, 24, 24, 18, 5), 24, -0.3, torch.float32),  # a cluster for every key
        ((1, 1, 33, 128, 3, 33), 5, None, torch.float32),  # all keys: nothing is left
    ],
    ids=["clusters", "half precision", "one key each", "all keys"],
)
def test_residual_keys_of_given_clusters(
    make_case: Any, shape: tuple[int, ...], clusters: int, scale: float | None, dtype: torch.dtype
) -> None:
    case = make_case(*shape, dtype=dtype)
    tensors = plain(case)
    ids = torch.randint(
        -1, clusters, tensors[1].shape[:3], generator=torch.Generator().manual_seed(1)
    )
    more = {"residual_keys": clusters, "key_cluster_ids": ids.to(case.query.device)}

    def run(backend: str, *leaves: Tensor) -> Tensor:
        arguments = (*leaves, case.centroids, case.top_k, scale)
        return dgt.dynamic_group_attention(*arguments, backend=backend, **more).output

    check(run("triton", *tensors), run("reference", *(t.double() for t in tensors)))


def test_a_residual_key_is_exact_at_the_mean_query_after_rounding(make_case: Any) -> None:
    """Its bias is that of the rounded key: s m.k' + b is the logarithm of what the cluster weighs for m."""
    case = make_case(1, 1, 200, 32, 1, 1, dtype=torch.float16)
    query, key, value = plain(case)
    query = query[:, :, :1].expand_as(query)  # equal queries are their own mean
    group_ids = torch.zeros(1, 1, 200, dtype=torch.int64, device=key.device)
    key_ids = torch.full((1, 1, 1, 1), -1, device=key.device)
    clusters = torch.arange(200, device=key.device)[None, None] % 5
    rest_key, rest_value, bias, empty = OperatorSteps("triton").summarize_clusters(
        query,
        key,
        value,
        group_ids,
        key_ids,
        scale=0.3,
        key_cluster_ids=clusters,
        residual_keys=5,
    )
    assert rest_key.dtype == rest_value.dtype == torch.float16
    assert not empty.any()
    score = 0.3 * query[0, 0, 0].double() @ key[0, 0].double().mT
    mass = torch.stack([score[clusters[0, 0] == number].logsumexp(0) for number in range(5)])
    found = 0.3 * rest_key[0, 0, 0].double() @ query[0, 0, 0].double() + bias[0, 0, 0]
    torch.testing.assert_close(found, mass, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("prefix", "clusters", "masked"),
    [(0, 6, False), (3, 1, True), (2, 6, True), (0, 0, False)],
    ids=["clusters", "one", "prefix", "none"],
)
def test_clustered_attention(make_case: Any, prefix: int, clusters: int, masked: bool) -> None:
    """Groups and clusters found on the device are those of the reference."""
    case = make_case(2, 2, 90, 16, 1, 1, masked=masked)
    options: dict[str, Any] = {"num_groups": 5, "top_k": 12, "residual_keys": clusters}
    options |= {
        "num_prefix_tokens": prefix,
        "query_mask": case.query_mask,
        "key_mask": case.key_mask,
    }
    found = dgt.clustered_attention(*plain(case), **options, backend="triton")
    wide = dgt.clustered_attention(
        *(t.double() for t in plain(case)), **options, backend="reference"
    )
    check(found, wide)
    again = dgt.clustered_attention(*plain(case), **options, backend="triton")
    assert torch.equal(found, again)


def test_operators_of_clusters_can_be_traced(make_case: Any) -> None:
    case = make_case(1, 2, 30, 16, 3, 9)
    query, key, value = plain(case)
    clusters = torch.arange(30, device=key.device).expand(1, 2, 30) % 4
    utils = ("test_schema", "test_faketensor")
    arguments = (query, key, value, *case.ids(), 0.3, clusters.contiguous(), 4)
    torch.library.opcheck(torch.ops.dgt.summarize_clusters.default, arguments, test_utils=utils)
    torch.library.opcheck(torch.ops.dgt.sum_groups.default, (query, clusters, 4), test_utils=utils)
