"""The whole operator on a GPU against what users would pick instead, with the share of the floor it reaches.

    python benchmarks/gpu_attention.py --out benchmarks/results/gpu_attention.json

Grouping, selection and attention in bfloat16, D 32, G 48, beside SDPA (flash) over all keys, SDPA in windows of 49 keys
(what Swin does) and the `forms` backend (what the paper does), in one run; forward, and forward with backward. Every
case is first checked against dense attention under a mask. The floor is the larger of the fewest bytes over the
memory's rate and the operations over the matrix units' rate; both rates are arguments. Kernel times are from PyTorch's
profiler.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

import dgt
from dgt.bench import machine

CASES = ((128, 2, 3136, 98), (32, 2, 16384, 512), (8, 2, 64000, 500), (128, 8, 196, 98), (128, 4, 784, 98))
TARGETS = {3136: 5.0, 16384: 8.0, 64000: 25.0, 196: 1 / 1.5}  # times as fast as SDPA over all keys
CHANNELS, GROUPS, WINDOW = 32, 48, 49

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of a large copy")
    parser.add_argument("--rate", type=float, default=790e12, help="bfloat16 operations per second of a large product")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for case in CASES:
        rows.append(measure(*case, options.bandwidth, options.rate))
        document = {"device": torch.cuda.get_device_name(), "machine": machine(), "argv": sys.argv, "rows": rows}
        temporary = options.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1))
        temporary.replace(options.out)
        print(json.dumps({k: v for k, v in rows[-1].items() if not isinstance(v, dict)}), flush=True)


def measure(batch: int, heads: int, tokens: int, top_k: int, bandwidth: float, rate: float) -> dict[str, Any]:
    """Check and time one case."""
    qkv = torch.randn(batch, tokens, 3, heads, CHANNELS, device="cuda", dtype=torch.bfloat16)
    query, key, value = (t.detach().requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    centroids = F.normalize(torch.randn(heads, GROUPS, CHANNELS, device="cuda"), dim=-1)
    check(query[:1], key[:1], value[:1], centroids, top_k)

    def ours(backend: str) -> Attend:
        if backend == "forms":
            return lambda q, k, v: steps(q, k, v, centroids, top_k, "forms")
        return lambda q, k, v: dgt.dynamic_group_attention(q, k, v, centroids, top_k, backend=backend).output

    row: dict[str, Any] = {"case": f"B{batch} H{heads} L{tokens} k{top_k} D{CHANNELS} G{GROUPS} bfloat16"}
    candidates = {"triton": ours("triton"), "sdpa": flash, "windows": windows}
    candidates["steps"] = lambda q, k, v: steps(q, k, v, centroids, top_k, "triton")
    if batch * heads * tokens * top_k * 2 < 16e9:  # P of the forms must fit
        candidates["forms"] = ours("forms")
    for name, attend in candidates.items():
        row |= timings(name, attend, query, key, value)
    for part in ("forward", "both"):
        floor = floor_ms(batch * heads, tokens, top_k, bandwidth, rate, backward=part == "both")
        row[f"{part}_floor_ms"] = floor
        row[f"{part}_share_of_floor"] = floor / row[f"triton_{part}_ms"]
        for other in list(candidates)[1:]:
            row[f"{part}_times_as_fast_as_{other}"] = row[f"{other}_{part}_ms"] / row[f"triton_{part}_ms"]
    row["target_over_sdpa"] = TARGETS.get(tokens)
    row["kernels_us"] = kernel_times(ours("triton"), query, key, value)
    return row


def steps(query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, backend: str) -> Tensor:
    """Grouping and selection kernels, then attention alone: ours (never in one kernel), or the paper's products."""
    from dgt.ops import triton as kernels

    groups = kernels.group_queries(query, centroids, None)
    keys = kernels.select_keys(centroids, key, top_k, None)
    return dgt.attend(query, key, value, groups, keys, backend=backend)


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


def timings(name: str, attend: Attend, *tensors: Tensor) -> dict[str, float]:
    """Median milliseconds and peak bytes, forward and with backward."""
    leaves = [t.detach().requires_grad_() for t in tensors]

    def both() -> None:
        attend(*leaves).backward(grad)

    with torch.no_grad():
        grad = torch.randn_like(attend(*leaves))
        forward = do_bench(lambda: attend(*leaves), warmup=50, rep=200, return_mode="median")
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated()
    with_backward = do_bench(both, warmup=50, rep=300, grad_to_none=leaves, return_mode="median")
    return {f"{name}_forward_ms": forward, f"{name}_both_ms": with_backward, f"{name}_peak_bytes": peak}


def floor_ms(heads: int, tokens: int, top_k: int, bandwidth: float, rate: float, backward: bool) -> float:
    """The least time: each input read once, each output written once, every operation on the matrix units."""
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
            attend(*leaves).backward(grad)
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / 5 for event in trace.key_averages()}
    return {name: time for name, time in sorted(found.items(), key=lambda item: -item[1])[:25] if time > 0}


if __name__ == "__main__":
    main()
