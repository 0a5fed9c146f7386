"""The native kernels beyond the common properties of backends: strides, threads, processes, memory, half precision."""

import multiprocessing
import resource
import threading
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops import reference
from dgt.ops.cpu import library
from dgt.ops.dispatch import OperatorSteps
from dgt.ops.residual_keys import attend_to_residual_keys

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)

STEPS = OperatorSteps("native")


WHOLE = {
    "query_mask": None,
    "key_mask": None,
    "num_prefix_tokens": 0,
    "residual_keys": 0,
    "key_cluster_ids": None,
    "return_ids": True,
    "backend": "native",
}


def whole(*arguments: object, **more: object) -> tuple[Tensor, Tensor, Tensor]:
    """Output, groups and keys of the three steps in one."""
    output, _, group_ids, key_ids, _ = torch.ops.dgt.attention(*arguments, **{**WHOLE, **more})
    return output, group_ids, key_ids


def clusters_of(key: Tensor, residual_keys: int) -> Tensor | None:
    """Clusters of neighbors, one in every M + 1 keys in none; with M = 1 all keys are in one."""
    if residual_keys <= 1:
        return None
    number = torch.arange(key.shape[2]) % (residual_keys + 1) - 1
    return number.expand(key.shape[:3])


class Case(NamedTuple):
    """The tensors of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor
    top_k: int
    scale: float


def make_case(
    images: int = 2,
    heads: int = 2,
    tokens: int = 300,
    channels: int = 24,
    groups: int = 7,
    top_k: int = 20,
) -> Case:
    generator = torch.Generator().manual_seed(tokens)
    shape = (images, heads, tokens, channels)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    centroids = F.normalize(torch.randn(heads, groups, channels, generator=generator), dim=-1)
    return Case(query, key, value, centroids, top_k, channels**-0.5)


def attend(
    case: Case, mask: Tensor | None = None, prefix: int = 0, residual_keys: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return whole(
        *case,
        query_mask=mask,
        key_mask=mask,
        num_prefix_tokens=prefix,
        residual_keys=residual_keys,
        key_cluster_ids=clusters_of(case.key, residual_keys),
    )


def gradients(case: Case, residual_keys: int = 0) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in case[:3]]
    output, _, _ = attend(Case(*inputs, *case[3:]), residual_keys=residual_keys)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return torch.autograd.grad(output, inputs, weights)


@pytest.fixture
def threads():
    """Set PyTorch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Few heads share every step, many are processed whole, few keys are marked, and large parts are
# divided.
SHAPES = [
    {"images": 1, "heads": 1, "tokens": 5000, "groups": 3},
    {"images": 1, "heads": 2, "tokens": 2500, "groups": 48, "top_k": 98},
    {"images": 8, "heads": 2, "tokens": 150, "top_k": 60},
    {"images": 1, "heads": 2, "tokens": 196, "groups": 48, "top_k": 98, "channels": 32},
]


