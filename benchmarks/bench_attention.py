"""The attention alone, against PyTorch's own over all keys, side by side.

Each case is first checked for its result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dgt.bench.measures import medians, milliseconds
from dgt.bench.profile import GLOBAL, Case, Inputs, make_inputs, time_ways
from dgt.ops import attend, dynamic_group_attention, group_queries, select_keys
from dgt.utils.errors import Disagreement

CASES = (
    # batch, heads, tokens, top_k: the stages of DGT-T at 224 px
    (1, 2, 3136, 98),
    (8, 2, 3136, 98),
    (8, 4, 784, 98),
    (8, 8, 196, 98),
    # larger images
    (1, 2, 16384, 98),
    (1, 2, 25600, 500),
)
COLUMNS = {
    "attention": "{case}",
    "SDPA ms": "{sdpa_ms:.2f}",
    "DG-Attention ms": "{dgt_ms:.2f}",
    "ratio": "**{ratio:.2f}**",
    "with backward: SDPA": "{sdpa_backward_ms:.1f}",
    "DG": "{dgt_backward_ms:.1f}",
    "its ratio": "**{ratio_backward:.2f}**",
    "group, select, attend ms": "{steps_ms[group]:.2f}, {steps_ms[select]:.2f}, {steps_ms[attend]:.2f}",
    "peak extra MiB (L x L mask)": "{peak_mib:.1f} ({bool_mask_mib:.1f})",
}
CHECKED_TOKENS = 4096  # the most for the dense reference
LARGEST_DIFFERENCE = 1e-5


def bench_attention(
    cases: tuple[tuple[int, int, int, int], ...] = CASES,
    device: str = "cpu",
    rounds: int = 9,
    groups: int = 48,
    channels: int = 32,
) -> list[dict[str, Any]]:
    """Time the whole operator (grouping, selection, attention) against global attention, forward
    and with backward.

    Args:
        cases: batch, heads, tokens and top_k of each.
        device: where it runs.
        rounds: how often the candidates take turns; medians are reported.
        groups: G.
        channels: D.

    Returns:
        One row for each case: median milliseconds of PyTorch's attention over all keys and of
        DG-Attention, their ratio (above 1: DG-Attention is faster), the same with backward, and the
        time of each of the three steps; the MiB that a forward pass adds to memory (None if the
        system does not report it) and those of a mask of all pairs.

    Raises:
        Disagreement: the result differs from the reference.
    """
    rows = []
    for batch, heads, tokens, top_k in cases:
        case = Case((batch, heads, tokens, channels), groups, top_k)
        inputs = make_inputs(case, device)
        check(inputs, top_k)
        whole, ours = time_ways(case, device, rounds, (GLOBAL, "auto"))
        row = {
            "case": f"B{batch} H{heads} L{tokens} k{top_k} G{groups} D{channels} float32",
            "sdpa_ms": whole["ms"],
            "dgt_ms": ours["ms"],
            "sdpa_backward_ms": whole["backward_ms"],
            "dgt_backward_ms": ours["backward_ms"],
            "steps_ms": _time_steps(inputs, top_k, rounds),
            "peak_mib": ours["peak_mib"],
            "ratio": ours["ratio"],
            "ratio_backward": ours["ratio_backward"],
            "bool_mask_mib": tokens * tokens / 2**20,
        }
        rows.append(row)
    return rows


def _time_steps(inputs: Inputs, top_k: int, rounds: int) -> dict[str, float]:
    query, key, value, centroids = inputs
    group_ids = group_queries(query, centroids)
    key_ids = select_keys(centroids, key, top_k)
    steps = {
        "group": partial(group_queries, query, centroids),
        "select": partial(select_keys, centroids, key, top_k),
        "attend": partial(attend, query, key, value, group_ids, key_ids),
    }
    return medians(rounds, {name: partial(milliseconds, step) for name, step in steps.items()})


def check(inputs: Inputs, top_k: int) -> None:
    """Compare one head of the first image with the dense reference.

    Raises:
        Disagreement: they differ.
    """
    query, key, value = (tensor[:1, :1, :CHECKED_TOKENS] for tensor in inputs[:3])
    centroids = inputs.centroids[:1]
    ours = dynamic_group_attention(query, key, value, centroids, top_k).output
    truth = dynamic_group_attention(
        query.double(), key.double(), value.double(), centroids, top_k, backend="reference"
    ).output
    error = (ours.double() - truth).abs().max().item()
    if not error < LARGEST_DIFFERENCE:
        limit = f"(limit {LARGEST_DIFFERENCE:.0e})"
        raise Disagreement(
            f"DG-Attention differs from the reference by {error:.1e} {limit}: not timed"
        )
