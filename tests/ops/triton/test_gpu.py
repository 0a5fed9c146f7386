"""What only a GPU can show: precision in bfloat16, repeatability, memory, and large addresses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.ops import reference
from dgt.ops.residual_keys import append_residual_keys

pytestmark = pytest.mark.gpu
SHAPES = [
    (2, 2, 196, 32, 48, 98),
    (1, 2, 3136, 32, 48, 98),
    (1, 2, 1023, 64, 7, 49),
    (1, 1, 4097, 128, 16, 200),
]


def seen_by(group_ids: Tensor, key_ids: Tensor, tokens: int) -> Tensor:
    """(B, H, L, L) bool: the mask that makes dense attention equal to ours."""
    chosen = torch.zeros(*key_ids.shape[:3], tokens, dtype=torch.bool, device=key_ids.device)
    return torch.take_along_dim(chosen.scatter_(-1, key_ids, True), group_ids[..., None], dim=2)


def with_gradients(attend: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output))]


def rmse(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_that_of_sdpa(make_case: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """At most 1.5 times the error of SDPA under the same mask at the same precision, and half a percent of the size."""
    case = make_case(*shape, dtype=dtype, exact=False)
    tensors = (case.query, case.key, case.value)
    result = dgt.dynamic_group_attention(*tensors, case.centroids, case.top_k, backend="triton")
    ids = result.group_ids, result.key_ids
    mask = seen_by(*ids, shape[2])
    grad = torch.randn(case.query.shape, device=case.query.device, dtype=dtype)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dgt.attend(q, k, v, *ids, backend="triton")

    exact = with_gradients(sdpa, tuple(t.double() for t in tensors), grad)
    theirs, found = with_gradients(sdpa, tensors, grad), with_gradients(ours, tensors, grad)
    for name, a, b, c in zip(
        ("output", "query", "key", "value"), found, theirs, exact, strict=True
    ):
        size = float(c.square().mean().sqrt())
        assert rmse(a, c) <= max(1.5 * rmse(b, c), 1e-7 * size), name
        assert rmse(a, c) <= 0.005 * size, name
        assert (a.double() - c).abs().max() <= 1.5 * (b.double() - c).abs().max() + 1e-3 * size, (
            name
        )


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_repeats_are_bit_equal(make_case: Any, shape: tuple[int, ...]) -> None:
    """250 times forward, 50 times backward."""
    case = make_case(*shape, dtype=torch.bfloat16, exact=False)
    tensors = (case.query, case.key, case.value)

    def attend(*leaves: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *leaves, case.centroids, case.top_k, backend="triton"
        ).output

    grad = torch.randn_like(case.query)
    first = with_gradients(attend, tensors, grad)
    with torch.no_grad():
        assert all(torch.equal(attend(*tensors), first[0]) for _ in range(250))
    for _ in range(50):
        assert all(
            torch.equal(a, b)
            for a, b in zip(with_gradients(attend, tensors, grad), first, strict=True)
        )


@pytest.mark.parametrize(
    "shape",
    [(128, 2, 3136, 98), (32, 2, 16384, 512), (8, 2, 64000, 500)],
    ids=["L3136", "L16384", "L64000"],
)
def test_peak_memory_is_that_of_sdpa(shape: tuple[int, ...]) -> None:
    """Forward and backward within 1.3 times the peak of SDPA over all keys, inputs included."""
    batch, heads, tokens, top_k = shape
    centroids = F.normalize(torch.randn(heads, 48, 32, device="cuda"), dim=-1)

    def peak(attend: Any) -> int:
        leaves = [
            torch.randn(batch, heads, tokens, 32, device="cuda", dtype=torch.bfloat16)
            for _ in range(3)
        ]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        output = attend(*leaves)
        output.backward(torch.ones_like(output))
        return torch.cuda.max_memory_allocated()

    sdpa = peak(F.scaled_dot_product_attention)
    ours = peak(
        lambda *leaves: (
            dgt.dynamic_group_attention(*leaves, centroids, top_k, backend="triton").output
        )
    )
    assert ours <= 1.3 * sdpa


def test_more_than_two_to_the_31_elements() -> None:
    """Addresses are 64-bit: the last head of a large tensor is right."""
    tokens = 2**31 // (32 * 64) + 1000
    qkv = torch.randn(1, 64, tokens, 32, device="cuda", dtype=torch.bfloat16)
    centroids = F.normalize(torch.randn(64, 4, 32, device="cuda"), dim=-1)
    whole = dgt.dynamic_group_attention(qkv, qkv, qkv, centroids, 50, backend="triton")
    last = qkv[:, -1:]
    alone = dgt.dynamic_group_attention(last, last, last, centroids[-1:], 50, backend="triton")
    assert torch.equal(whole.output[:, -1:], alone.output)


def operator(case: Any, *leaves: Tensor) -> Tensor:
    """The output of the whole operator from the kernels."""
    return dgt.dynamic_group_attention(*leaves, case.centroids, case.top_k, backend="triton").output


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_cuda_graph_replays_forward_and_backward(make_case: Any, shape: tuple[int, ...]) -> None:
    """Captured once and replayed on other inputs, it is bit-identical to plain launches."""
    case, other = (make_case(*shape, dtype=torch.bfloat16, exact=False) for _ in range(2))
    tensors, fresh = ([t.detach() for t in (c.query, c.key, c.value)] for c in (case, other))
    grad = torch.randn_like(tensors[0])
    static = [t.clone() for t in tensors]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        for _ in range(3):
            with_gradients(lambda *x: operator(case, *x), tuple(static), grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(lambda *x: operator(case, *x), tuple(static), grad)
    for into, source in zip(static, fresh, strict=True):
        into.copy_(source)
    graph.replay()
    expected = with_gradients(lambda *x: operator(case, *x), tuple(fresh), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_side_stream(make_case: Any) -> None:
    """Kernels run on the current stream, after the work it waits for."""
    case = make_case(1, 2, 3136, 32, 48, 98, dtype=torch.bfloat16, exact=False)
    tensors = [t.detach() for t in (case.query, case.key, case.value)]
    expected = operator(case, *tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = [torch.zeros_like(t) for t in tensors]
        torch.cuda._sleep(50_000_000)
        for into, source in zip(late, tensors, strict=True):
            into.copy_(source)
        found = operator(case, *late)
    side.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("residual_keys", [0, 1, 3])
def test_auto_takes_the_kernels(make_case: Any, residual_keys: int) -> None:
    """But PyTorch's operations for gradients that these lack."""
    case = make_case(1, 2, 300, 32, 8, 20, dtype=torch.bfloat16, exact=False)
    grad = torch.randn_like(case.query)

    def attend(backend: str, *leaves: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *leaves, case.centroids, case.top_k, backend=backend, residual_keys=residual_keys
        ).output

    tensors = (case.query, case.key, case.value)
    with torch.no_grad():
        assert torch.equal(attend("auto", *tensors), attend("triton", *tensors))
    found = with_gradients(lambda *x: attend("auto", *x), tensors, grad)
    named = "torch" if residual_keys else "triton"
    expected = with_gradients(lambda *x: attend(named, *x), tensors, grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_device(make_case: Any) -> None:
    """The tensors determine where kernels run, not the current device."""
    case = make_case(1, 2, 300, 32, 8, 20, dtype=torch.bfloat16, exact=False)
    second = case._replace(centroids=case.centroids.to("cuda:1"))
    tensors = (case.query, case.key, case.value)
    grad = torch.randn_like(case.query)
    here = with_gradients(lambda *x: operator(case, *x), tensors, grad)
    there = with_gradients(
        lambda *x: operator(second, *x), tuple(t.to("cuda:1") for t in tensors), grad.to("cuda:1")
    )
    assert all(torch.equal(a, b.to("cuda:0")) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("tokens", [196, 784])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_under_inductor(make_case: Any, tokens: int, mode: str) -> None:
    """The kernels in a compiled function, which chooses them: no graph break, forward and backward."""
    case = make_case(2, 2, tokens, 32, 48, 98, dtype=torch.bfloat16, exact=False)
    tensors = (case.query, case.key, case.value)

    def attend(*leaves: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(*leaves, case.centroids, case.top_k).output * 2

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    grad = torch.randn_like(case.query)
    expected = with_gradients(attend, tensors, grad)
    for _ in range(3):  # a graph is recorded, then replayed
        found = [t.clone() for t in with_gradients(compiled, tensors, grad)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_autocast_float16_with_a_grad_scaler() -> None:
    """A layer trains under autocast in float16, with a scaled loss, and its weights stay finite."""
    torch.manual_seed(0)
    layer = dgt.DGAttention(64, num_heads=2, num_groups=8, top_k=20, backend="triton").cuda()
    optimizer, scaler = torch.optim.AdamW(layer.parameters(), lr=1e-3), torch.amp.GradScaler("cuda")
    x = torch.randn(4, 300, 64, device="cuda")
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", torch.float16):
            loss = (layer(x).float() - x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(bool(p.isfinite().all()) for p in layer.parameters())


def test_a_model_under_cuda_graphs() -> None:
    """DGT-T compiled with ``mode="reduce-overhead"`` gives the logits of the plain model, in bfloat16."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("dgt_tiny", num_classes=10).cuda().eval()
    dgt.set_attention(model, backend="triton")
    torch.compiler.reset()
    compiled = torch.compile(model, mode="reduce-overhead")
    image = torch.randn(2, 3, 224, 224, device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        expected = model(image)
        for _ in range(3):
            found = compiled(image).clone()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


ACCELERATED = [(1, 6, 4096, 64, 48, 98), (2, 2, 1023, 128, 17, 49), (1, 2, 196, 32, 5, 20)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ACCELERATED, ids=str)
def test_error_with_a_residual_key_is_that_of_the_plain_path(
    make_case: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With a prefix: at most 1.5 times its error and half a percent of the size, with the same groups and keys."""
    case, scale = make_case(*shape, dtype=dtype, exact=False), shape[3] ** -0.5
    tensors = [t.detach() for t in case[:3]]
    found = dgt.dynamic_group_attention(
        *tensors, *case[3:5], backend="triton", num_prefix_tokens=5, residual_keys=1
    )
    plain = dgt.dynamic_group_attention(
        *tensors, *case[3:5], backend="torch", num_prefix_tokens=5, residual_keys=1
    )
    query, key, value = (t.double() for t in tensors)
    patches, groups = query[:, :, 5:], found.group_ids[:, :, 5:]
    clusters = torch.zeros(key.shape[:3], dtype=torch.int64, device=key.device)
    rest = reference.summarize_clusters(
        patches,
        key,
        value,
        groups,
        found.key_ids,
        scale=scale,
        key_cluster_ids=clusters,
        residual_keys=1,
    )
    seen = append_residual_keys(key, value, found.key_ids, rest)
    exact, _ = reference.attend_with_logsumexp(patches, *seen[:2], groups, seen[2], scale, seen[3])
    same = (plain.group_ids == found.group_ids)[:, :, 5:, None]  # near ties may differ
    ours, theirs = (
        rmse(output[:, :, 5:] * same, exact * same) for output in (found.output, plain.output)
    )
    assert ours <= 1.5 * theirs + 1e-3 * float(exact.square().mean().sqrt())
    assert ours <= 0.005 * float(exact.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ACCELERATED, ids=str)
def test_gradients_with_a_residual_key_are_as_near_as_the_plain_path(
    make_case: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """At most 1.5 times its error and a percent of the size; the same bits in every run."""
    case = make_case(*shape, dtype=dtype, exact=False)
    ids, scale = case.ids(), shape[3] ** -0.5
    tensors = (case.query, case.key, case.value)
    grad = torch.randn_like(case.query)

    def attend(backend: str, *leaves: Tensor) -> Tensor:
        found: Tensor = torch.ops.dgt.attend(
            *leaves, *ids, scale, residual_keys=1, backend=backend
        )[0]
        return found

    found, again, theirs = (
        with_gradients(functools.partial(attend, backend), tensors, grad)
        for backend in ("triton", "triton", "torch")
    )
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    wide = tuple(tensor.double() for tensor in tensors)
    exact = with_gradients(functools.partial(attend, "torch"), wide, grad)
    for a, b, c in zip(found, theirs, exact, strict=True):
        size = float(c.square().mean().sqrt())
        assert rmse(a, c) <= 1.5 * rmse(b, c) + 1e-3 * size
        assert rmse(a, c) <= 0.01 * size


def test_residual_keys_repeat_and_replay(make_case: Any) -> None:
    """50 bit-identical repeats, also when captured once in a CUDA graph and replayed on other inputs."""
    case, other = (make_case(*ACCELERATED[0], dtype=torch.bfloat16, exact=False) for _ in range(2))
    static, fresh = ([t.detach().clone() for t in c[:3]] for c in (case, other))

    def attend(*tensors: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *tensors, *case[3:5], backend="triton", num_prefix_tokens=5, residual_keys=1
        ).output

    first, expected = attend(*static), attend(*fresh)
    assert all(torch.equal(attend(*static), first) for _ in range(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*static)
    for into, source in zip(static, fresh, strict=True):
        into.copy_(source)
    graph.replay()
    assert torch.equal(output, expected)


def test_an_accelerated_call_under_inductor(make_case: Any) -> None:
    """With separate centroids per image, without gradients."""
    case = make_case(*ACCELERATED[2], dtype=torch.bfloat16, exact=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = dgt.find_centroids(query[:, :, 5:], case.centroids, 1)
        return dgt.dynamic_group_attention(
            query, key, value, own, 20, backend="triton", num_prefix_tokens=5, residual_keys=1
        ).output

    torch.compiler.reset()
    tensors = [t.detach() for t in case[:3]]
    torch.testing.assert_close(
        torch.compile(attend)(*tensors), attend(*tensors), rtol=0.02, atol=0.02
    )


def of_torch(case: Any, *leaves: Tensor) -> Tensor:
    """The output of the whole operator in PyTorch's own kernels."""
    return dgt.dynamic_group_attention(*leaves, case.centroids, case.top_k, backend="torch").output


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_torch_backend_is_right_and_waits_for_nothing(
    make_case: Any, shape: tuple[int, ...], dtype: torch.dtype, crowded: bool
) -> None:
    """Also where nearly all queries are in one group and most sequences of flash attention are empty."""
    case = make_case(*shape, dtype=dtype, exact=False)
    tensors = [t.detach() for t in (case.query, case.key, case.value)]
    if crowded:
        tensors[0] = (tensors[0] + 20 * case.centroids[None, :, :1]).to(dtype)
    grad = torch.randn_like(tensors[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = with_gradients(lambda *x: of_torch(case, *x), tuple(tensors), grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ids = (
        dgt.group_queries(tensors[0], case.centroids, None, "torch"),
        dgt.select_keys(case.centroids, tensors[1], case.top_k, None, "torch"),
    )
    exact = with_gradients(
        lambda *x: reference.attend(*x, *ids, shape[3] ** -0.5),
        tuple(t.double() for t in tensors),
        grad,
    )
    for name, ours, theirs in zip(("output", "query", "key", "value"), found, exact, strict=True):
        # Inputs, P and dS are rounded, and the result.
        allowed = max(4 * torch.finfo(dtype).eps, 1e-5)
        assert rmse(ours, theirs) <= allowed * float(theirs.square().mean().sqrt()), name


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_cuda_graph_replays_the_torch_backend(make_case: Any, shape: tuple[int, ...]) -> None:
    """Captured once and replayed on other inputs, the result is that of plain calls."""
    case, other = (make_case(*shape, dtype=torch.bfloat16, exact=False) for _ in range(2))
    static, fresh = ([t.detach().clone() for t in c[:3]] for c in (case, other))
    expected = of_torch(case, *fresh)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        of_torch(case, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = of_torch(case, *static)
    for into, source in zip(static, fresh, strict=True):
        into.copy_(source)
    graph.replay()
    torch.testing.assert_close(output, expected)
