"""The whole operator on a GPU against what users would pick instead, with the share of the floor it reaches.

    python benchmarks/gpu_attention.py forward|backward|profile|accelerated --out FILE.json [--cases 3136,196]

Grouping, selection and attention in bfloat16, D 32, G 48, beside SDPA (flash) over all keys, SDPA in windows of 49 keys
(what Swin does), the steps launched one by one, and the products of the paper's appendix with P in memory. Every case
is first checked against dense attention under a mask. A row is on disk as soon as it is measured. The floor is the
larger of the fewest bytes over the memory's rate and the operations over the matrix units' rate; both are arguments.
`profile` lists every kernel of forward and backward with its time; kernels are counted once. `accelerated` is forward
of what `dgt.accelerate` puts into a vision transformer: D 64, a prefix of 5 tokens, a remainder, beside flash SDPA.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import Rows, times
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import dgt
from dgt.ops.triton import operators as kernels

CASES = ((128, 2, 3136, 98), (128, 8, 196, 98), (32, 2, 16384, 512), (8, 2, 64000, 500), (128, 4, 784, 98),
         (32, 2, 16384, 513))  # fmt: skip
ACCELERATED, PREFIX = ((8, 6, 4096, 98), (8, 6, 16384, 98)), 5
TARGETS = {3136: 5.0, 16384: 8.0, 64000: 25.0, 196: 1 / 1.5}  # times as fast as SDPA over all keys
CHANNELS, GROUPS, WINDOW = 32, 48, 49
MODEL = Path(__file__).parent / "results" / "gpu_model.json"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure one part, case by case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["forward", "backward", "profile", "accelerated"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", help="numbers of tokens, comma-separated (default: all)")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of a large copy")
    parser.add_argument("--rate", type=float, default=790e12, help="bfloat16 operations per second of a large product")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = Rows(options.out, options.part)
    for case in ACCELERATED if options.part == "accelerated" else CASES:
        if options.cases and str(case[2]) not in options.cases.split(","):
            continue
        if options.part == "accelerated":
            rows.add(accelerated(*case))
            continue
        query, key, value, centroids = inputs(*case[:3])
        title = "B{} H{} L{} k{}".format(*case) + f" D{CHANNELS} G{GROUPS} bfloat16"
        attend = candidates(case, centroids)
        check(query[:1], key[:1], value[:1], centroids, case[3])
        if options.part == "profile":
            rows.add({"case": title, "kernels_us": kernel_times(attend["triton"], query, key, value)})
            continue
        row = {"case": title, "model_ms": predicted(case, options.part)}
        backward = options.part == "backward"
        for name, function in attend.items():
            row |= timings(name, function, backward, query, key, value)
        floor = floor_ms(case, options.bandwidth, options.rate, backward)
        row |= {"floor_ms": floor, "share_of_floor": floor / row["triton_ms"], "target": TARGETS.get(case[2])}
        row |= {f"times_as_fast_as_{name}": row[f"{name}_ms"] / row["triton_ms"] for name in list(attend)[1:]}
        rows.add(row)


def accelerated(batch: int, heads: int, tokens: int, top_k: int) -> dict[str, Any]:
    """The row of an accelerated call: with the layer's centroids, with the image's own, the plain path, flash SDPA."""
    qkv = torch.randn(batch, PREFIX + tokens, 3, heads, 64, device="cuda", dtype=torch.bfloat16)
    query, key, value = tensors = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    centroids = F.normalize(torch.randn(heads, GROUPS, 64, device="cuda"), dim=-1)

    def groups(centers: Tensor, backend: str) -> Tensor:
        options = {"backend": backend, "num_prefix_tokens": PREFIX, "remainder": True}
        return dgt.dynamic_group_attention(*tensors, centers, top_k, **options).output

    steps = {
        "triton": lambda: groups(centroids, "triton"),
        "own_centroids": lambda: groups(dgt.find_centroids(query[:, :, PREFIX:], centroids, 1), "triton"),
        "eager": lambda: groups(centroids, "eager"),
        "sdpa": lambda: flash(query, key, value),
    }
    found, plain = steps["triton"]().float(), steps["eager"]().float()
    error = float((found - plain).square().mean().sqrt() / plain.square().mean().sqrt())
    if not error <= 0.01:
        raise RuntimeError(f"wrong result before timing: {error:.2e} of its size from the plain path")
    row: dict[str, Any] = {"case": f"B{batch} H{heads} L{PREFIX}+{tokens} k{top_k} D64 G{GROUPS} bfloat16, remainder"}
    row |= {"error": error, "model_ms": predicted((batch, heads, tokens, top_k), "accelerated")}
    with torch.no_grad():
        for name, step in steps.items():
            row |= times(name, step)
    return row | {f"times_as_fast_as_{name}": row[f"{name}_ms"] / row["triton_ms"] for name in list(steps)[1:]}


def inputs(batch: int, heads: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value with heads interleaved, as a projection leaves them, and centroids."""
    qkv = torch.randn(batch, tokens, 3, heads, CHANNELS, device="cuda", dtype=torch.bfloat16)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value, F.normalize(torch.randn(heads, GROUPS, CHANNELS, device="cuda"), dim=-1)