@pytest.mark.parametrize("residual_keys", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_do_not_depend_on_threads_or_runs(shape, dtype, residual_keys, threads):
    case = make_case(**shape)
    case = Case(*(tensor.to(dtype) for tensor in case[:3]), *case[3:])
    found = []
    for count in (1, 2, 3, 2, 1):
        threads(count)
        found.append((*attend(case, residual_keys=residual_keys), *gradients(case, residual_keys)))
    for again in found[1:]:
        for before, now in zip(found[0], again, strict=True):
            assert torch.equal(before, now)


@pytest.mark.parametrize("residual_keys", [0, 1, 5])
def test_views_of_one_projection_are_read_as_they_are(residual_keys):
    case = make_case(channels=32)
    packed = torch.stack(case[:3], dim=2).permute(0, 3, 2, 1, 4).contiguous()  # (B, L, 3, H, D)
    views = packed.permute(2, 0, 3, 1, 4).unbind(0)
    assert not views[0].is_contiguous()
    same = Case(*views, *case[3:])
    for expected, found in zip(
        (*attend(case, residual_keys=residual_keys), *gradients(case, residual_keys)),
        (*attend(same, residual_keys=residual_keys), *gradients(same, residual_keys)),
        strict=True,
    ):
        assert torch.equal(expected, found)


def test_output_lies_in_memory_as_a_projection_reads_it():
    case = make_case()
    output = attend(case)[0]
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("residual_keys", [0, 1, 5])
def test_channels_that_are_apart_are_copied(residual_keys):
    case = make_case()
    apart = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in case[:3]]
    assert apart[0].stride(-1) != 1
    same = Case(*apart, *case[3:])
    for expected, found in zip(
        (*attend(case, residual_keys=residual_keys), *gradients(case, residual_keys)),
        (*attend(same, residual_keys=residual_keys), *gradients(same, residual_keys)),
        strict=True,
    ):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("residual_keys", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_half_precision_errs_no_more_than_pytorch(shape, dtype, residual_keys):
    case = make_case(**shape)
    halves = [tensor.to(dtype).requires_grad_() for tensor in case[:3]]
    exact = [tensor.detach().double().requires_grad_() for tensor in halves]
    output, group_ids, key_ids = attend(Case(*halves, *case[3:]), residual_keys=residual_keys)
    arguments = (*exact, group_ids, key_ids, case.scale)
    if residual_keys:
        clusters = clusters_of(case.key, residual_keys)
        more = {"key_cluster_ids": clusters, "residual_keys": residual_keys}
        expected = attend_to_residual_keys(reference, *arguments[:-1], scale=case.scale, **more)
    else:
        expected = reference.attend(*arguments)
    own_error = (output.double() - expected).abs().max()
    dense = F.scaled_dot_product_attention(*halves, scale=case.scale)
    exact_dense = F.scaled_dot_product_attention(*exact, scale=case.scale)
    # Only the rounding of the output can differ, relative to its largest value; residual keys are rounded, too.
    roundings = 2 if residual_keys else 1
    unit = expected.abs().max() / exact_dense.abs().max()
    assert own_error <= 1.5 * roundings * unit * (dense.double() - exact_dense).abs().max()

    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, halves, grad)
    for ours, theirs in zip(
        found, torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= 8 * torch.finfo(
            dtype
        ).eps * theirs.abs().max()


@pytest.mark.parametrize("place", ["query", "key"])
@pytest.mark.parametrize("tokens", [40, 3000])
def test_nan_is_found(place, tokens):
    case = make_case(images=1, heads=2, tokens=tokens)
    getattr(case, place)[0, 1, tokens // 2, 3] = torch.nan
    with pytest.raises(ValueError, match=f"{place} must not contain NaN"):
        attend(case)


def test_nan_in_padding_is_not():
    case = make_case(images=1)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[0, 150] = False
    case.query[0, :, 150] = torch.nan
    output = attend(case, mask)[0]
    assert output.isfinite().all()
    assert not output[0, :, 150].any()


def test_keys_of_minus_infinity_are_never_selected():
    centroids = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    key = torch.zeros(1, 1, 50, 4)
    key[..., 0] = -torch.inf
    key[..., :6, 0] = 1.0
    key_ids = STEPS.select_keys(centroids, key, 10, None)
    assert key_ids.tolist() == [[[[0, 1, 2, 3, 4, 5, -1, -1, -1, -1]]]]
    assert torch.equal(key_ids, reference.select_keys(centroids, key, 10, None))


def test_logsumexp_and_its_gradient():
    case = make_case()
    inputs = [tensor.double().requires_grad_() for tensor in case[:3]]
    singles = [tensor.detach().float().requires_grad_() for tensor in inputs]
    _, group_ids, key_ids = attend(case)
    bias = torch.linspace(-1, 1, 2 * 2 * 300).view(2, 2, 300).requires_grad_()
    wide_bias = bias.detach().double().requires_grad_()
    ours = STEPS.attend_with_logsumexp(*singles, group_ids, key_ids, case.scale, bias)
    theirs = reference.attend_with_logsumexp(*inputs, group_ids, key_ids, case.scale, wide_bias)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), yours, rtol=1e-5, atol=1e-5)
    weights = [torch.randn_like(tensor) for tensor in ours]
    found = torch.autograd.grad(ours, [*singles, bias], weights)
    expected = torch.autograd.grad(
        theirs, [*inputs, wide_bias], [weight.double() for weight in weights]
    )
    for mine, yours in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), yours, rtol=1e-4, atol=1e-5)


def test_statistics_of_groups():
    case = make_case()
    group_ids = STEPS.group_queries(case.query, case.centroids, None)
    sums, counts = STEPS.group_statistics(case.query, group_ids, 7)
    member = F.one_hot(group_ids, 7).double()
    unit = F.normalize(case.query.double(), dim=-1)
    torch.testing.assert_close(
        sums.double(), torch.einsum("bhlg,bhld->hgd", member, unit), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(counts.double(), member.sum((0, 2)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(method):
    expected = attend(make_case())[0].sum().item()  # starts PyTorch's threads before the fork
    context = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=_one_thread_in_a_process, args=(results,))
    process.start()
    found = results.get(timeout=120)
    process.join(timeout=60)
    assert found == expected


def _one_thread_in_a_process(results: "multiprocessing.Queue[float]") -> None:
    torch.set_num_threads(1)  # as a DataLoader's worker does
    results.put(attend(make_case())[0].sum().item())


def test_two_threads_that_call_at_once():
    case = make_case(tokens=1500)
    expected = attend(case)
    wrong: list[int] = []

    def call() -> None:
        for turn in range(20):
            if not all(torch.equal(a, b) for a, b in zip(expected, attend(case), strict=True)):
                wrong.append(turn)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_memory_does_not_grow():
    case = make_case(tokens=400, top_k=30)

    def call(times: int) -> int:
        for _ in range(times):
            attend(case)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    call(50)
    before = call(50)
    # KiB: leaking the memory of each call would be a thousand times more.
    assert call(2000) - before < 4 << 10


def test_many_tokens():
    case = make_case(images=1, heads=1, tokens=1 << 17, channels=8, groups=9, top_k=12)
    output, group_ids, key_ids = attend(case)
    expected = reference.attend(
        case.query[:, :, -200:], case.key, case.value, group_ids[:, :, -200:], key_ids, case.scale
    )
    torch.testing.assert_close(output[:, :, -200:], expected, rtol=1e-5, atol=1e-5)


def test_compiles_whole_and_exports():
    case = make_case()

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return whole(query, key, value, *case[3:], return_ids=False)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*case[:3]), function(*case[:3]))
    shorter = [tensor[:, :, :200] for tensor in case[:3]]
    torch.testing.assert_close(compiled(*shorter), function(*shorter))


