"""The attention alone, against PyTorch's own over all keys, side by side; each case is first checked for its result."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.bench.measures import QUIET_ALLOCATOR, medians, memory_peak, milliseconds, own_process
from dgt.ops import attend, dynamic_group_attention, group_queries, select_keys
from dgt.utils.errors import Disagreement

ATTENTION_CASES = (  # batch, heads, tokens, top_k: DGT-T's stages at 224 px, and larger images
    *((1, 2, 3136, 98), (8, 2, 3136, 98), (8, 4, 784, 98), (8, 8, 196, 98)),
    *((1, 2, 16384, 98), (1, 2, 25600, 500)),
)
STEPS = ("group", "select", "attend")
COLUMNS = {
    **{"attention": "{case}", "SDPA ms": "{sdpa_ms:.2f}", "DG-Attention ms": "{dgt_ms:.2f}"},
    **{"ratio": "**{ratio:.2f}**", "with backward: SDPA": "{sdpa_backward_ms:.1f}", "DG": "{dgt_backward_ms:.1f}"},
    **{"its ratio": "**{ratio_backward:.2f}**"},
    "group, select, attend ms": "{steps_ms[group]:.2f}, {steps_ms[select]:.2f}, {steps_ms[attend]:.2f}",
    "peak extra MiB (L x L mask)": "{peak_mib:.1f} ({bool_mask_mib:.1f})",
}


def bench_attention(
    cases: tuple[tuple[int, int, int, int], ...] = ATTENTION_CASES,
    device: str = "cpu",
    rounds: int = 9,
    groups: int = 48,
    channels: int = 32,
) -> list[dict[str, Any]]:
    """Time the whole operator (grouping, selection, attention) against global attention, forward and with backward.

    Args:
        cases: (batch, heads, tokens, top_k) each.
        device: where to run.
        rounds: how often the candidates take turns; medians are reported.
        groups, channels: G and D.

    Returns:
        One row a case: times in milliseconds of ``F.scaled_dot_product_attention`` over all keys and of DG-Attention,
        their ratio (above 1: DG-Attention is faster), the same with backward, and the time of each of the three steps;
        the MiB that a forward adds to memory (None where nothing tells) and those of a mask of all pairs.

    Raises:
        RuntimeError: if the result is not what the reference gives.
    """
    rows = []
    for batch, heads, tokens, top_k in cases:
        shape = (batch, heads, tokens, channels)
        times = _times(make_inputs(shape, groups, device), top_k, rounds)
        with own_process("the attention", QUIET_ALLOCATOR) as ask:
            peak = ask(_peak, shape, groups, top_k) if device == "cpu" else None
        case = f"B{batch} H{heads} L{tokens} k{top_k} G{groups} D{channels} float32"
        rows.append({"case": case, **times, "peak_mib": peak, "bool_mask_mib": tokens * tokens / 2**20})
    return rows


def make_inputs(shape: tuple[int, ...], groups: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value of a (B, H, L, D) shape and centroids."""
    torch.manual_seed(0)
    (q, k, v), centroids = torch.randn(3, *shape).to(device), torch.randn(shape[1], groups, shape[3]).to(device)
    return q, k, v, F.normalize(centroids, dim=-1)


def _times(inputs: tuple[Tensor, ...], top_k: int, rounds: int) -> dict[str, Any]:
    """Time one case: global attention and DG-Attention in turns, forward and with backward, and the three steps."""
    _check(inputs, top_k)
    q, k, v, centroids = inputs
    ids = group_queries(q, centroids), select_keys(centroids, k, top_k)
    leaves = a, b, c = [t.detach().requires_grad_() for t in (q, k, v)]
    forward = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "dgt": lambda: dynamic_group_attention(q, k, v, centroids, top_k),
        "group": lambda: group_queries(q, centroids),
        "select": lambda: select_keys(centroids, k, top_k),
        "attend": lambda: attend(q, k, v, *ids),
    }
    backward = {
        "sdpa": lambda: torch.autograd.grad(F.scaled_dot_product_attention(a, b, c).sum(), leaves),
        "dgt": lambda: torch.autograd.grad(dynamic_group_attention(a, b, c, centroids, top_k).output.sum(), leaves),
    }
    ms = medians(rounds, {name: partial(milliseconds, run) for name, run in forward.items()})
    both = medians(max(3, rounds // 3), {name: partial(milliseconds, run) for name, run in backward.items()})
    return {
        **{"sdpa_ms": ms["sdpa"], "dgt_ms": ms["dgt"], "ratio": ms["sdpa"] / ms["dgt"]},
        **{"sdpa_backward_ms": both["sdpa"], "dgt_backward_ms": both["dgt"]},
        **{"ratio_backward": both["sdpa"] / both["dgt"], "steps_ms": {step: ms[step] for step in STEPS}},
    }


def _peak(shape: tuple[int, ...], groups: int, top_k: int) -> float | None:
    """MiB that one forward adds, output included."""
    small = make_inputs((1, 1, 2048, shape[-1]), groups, "cpu")
    dynamic_group_attention(*small, top_k=min(top_k, 200))  # loads code and starts threads
    inputs = make_inputs(shape, groups, "cpu")
    return memory_peak(lambda: dynamic_group_attention(*inputs, top_k=top_k))


def _check(inputs: tuple[Tensor, ...], top_k: int) -> None:
    """Compare one head of the first image with the dense reference, on as many tokens as that can hold."""
    q, k, v, centroids = (t[:1, :1, :4096] if t.dim() == 4 else t[:1] for t in inputs)
    ours = dynamic_group_attention(q, k, v, centroids, top_k).output
    q, k, v = q.double(), k.double(), v.double()
    truth = dynamic_group_attention(q, k, v, centroids, top_k, backend="reference").output
    error = (ours.double() - truth).abs().max().item()
    if not error < 1e-5:
        raise Disagreement(f"DG-Attention differs from the reference by {error:.1e} (limit 1e-05): not timed")
