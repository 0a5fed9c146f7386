"""Kernels against the reference: ids one by one, output and gradients within the rounding of their type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import dgt
from dgt.ops import grouping
from dgt.ops.triton import backend as kernels

# B, H, L, D, G, k; the comment names the branch.
SHAPES = [
    (2, 2, 1, 16, 3, 1),  # one token
    (1, 2, 3, 8, 2, 7),  # k above L
    (1, 1, 97, 32, 5, 1),  # one key per group
    (1, 1, 113, 24, 33, 49),  # channels not a power of two; two words of groups
    (2, 1, 196, 32, 6, 98),  # DGT's third stage except for its 48 groups; two images
    (1, 1, 239, 32, 65, 7),  # few tokens, but too many groups for one program
    (1, 1, 300, 64, 3, 400),  # many tokens with k above L
    (1, 2, 557, 32, 3, 98),  # several keys per block
    (
        1,
        1,
        600,
        16,
        20,
        9,
    ),  # many chunks of queries, and more groups than one float32 program sorts
    (1, 1, 97, 128, 2, 7),  # the widest head
]
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
def test_the_interpreter_is_the_one_that_is_made_quick(changed_in_triton: list[str]) -> None:
    told = f"Triton {triton.__version__} has another {', '.join(changed_in_triton)}: adapt tests/conftest.py"
    assert not changed_in_triton, told


def size(x: Tensor) -> float:
    """Root mean square, in float64."""
    return float(x.detach().double().square().mean().sqrt())


def check(found: Tensor, expected: Tensor, terms: float = 0.0) -> None:
    """Compare with a float64 result: 1e-5 in float32, half a percent of its magnitude in float16, no NaN.

    Where terms of a certain magnitude cancel, float16 leaves its unit roundoff of each, even if the
    result is zero.
    """
    error = found.double() - expected
    if found.dtype == torch.float32:
        assert error.abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    else:
        assert size(error) <= max(0.005 * size(expected), torch.finfo(found.dtype).eps / 2 * terms)


def cancelling(case: Any, grad: Tensor, grad_value: Tensor) -> tuple[float, ...]:
    """The magnitude of the terms that cancel in the output and the three gradients, for the default scale.

    The gradient of one score is p (dY v - dY y): two products over D channels, of magnitude |dY|
        |v| sqrt(D), where the scale removes the root; with one key per query, v is y, and only
        rounding is left. For dQ it weights keys by p, which sums to one; for dK it weights queries
        by p, as dY is weighted for dV.
    """
    value = size(case.value)
    return (
        0.0,
        size(grad) * value * size(case.key),
        size(grad_value) * value * size(case.query),
        0.0,
    )


def gradients(
    attend: Callable[..., Tensor], tensors: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, ...]:
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    output = attend(*leaves)
    return (output.detach(), *torch.autograd.grad(output, leaves, grad.to(output)))


def check_operator(case: Any) -> None:
    """Compare everything the whole operator returns, and all gradients."""
    group_ids, key_ids = case.ids()
    tensors = (case.query, case.key, case.value)
    grad = torch.randn(case.query.shape).to(case.query)
    seen: dict[str, Tensor] = {}

    def attention(*leaves: Tensor) -> Tensor:
        result = dgt.dynamic_group_attention(
            *leaves,
            case.centroids,
            case.top_k,
            query_mask=case.query_mask,
            key_mask=case.key_mask,
            backend="triton",
        )
        seen.update(group_ids=result.group_ids, key_ids=result.key_ids)
        return result.output

    found = gradients(attention, tensors, grad)
    assert torch.equal(seen["group_ids"], group_ids)
    assert torch.equal(seen["key_ids"], key_ids)

    def reference(*leaves: Tensor) -> Tensor:
        return dgt.attend(*leaves, group_ids, key_ids, backend="reference")

    wide = gradients(reference, tuple(t.double() for t in tensors), grad)
    for ours, theirs, terms in zip(found, wide, cancelling(case, grad, wide[-1]), strict=True):
        check(ours, theirs, terms)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operator_equals_the_reference(
    make_case: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_operator(make_case(*shape, dtype=dtype, masked=dtype == torch.float16))


@pytest.mark.parametrize("tokens", [15, 17, 256, 257, 1023, 1024, 1025])
def test_operator_equals_the_reference_around_sizes_of_blocks(make_case: Any, tokens: int) -> None:
    check_operator(make_case(1, 1, tokens, 16, 2, 9))


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, 2), st.just(1), st.integers(1, 150), st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(1, 60)),
    st.booleans(),
    st.sampled_from(TYPES),
)
def test_operator_equals_the_reference_on_any_shape(
    make_case: Any, tokens: Any, groups: Any, masked: bool, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16:  # with one channel, rounding alone may exceed the bound
        tokens = (*tokens[:3], max(8, tokens[3]))
    check_operator(make_case(*tokens, *groups, masked=masked, dtype=dtype))


@pytest.mark.parametrize("tokens", [97, 299])
def test_all_queries_in_one_group(make_case: Any, tokens: int) -> None:
    """All other groups are empty: they still select keys but affect nothing."""
    case = make_case(1, 1, tokens, 16, 5, 20)
    centroids = torch.zeros_like(case.centroids)
    centroids[:, 3] = 0.25
    case = case._replace(centroids=centroids, query=case.query.detach().abs() + 0.25)
    assert (case.ids()[0] == 3).all()
    check_operator(case)


def test_a_group_with_most_queries_is_split(make_case: Any) -> None:
    """Several programs share the gradients of its keys; the other groups have one run or none."""
    case = make_case(1, 1, 2200, 16, 5, 70)
    query = case.query.detach().clone()
    query[:, :, 300:] = case.centroids[:, 2, None] + query[:, :, 300:] / 16
    case = case._replace(query=(query * 64).round() / 64)
    share = (case.ids()[0] == 2).float().mean()
    assert 0.5 < share < 0.95
    check_operator(case)


@pytest.mark.parametrize(("tokens", "scale"), [(97, None), (97, -0.3), (299, None)])
def test_a_value_of_infinity_reaches_those_who_see_it(
    make_case: Any, tokens: int, scale: float | None
) -> None:
    """Other groups do not, with few tokens or many: zero times infinity would be NaN."""
    case = make_case(1, 2, tokens, 16, 5, 20)
    value = case.value.detach().clone()
    value[0, 0, 7], value[0, 1, 30:33, 3] = torch.inf, -torch.inf
    found = dgt.dynamic_group_attention(
        case.query, case.key, value, case.centroids, 20, scale, backend="triton"
    )
    # Gathered, as it is on CPUs at this size: under a mask infinity becomes NaN.
    inputs = (tensor.cpu() for tensor in (case.query, case.key, value, *case.ids()))
    plain = dgt.attend(*inputs, scale, backend="torch").to(value)
    assert not found.output.isnan().any()
    assert 0 < int(plain.isinf().any(-1).sum()) < plain[..., 0].numel()
    assert torch.equal(found.output.isinf(), plain.isinf())
    finite = plain.isfinite()
    torch.testing.assert_close(found.output[finite], plain[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("tokens", [97, 299], ids=["few tokens", "many tokens"])
def test_odd_keys_that_nobody_sees_leave_gradients_alone(
    make_case: Any, tokens: int, dtype: torch.dtype
) -> None:
    """Nor do the empty places after a list, whose content may be a valid id: here that of the first token."""
    case = make_case(1, 2, tokens, 16, 3, 10, dtype=dtype)
    group_ids, key_ids = case.ids()
    ones = torch.ones((), dtype=torch.bool, device=key_ids.device).expand_as(key_ids)
    chosen = torch.zeros(1, 2, 3, tokens, dtype=torch.bool, device=ones.device).scatter_(
        -1, key_ids, ones
    )
    free = ~chosen.any(2)[..., None]
    key = case.key.detach().masked_fill(free, torch.nan)  # never selected
    value = case.value.detach().masked_fill(free, torch.inf)
    # The first token of the first head must be one of them, or the test would not notice these
    # places.
    assert free[0, 0, 0]
    grad = torch.randn(case.query.shape).to(case.query)

    def attention(*leaves: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *leaves, case.centroids, case.top_k, backend="triton"
        ).output

    def reference(*leaves: Tensor) -> Tensor:
        return dgt.attend(*leaves, group_ids, key_ids, backend="reference")

    found = gradients(attention, (case.query, key, value), grad)
    wide = gradients(reference, tuple(t.double() for t in (case.query, case.key, case.value)), grad)
    for ours, theirs, terms in zip(found, wide, cancelling(case, grad, wide[-1]), strict=True):
        check(ours, theirs, terms)


def test_nothing_is_real(make_case: Any) -> None:
    """An image with only padding yields zeros, -1, and no gradient, whatever its size."""
    for tokens in (40, 300):
        case = make_case(1, 1, tokens, 16, 3, 9)
        nothing = torch.zeros(1, tokens, dtype=torch.bool, device=case.query.device)
        case = case._replace(query_mask=nothing, key_mask=nothing)
        check_operator(case)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(70, 311), (400, 30)])
def test_attend_with_other_keys_than_queries(
    make_case: Any, queries: int, keys: int, dtype: torch.dtype
) -> None:
    """Cross attention, with empty places in the middle of a list."""
    case, other = (
        make_case(1, 2, queries, 32, 6, 20, dtype=dtype),
        make_case(1, 2, keys, 32, 6, 20, dtype=dtype),
    )
    group_ids = case.ids()[0]
    key_ids = dgt.select_keys(case.centroids, other.key, 20, None, "torch")
    key_ids[:, :, 1, 5:9] = -1
    key_ids[:, :, 2] = -1
    tensors = (case.query, other.key, other.value)
    grad = torch.randn(case.query.shape).to(case.query)

    def run(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: dgt.attend(q, k, v, group_ids, key_ids, scale=0.3, backend=backend)

    wide = gradients(run("reference"), tuple(t.double() for t in tensors), grad)
    for ours, theirs in zip(gradients(run("triton"), tensors, grad), wide, strict=True):
        check(ours, theirs)


@pytest.mark.parametrize(
    ("tokens", "top_k"),
    [(40, 40), (300, 100), (4200, 20), (700, 513), (5000, 2100)],
    ids=["one block a key", "few blocks", "many blocks", "above 512", "more candidates than room"],
)
@pytest.mark.parametrize("masked", [False, True])
def test_selection_of_many_keys(make_case: Any, tokens: int, top_k: int, masked: bool) -> None:
    case = make_case(1, 1, tokens, 16, 2, top_k, masked=masked)
    found = kernels.select_keys(case.centroids, case.key, top_k, case.key_mask)
    assert torch.equal(found, case.ids()[1])


@pytest.mark.parametrize(("channels", "groups"), [(8, 65), (128, 17)])
def test_selection_of_float16_keys(make_case: Any, channels: int, groups: int) -> None:
    """One group more than a program can process."""
    case = make_case(1, 1, 300, channels, groups, 20, dtype=torch.float16, masked=True)
    found = kernels.select_keys(case.centroids, case.key, 20, case.key_mask)
    assert torch.equal(found, case.ids()[1])


def test_selection_where_keys_of_a_block_are_alike(make_case: Any) -> None:
    """All the best keys are in a few blocks, so many more keys than wanted reach the bound."""
    case = make_case(1, 1, 2000, 16, 2, 20)
    key = case.key.detach().clone()
    key[:, :, torch.arange(2000, device=key.device) % 64 < 30] += 10 * case.centroids[0, 0].sign()
    found = kernels.select_keys(case.centroids, key, 20, None)
    assert torch.equal(found, dgt.select_keys(case.centroids, key, 20, None, "torch"))


@pytest.mark.parametrize(("tokens", "top_k"), [(60, 58), (300, 20), (300, 298)])
def test_a_key_of_nan_is_never_selected(make_case: Any, tokens: int, top_k: int) -> None:
    """It ranks below everything, like padding."""
    case = make_case(1, 1, tokens, 32, 3, top_k)
    key = case.key.detach().clone()
    key[:, :, 7:12] = torch.nan
    key[:, :, 8] = -torch.nan
    found = kernels.select_keys(case.centroids, key, top_k, None)
    real = torch.ones(1, tokens, dtype=torch.bool, device=key.device)
    real[:, 7:12] = False
    assert torch.equal(
        found, dgt.select_keys(case.centroids, case.key.detach(), top_k, real, "torch")
    )


def test_float16_tells_centroids_apart_that_hardly_differ(device: str) -> None:
    """Components far below the smallest float16 number count, as they do in float32."""
    centroids = torch.zeros(1, 3, 32, device=device)
    centroids[0, :, 0] = torch.tensor([0.0, 5e-9, 2e-8])
    tokens = torch.zeros(1, 1, 40, 32, device=device, dtype=torch.float16)
    tokens[..., 0] = 1000 - torch.arange(40).to(tokens)
    assert (kernels.group_queries(tokens, centroids, None) == 2).all()
    assert (kernels.group_queries(-tokens, centroids, None) == 0).all()
    keys = kernels.select_keys(centroids, -tokens, 3, None)[0, 0]
    assert keys.tolist() == [[0, 1, 2], [37, 38, 39], [37, 38, 39]]


def test_selection_where_all_keys_tie(make_case: Any) -> None:
    """The lowest indices win in every selection method."""
    for tokens, top_k in ((200, 50), (700, 20), (300, 100)):
        case = make_case(1, 1, tokens, 32, 3, top_k)
        found = kernels.select_keys(case.centroids, torch.zeros_like(case.key), top_k, None)
        assert torch.equal(found, torch.arange(top_k, device=found.device).expand_as(found))


def test_scores_do_not_depend_on_the_precision_of_the_model(make_case: Any) -> None:
    """Float16 tokens with float32 centroids select the same keys as float64, up to float32 rounding of scores."""
    case = make_case(1, 1, 400, 32, 20, 30, dtype=torch.float16, exact=False)
    score = torch.einsum("bhld,hgd->bhlg", case.query.double(), case.centroids.double())
    chosen = kernels.group_queries(case.query, case.centroids, None)
    assert (score.max(-1).values - score.gather(-1, chosen[..., None])[..., 0]).max() <= 1e-5
    score = torch.einsum("hgd,bhld->bhgl", case.centroids.double(), case.key.double())
    keys = kernels.select_keys(case.centroids, case.key, 30, None)
    worst = score.gather(-1, keys).min(-1).values
    assert (score.topk(30).values[..., -1] - worst).max() <= 1e-5


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 50, 24, 5), (1, 1, 1200, 32, 100)], ids=str)
def test_centroid_statistics(make_case: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sums and counts equal those of the plain path for the given groups; padding is not counted."""
    case = make_case(*shape, 1, masked=True, dtype=dtype)
    ids = case.ids()[0]
    sums, counts = grouping.group_statistics(case.query, ids, shape[4], "triton")
    expected_sums, expected_counts = grouping.group_statistics(case.query, ids, shape[4], "torch")
    assert torch.equal(counts, expected_counts)
    torch.testing.assert_close(sums, expected_sums, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [100, 300])
def test_repeats_are_bit_equal(make_case: Any, tokens: int) -> None:
    case = make_case(1, 1, tokens, 32, 6, 40, exact=False)
    runs = []
    for _ in range(2):
        output = dgt.dynamic_group_attention(
            case.query, case.key, case.value, case.centroids, case.top_k, backend="triton"
        ).output
        runs.append(
            (output, *torch.autograd.grad(output.sum(), (case.query, case.key, case.value)))
        )
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