@pytest.mark.parametrize("residual_keys", [0, 1, 5])
def test_the_whole_passes_the_checks_of_pytorch(residual_keys):
    case = make_case(tokens=60)
    inputs = [tensor.requires_grad_() for tensor in case[:3]]
    clusters = clusters_of(case.key, residual_keys)
    more = {"residual_keys": residual_keys, "key_cluster_ids": clusters}
    output, group_ids, key_ids = whole(*case, **more)
    without = [tensor.detach() for tensor in case[:4]]
    attention = torch.ops.dgt.attention.default
    torch.library.opcheck(attention, (*case,), {**WHOLE, **more})
    torch.library.opcheck(attention, (*without, *case[4:]), {**WHOLE, **more, "return_ids": False})
    arguments = (*inputs, group_ids, key_ids, case.scale)
    torch.library.opcheck(torch.ops.dgt.attend.default, arguments, more)
    assert torch.equal(output, torch.ops.dgt.attend(*arguments, **more)[0])
    assert torch.equal(output, whole(*case, **more, return_ids=False)[0])


@pytest.mark.parametrize("residual_keys", [1, 5])
def test_files_attend_to_residual_keys_where_the_native_kernels_cannot(residual_keys):
    """As with float64, which they do not take."""
    case = make_case(tokens=60)
    inputs = [tensor.double().requires_grad_() for tensor in case[:3]]
    clusters = torch.ops.dgt.cluster_tokens(inputs[1].detach(), residual_keys, 2, 3, None)[1]
    _, group_ids, key_ids = attend(case)
    more = {"scale": case.scale, "residual_keys": residual_keys, "key_cluster_ids": clusters}
    torch.library.opcheck(torch.ops.dgt.attend.default, (*inputs, group_ids, key_ids), more)
    output = torch.ops.dgt.attend(*inputs, group_ids, key_ids, **more)[0]
    expected = attend_to_residual_keys(reference, *inputs, group_ids, key_ids, **more)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("selected", "summed"), [("all", "all"), ("all", "none"), ("none", "all"), ("none", "none")]
)
def test_queries_whose_keys_or_residual_keys_are_missing(groups, selected, summed):
    """Lists of all keys leave residual keys nothing to sum up; queries that see no key yield zero."""
    torch.manual_seed(0)
    queries, keys, residual_keys = 37, 53, 3
    query = torch.randn(2, 2, queries, 9)
    key, value = torch.randn(2, 2, 2, keys, 9)
    group_ids = torch.randint(groups, (2, 2, queries))
    key_ids = torch.arange(keys).expand(2, 2, groups, keys)
    clusters = torch.randint(residual_keys, (2, 2, keys))
    if selected == "none":
        key_ids = key_ids.new_full((2, 2, groups, 4), -1)
    if summed == "none":
        clusters = torch.full_like(clusters, -1)
    more = {"scale": 0.3, "residual_keys": residual_keys, "key_cluster_ids": clusters}
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = torch.ops.dgt.attend(*inputs, group_ids, key_ids, **more)[0]
    expected = attend_to_residual_keys(reference, *exact, group_ids, key_ids, **more)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert (selected == summed == "none") == (not output.any())
    grad = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, inputs, grad),
        torch.autograd.grad(expected, exact, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual_keys", [1, 5])
def test_residual_keys_have_gradients_of_gradients(residual_keys):
    case = make_case(images=1, tokens=30, channels=4, groups=3, top_k=5)
    clusters = clusters_of(case.key, residual_keys)

    def twice(attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in case[:3]]
        first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), inputs)

    _, group_ids, key_ids = attend(case, residual_keys=residual_keys)
    ids = (group_ids, key_ids)
    more = {"scale": case.scale, "residual_keys": residual_keys, "key_cluster_ids": clusters}
    ours = twice(lambda *qkv: torch.ops.dgt.attend(*qkv, *ids, **more)[0], torch.float32)
    exact = twice(
        lambda *qkv: attend_to_residual_keys(reference, *qkv, *ids, **more), torch.float64
    )
    for actual, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