def candidates(case: tuple[int, int, int, int], centroids: Tensor) -> dict[str, Attend]:
    """Ours, and what it is set against."""
    batch, heads, tokens, top_k = case
    found: dict[str, Attend] = {
        "triton": lambda q, k, v: dgt.dynamic_group_attention(q, k, v, centroids, top_k, backend="triton").output,
        "sdpa": flash,
        "windows": windows,
        "steps": lambda q, k, v: dgt.attend(q, k, v, *ids_of(q, k, centroids, top_k), backend="triton"),
    }
    if batch * heads * tokens * top_k * 2 < 16e9:  # P must fit
        found["forms"] = lambda q, k, v: forms(q, k, v, *ids_of(q, k, centroids, top_k))
    return found


def ids_of(query: Tensor, key: Tensor, centroids: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Groups and keys, by operators of their own."""
    return kernels.group_queries(query, centroids, None), kernels.select_keys(centroids, key, top_k, None)


def forms(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Attention of the products of the paper's appendix, P in memory."""
    scores = dgt.group_matmul(1, query * CHANNELS**-0.5, key, group_ids, key_ids, backend="triton")
    return dgt.group_matmul(2, scores.softmax(-1), value, group_ids, key_ids, backend="triton")


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA over all keys."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value)


def windows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA in windows of 49 tokens; tokens that fill no window are left out."""
    whole = query.shape[2] // WINDOW * WINDOW
    parts = (t[:, :, :whole].unflatten(2, (-1, WINDOW)).flatten(0, 2)[:, None] for t in (query, key, value))
    return F.scaled_dot_product_attention(*parts)


def check(query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int) -> None:
    """Compare 512 queries of the first image with dense attention in float32."""
    result = dgt.dynamic_group_attention(query, key, value, centroids, top_k, backend="triton")
    some = torch.randperm(query.shape[2], device=query.device)[:512]
    ids = torch.take_along_dim(result.key_ids, result.group_ids[:, :, some, None], dim=2)
    mask = torch.zeros(*ids.shape[:3], key.shape[2], dtype=torch.bool, device=ids.device).scatter_(-1, ids, True)
    exact = F.scaled_dot_product_attention(query[:, :, some].float(), key.float(), value.float(), attn_mask=mask)
    ratio = (result.output[:, :, some].float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    if not ratio <= 0.005:
        raise RuntimeError(f"wrong result before timing: error {ratio:.2e} of its size")


def timings(name: str, attend: Attend, backward: bool, *tensors: Tensor) -> dict[str, Any]:
    """Median milliseconds of forward, or of forward with backward and its peak of memory."""
    if not backward:
        with torch.no_grad():
            return times(name, lambda: attend(*tensors))
    leaves = [t.detach().requires_grad_() for t in tensors]
    grad = torch.randn_like(attend(*leaves))
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attend(*leaves), leaves, grad)
    row = {f"{name}_peak_bytes": torch.cuda.max_memory_allocated()}
    return row | times(name, lambda: torch.autograd.grad(attend(*leaves), leaves, grad))


def predicted(case: tuple[int, int, int, int], part: str) -> float | None:
    """What the cycle model says of the kernels, in milliseconds, where it has been asked."""
    known: dict[str, float] = json.loads(MODEL.read_text())["ms"] if MODEL.exists() else {}
    return known.get(f"{part} L{case[2]} k{case[3]}")


def floor_ms(case: tuple[int, int, int, int], bandwidth: float, rate: float, backward: bool) -> float:
    """The least time: each input read once, each output written once, every operation on the matrix units."""
    heads, tokens, top_k = case[0] * case[1], case[2], case[3]
    rows, ids = heads * tokens * CHANNELS * 2, heads * (tokens + GROUPS * top_k) * 8
    attend, scores = 4 * heads * tokens * top_k * CHANNELS, 4 * heads * tokens * GROUPS * CHANNELS
    moved, operations = 4 * rows + ids + heads * tokens * 4, attend + scores
    seconds = max(moved / bandwidth, operations / rate)
    if backward:
        seconds += max((8 * rows + ids + heads * tokens * 4) / bandwidth, 2.5 * attend / rate)
    return 1e3 * seconds


def kernel_times(attend: Attend, *tensors: Tensor) -> dict[str, float]:
    """Microseconds of every kernel in one forward and backward pass, the largest first."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    grad = torch.randn_like(attend(*leaves))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(5):
            torch.autograd.grad(attend(*leaves), leaves, grad)
        torch.cuda.synchronize()
    on_device = [event for event in trace.key_averages() if event.device_type == DeviceType.CUDA]
    found = {event.key: event.self_device_time_total / 5 for event in on_device}
    return {name: time for name, time in sorted(found.items(), key=lambda item: -item[1])[:25] if time > 0}


if __name__ == "__main__":
    main()
