"""The attention alone, against PyTorch's own over all keys, side by side in one run.

Each case is checked against the dense reference before it is timed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.bench.measures import QUIET_ALLOCATOR, medians, memory_peak, own_process
from dgt.ops import attend, dynamic_group_attention, group_queries, select_keys
from dgt.utils.errors import Disagreement

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]

ATTENTION_CASES = (  # batch, heads, tokens, top_k: DGT-T's stages at 224 px, and larger images
    (1, 2, 3136, 98),
    (8, 2, 3136, 98),
    (8, 4, 784, 98),
    (8, 8, 196, 98),
    (1, 2, 16384, 98),
    (1, 2, 25600, 500),
)


def bench_attention(
    cases: tuple[tuple[int, int, int, int], ...] = ATTENTION_CASES,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 9,
    groups: int = 48,
    channels: int = 32,
) -> list[dict[str, Any]]:
    """Time the whole operator (grouping, selection, attention) against global attention, forward and with backward.

    Args:
        cases: (batch, heads, tokens, top_k) each.
        device: where to run.
        dtype: of query, key and value.
        rounds: how often the candidates take turns; medians are reported.
        groups: G.
        channels: D.

    Returns:
        One row a case: times in milliseconds of ``F.scaled_dot_product_attention`` over all keys and of DG-Attention,
        their ratio (above 1: DG-Attention is faster), the same with backward, and the time of each of the three steps.

    Raises:
        RuntimeError: if the result is not what the reference gives.
    """
    rows = []
    for batch, heads, tokens, top_k in cases:
        inputs = _inputs(batch, heads, tokens, channels, groups, device, dtype)
        _check(inputs, top_k)
        row = _time_attention(inputs, top_k, rounds)
        row["case"] = f"B{batch} H{heads} L{tokens} k{top_k} G{groups} D{channels} {str(dtype)[6:]}"
        row["peak_mib"] = peak_memory_mib(batch, heads, tokens, top_k) if device == "cpu" else None
        row["bool_mask_mib"] = tokens * tokens / 2**20
        rows.append(row)
    return rows


def attention_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows of :func:`bench_attention` out as a Markdown table."""
    lines = [
        "| attention | SDPA ms | DG-Attention ms | ratio | with backward: SDPA | DG | ratio "
        "| group, select, attend ms | peak extra MiB (L x L mask) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for r in rows:
        steps = ", ".join(f"{t:.2f}" for t in r["steps_ms"].values())
        peak = "" if r["peak_mib"] is None else f"{r['peak_mib']:.1f} ({r['bool_mask_mib']:.1f})"
        forward = f"{r['sdpa_ms']:.2f} | {r['dgt_ms']:.2f} | **{r['ratio']:.2f}**"
        backward = f"{r['sdpa_backward_ms']:.1f} | {r['dgt_backward_ms']:.1f} | **{r['ratio_backward']:.2f}**"
        lines.append(f"| {r['case']} | {forward} | {backward} | {steps} | {peak} |")
    return "\n".join(lines)


def peak_memory_mib(batch: int, heads: int, tokens: int, top_k: int) -> float | None:
    """Peak memory in MiB that one forward adds, output included, in a fresh process; None where nothing can tell."""
    with own_process(QUIET_ALLOCATOR) as process:
        return process.submit(_peak, batch, heads, tokens, top_k).result()


def _peak(batch: int, heads: int, tokens: int, top_k: int) -> float | None:
    inputs = _inputs(batch, heads, tokens, 32, 48, "cpu", torch.float32)
    small = _inputs(1, 1, 2048, 32, 48, "cpu", torch.float32)
    dynamic_group_attention(*small, min(top_k, 200))  # loads code and starts threads
    return memory_peak(lambda: dynamic_group_attention(*inputs, top_k))


def _time_attention(inputs: Inputs, top_k: int, rounds: int) -> dict[str, Any]:
    """Time one case: global attention and DG-Attention in turns, forward and with backward, and the three steps."""
    q, k, v, centroids = inputs
    ids = group_queries(q, centroids), select_keys(centroids, k, top_k)
    leaves = a, b, c = [t.detach().requires_grad_() for t in (q, k, v)]
    forward = medians(
        rounds,
        q.device,
        sdpa=lambda: F.scaled_dot_product_attention(q, k, v),
        dgt=lambda: dynamic_group_attention(q, k, v, centroids, top_k),
        group=lambda: group_queries(q, centroids),
        select=lambda: select_keys(centroids, k, top_k),
        attend=lambda: attend(q, k, v, *ids),
    )
    backward = medians(
        max(3, rounds // 3),
        q.device,
        sdpa=lambda: torch.autograd.grad(F.scaled_dot_product_attention(a, b, c).sum(), leaves),
        dgt=lambda: torch.autograd.grad(dynamic_group_attention(a, b, c, centroids, top_k).output.sum(), leaves),
    )
    return {
        "sdpa_ms": forward["sdpa"],
        "dgt_ms": forward["dgt"],
        "ratio": forward["sdpa"] / forward["dgt"],
        "sdpa_backward_ms": backward["sdpa"],
        "dgt_backward_ms": backward["dgt"],
        "ratio_backward": backward["sdpa"] / backward["dgt"],
        "steps_ms": {step: forward[step] for step in ("group", "select", "attend")},
    }


def _inputs(batch: int, heads: int, tokens: int, channels: int, groups: int, device: str, dtype: torch.dtype) -> Inputs:
    """Query, key, value and centroids."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, tokens, channels)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    return query, key, value, F.normalize(torch.randn(heads, groups, channels, generator=generator), dim=-1).to(device)


def _check(inputs: Inputs, top_k: int) -> None:
    """Compare one head of the first image with the dense reference, on as many tokens as that can hold."""
    q, k, v = (t[:1, :1, :4096] for t in inputs[:3])
    centroids = inputs[3][:1]
    ours = dynamic_group_attention(q, k, v, centroids, top_k).output
    truth = dynamic_group_attention(q.double(), k.double(), v.double(), centroids, top_k, backend="reference").output
    error = (ours.double() - truth).abs().max().item()
    limit = 1e-5 if ours.dtype == torch.float32 else 5e-2
    if not error < limit:
        raise Disagreement(f"DG-Attention differs from the reference by {error:.1e} (limit {limit:.0e}): not timed")
