"""``dgt profile``: which way of attending pays at one size on this machine, beside PyTorch's own over all keys."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.bench.attention import make_inputs
from dgt.bench.measures import QUIET_ALLOCATOR, medians, memory_peak, milliseconds, own_process
from dgt.models import DynamicGroupTransformer, capture
from dgt.ops import dynamic_group_attention
from dgt.utils.errors import UserError

GLOBAL = "PyTorch, all keys"
WAYS = {"eager": ("eager", False), "eager, remainder": ("eager", True), "triton": ("triton", False)}
COLUMNS = {
    **{"attention": "{case}", "way": "{way}", "forward ms": "{ms:.2f}", "times as fast": "**{ratio:.2f}**"},
    **{"with backward ms": "{backward_ms:.2f}", "so many times": "**{ratio_backward:.2f}**"},
    "peak extra MiB": "{peak_mib:.1f}",
}
Case = tuple[tuple[int, ...], int, int]  # (B, H, L, D), G and k


def profile_attention(case: Case, device: str = "cpu", rounds: int = 7) -> list[dict[str, Any]]:
    """One row a way of attending, the first PyTorch's over all keys: times, ratios to the first, MiB a forward adds."""
    *inputs, centroids = make_inputs(case[0], case[1], device)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    ways = [GLOBAL, *(way for way in WAYS if way != "triton" or device == "cuda")]
    run = {way: _way(way, inputs, centroids, case[2]) for way in ways}
    step = {way: _way(way, leaves, centroids, case[2], True) for way in ways}
    ms, both = medians(rounds, run), medians(max(3, rounds // 2), step)
    name = " ".join(map("{}{}".format, "BHLDGk", (*case[0], *case[1:])))
    rows: list[dict[str, Any]] = [{"case": name, "way": way, "ms": ms[way], "backward_ms": both[way]} for way in ways]
    with own_process("the attention", QUIET_ALLOCATOR) as ask:
        for row in rows:
            row |= {"ratio": ms[GLOBAL] / row["ms"], "ratio_backward": both[GLOBAL] / row["backward_ms"]}
            row["peak_mib"] = ask(_peak, row["way"], case) if device == "cpu" else None
    return rows


def advice(rows: list[dict[str, Any]]) -> str:
    """One sentence on the rows of one case: what to take for predicting, and for training."""
    words = []
    for purpose, ratio in (("predict", "ratio"), ("train", "ratio_backward")):
        best = max(rows, key=lambda row: row[ratio])
        taken = f"take {best['way']}, {best[ratio]:.1f} times as fast"
        words.append(f"to {purpose} {taken if best[ratio] > 1.05 else 'keep all keys'}")
    return f"{rows[0]['case']}: {'; '.join(words)}."


def cases_of_model(name: str, size: int, groups: int, top_k: int) -> list[Case]:
    """The sizes of attention in a timm model on one image, in a DGT those of groups; UserError where there are none."""
    if not timm.is_model(name):
        raise UserError(f"{name!r} is no model of timm: give a name, or --shape B,H,L,D")
    model, images = timm.create_model(name).eval(), torch.zeros(1, 3, size, size)
    found: list[Case] = []
    if isinstance(model, DynamicGroupTransformer):
        for layer, (_, h, w, dim) in capture(model, images, lambda seen: (seen.layer, seen.x.shape))[0]:
            found.append(((1, layer.num_heads, h * w, dim // layer.num_heads), layer.centroids.shape[1], layer.top_k))
    else:
        attend = F.scaled_dot_product_attention
        with torch.inference_mode(), patch.object(F, attend.__name__, wraps=attend) as seen:
            model(images)
        shapes = [[tuple(tensor.shape) for tensor in call.args[:2]] for call in seen.call_args_list]
        found = [(query, groups, top_k) for query, key in shapes if query == key]
    if not found:
        raise UserError(f"{name!r} attends nowhere through PyTorch's function with a query for each key: give --shape")
    return list(dict.fromkeys(found))


def _way(way: str, inputs: list[Tensor], centroids: Tensor, top_k: int, grad: bool = False) -> Callable[[], float]:
    """The milliseconds of a call of a way of attending, with the gradients to the inputs if asked for."""
    (q, k, v), (backend, remainder) = inputs, WAYS.get(way, ("", False))

    def attend() -> Tensor:
        if way == GLOBAL:
            return F.scaled_dot_product_attention(q, k, v)
        return dynamic_group_attention(q, k, v, centroids, top_k, backend=backend, remainder=remainder).output

    return partial(milliseconds, (lambda: torch.autograd.grad(attend().sum(), inputs)) if grad else attend)


def _peak(way: str, case: Case) -> float | None:
    for shape in ((1, 1, 256, case[0][3]), case[0]):  # the first loads code and starts threads
        *inputs, centroids = make_inputs(shape, case[1], "cpu")
        peak = memory_peak(_way(way, inputs, centroids, min(case[2], shape[2])))
    return peak
