"""The attention alone, against PyTorch's own over all keys, side by side; each case is first checked for its result.

And for ``dgt profile``: which way of attending pays at one size on this machine.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.bench.measures import QUIET_ALLOCATOR, check_usable, medians, memory_peak, milliseconds, own_process
from dgt.models import DynamicGroupTransformer, capture
from dgt.models.cost import explain_size_errors, size_option
from dgt.ops import attend, dynamic_group_attention, group_queries, select_keys
from dgt.utils.errors import Disagreement, UserError

Case = tuple[tuple[int, ...], int, int]  # (B, H, L, D), G and k
GLOBAL = "PyTorch, all keys"
WAYS = {"auto": ("auto", False), "auto, remainder": ("auto", True), "triton": ("triton", False)}
ATTENTION_CASES = (  # batch, heads, tokens, top_k: DGT-T's stages at 224 px, and larger images
    *((1, 2, 3136, 98), (8, 2, 3136, 98), (8, 4, 784, 98), (8, 8, 196, 98)),
    *((1, 2, 16384, 98), (1, 2, 25600, 500)),
)
COLUMNS = {
    **{"attention": "{case}", "SDPA ms": "{sdpa_ms:.2f}", "DG-Attention ms": "{dgt_ms:.2f}"},
    **{"ratio": "**{ratio:.2f}**", "with backward: SDPA": "{sdpa_backward_ms:.1f}", "DG": "{dgt_backward_ms:.1f}"},
    **{"its ratio": "**{ratio_backward:.2f}**"},
    "group, select, attend ms": "{steps_ms[group]:.2f}, {steps_ms[select]:.2f}, {steps_ms[attend]:.2f}",
    "peak extra MiB (L x L mask)": "{peak_mib:.1f} ({bool_mask_mib:.1f})",
}
COLUMNS_OF_WAYS = {
    **{"attention": "{case}", "way": "{way}", "forward ms": "{ms:.2f}", "times as fast": "**{ratio:.2f}**"},
    **{"with backward ms": "{backward_ms:.2f}", "so many times": "**{ratio_backward:.2f}**"},
    "peak extra MiB": "{peak_mib:.1f}",
}


def bench_attention(
    cases: tuple[tuple[int, int, int, int], ...] = ATTENTION_CASES,
    device: str = "cpu",
    rounds: int = 9,
    groups: int = 48,
    channels: int = 32,
) -> list[dict[str, Any]]:
    """Time the whole operator (grouping, selection, attention) against global attention, forward and with backward.

    Disagreement is raised where its result is not what the reference gives.

    Each of the ``cases`` is (batch, heads, tokens, top_k), ``groups`` and ``channels`` are G and D; the candidates take
    turns for so many ``rounds``. One row a case: median milliseconds of PyTorch's attention over all keys and of
    DG-Attention, their ratio (above 1: DG-Attention is faster), the same with backward, and the time of each of the
    three steps; the MiB that a forward adds to memory (None where nothing tells) and those of a mask of all pairs.
    """
    rows = []
    for batch, heads, tokens, top_k in cases:
        case: Case = ((batch, heads, tokens, channels), groups, top_k)
        q, k, v, centroids = inputs = make_inputs(*case[:2], device)
        _check(inputs, top_k)
        ids = group_queries(q, centroids), select_keys(centroids, k, top_k)
        steps = {"group": partial(milliseconds, partial(group_queries, q, centroids))}
        steps["select"] = partial(milliseconds, partial(select_keys, centroids, k, top_k))
        steps_ms = medians(rounds, {**steps, "attend": partial(milliseconds, partial(attend, q, k, v, *ids))})
        whole, ours = time_ways(case, device, rounds, (GLOBAL, "auto"))
        row: dict[str, Any] = {"case": f"B{batch} H{heads} L{tokens} k{top_k} G{groups} D{channels} float32"}
        row |= {"sdpa_ms": whole["ms"], "dgt_ms": ours["ms"], "sdpa_backward_ms": whole["backward_ms"]}
        row |= {"dgt_backward_ms": ours["backward_ms"], "steps_ms": steps_ms, "peak_mib": ours["peak_mib"]}
        row |= {key: ours[key] for key in ("ratio", "ratio_backward")} | {"bool_mask_mib": tokens * tokens / 2**20}
        rows.append(row)
    return rows


def time_ways(case: Case, device: str = "cpu", rounds: int = 7, ways: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row a way of attending (none: all, PyTorch's first): times, ratios to the first, MiB that a forward adds."""
    ways = ways or [GLOBAL, *(way for way in WAYS if way != "triton" or device == "cuda")]
    *inputs, centroids = make_inputs(*case[:2], device)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    ms = medians(rounds, {way: _way(way, inputs, centroids, case[2]) for way in ways})
    both = medians(max(3, rounds // 3), {way: _way(way, leaves, centroids, case[2], True) for way in ways})
    name, first = " ".join(map("{}{}".format, "BHLDGk", (*case[0], *case[1:]))), ways[0]
    rows: list[dict[str, Any]] = [{"case": name, "way": way, "ms": ms[way], "backward_ms": both[way]} for way in ways]
    with own_process("the attention", QUIET_ALLOCATOR) as ask:
        for row in rows:
            row |= {"ratio": ms[first] / row["ms"], "ratio_backward": both[first] / row["backward_ms"]}
            row["peak_mib"] = ask(_peak, row["way"], case) if device == "cpu" else None
    return rows


def make_inputs(shape: tuple[int, ...], groups: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value of a (B, H, L, D) shape and centroids; UserError for a device that is not here."""
    check_usable(device)
    torch.manual_seed(0)
    (q, k, v), centroids = torch.randn(3, *shape).to(device), torch.randn(shape[1], groups, shape[3]).to(device)
    return q, k, v, F.normalize(centroids, dim=-1)


def _way(way: str, inputs: list[Tensor], centroids: Tensor, top_k: int, grad: bool = False) -> Callable[[], float]:
    """The milliseconds of a call of a way of attending, with the gradients to the inputs if asked for."""
    (q, k, v), (backend, remainder) = inputs, WAYS.get(way, ("auto", False))

    def attended() -> Tensor:
        if way == GLOBAL:
            return F.scaled_dot_product_attention(q, k, v)
        return dynamic_group_attention(q, k, v, centroids, top_k, backend=backend, remainder=remainder).output

    return partial(milliseconds, (lambda: torch.autograd.grad(attended().sum(), inputs)) if grad else attended)


def _peak(way: str, case: Case) -> float | None:
    """MiB that one forward adds, output included."""
    for shape in ((1, 1, 256, case[0][3]), case[0]):  # the first loads code and starts threads
        *inputs, centroids = make_inputs(shape, case[1], "cpu")
        peak = memory_peak(_way(way, inputs, centroids, min(case[2], shape[2])))
    return peak


def _check(inputs: tuple[Tensor, ...], top_k: int) -> None:
    """Compare one head of the first image with the dense reference, on as many tokens as that can hold."""
    q, k, v, centroids = (t[:1, :1, :4096] if t.dim() == 4 else t[:1] for t in inputs)
    ours = dynamic_group_attention(q, k, v, centroids, top_k).output
    exact = q.double(), k.double(), v.double()
    truth = dynamic_group_attention(*exact, centroids, top_k, backend="reference").output
    error = (ours.double() - truth).abs().max().item()
    if not error < 1e-5:
        raise Disagreement(f"DG-Attention differs from the reference by {error:.1e} (limit 1e-05): not timed")


def advice(rows: list[dict[str, Any]]) -> str:
    """One sentence on the rows of one case: what to take for predicting, and for training."""
    words = []
    for purpose, ratio in (("predict", "ratio"), ("train", "ratio_backward")):
        best = max(rows, key=lambda row: row[ratio])
        taken = f"take {best['way']}, {best[ratio]:.1f} times as fast"
        words.append(f"to {purpose} {taken if best[ratio] > 1.05 else 'keep all keys'}")
    return f"{rows[0]['case']}: {'; '.join(words)}."


def cases_of_model(name: str, size: int, groups: int, top_k: int) -> list[Case]:
    """The sizes of attention in a timm model on one image, in a DGT of groups; UserError for none, or no such size."""
    if not timm.is_model(name):
        raise UserError(f"{name!r} is no model of timm: give a name, or --shape B,H,L,D")

    def calls(sides: tuple[int, int]) -> list[Case]:
        model, images = timm.create_model(name, **size_option(name, sides)).eval(), torch.zeros(1, 3, *sides)
        if isinstance(model, DynamicGroupTransformer):
            layers = capture(model, images, lambda seen: (seen.layer, seen.x.shape[1:3].numel(), seen.x.shape[3]))[0]
            return [((1, of.num_heads, n, c // of.num_heads), of.centroids.shape[1], of.top_k) for of, n, c in layers]
        attend = F.scaled_dot_product_attention
        with torch.inference_mode(), patch.object(F, attend.__name__, wraps=attend) as spy:
            model(images)
        return [(q.shape, groups, top_k) for (q, k, *_), _ in spy.call_args_list if q.shape == k.shape and q.dim() == 4]

    found = explain_size_errors(name, (size, size), calls)
    if not found:
        raise UserError(f"{name!r} attends nowhere through PyTorch's function with a query for each key: give --shape")
    return list(dict.fromkeys(found))
