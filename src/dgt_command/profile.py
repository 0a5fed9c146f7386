"""The fastest attention for a shape on this machine: the candidates of `dgt profile`, timed side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.models import DynamicGroupTransformer, capture
from dgt.models.cost import explain_size_errors, size_option
from dgt.ops import dynamic_group_attention
from dgt.ops.dispatch import resolve_backend
from dgt.ops.torch_backend import takes_mask
from dgt.utils.errors import UserError
from dgt_command.measures import (
    QUIET_ALLOCATOR,
    check_usable,
    medians,
    memory_peak,
    milliseconds,
    own_process,
)

GLOBAL = "PyTorch, all keys"


WAYS = {"auto": 0, "auto, residual key": 1}
"""Attention methods by name, in addition to `GLOBAL`, PyTorch's own attention: their residual keys."""
UNDER_MASK = "all keys under a mask of its group's"
COLUMNS = {
    "attention": "{case}",
    "way": "{way}",
    "forward ms": "{ms:.2f}",
    "speedup": "**{ratio:.2f}**",
    "with backward ms": "{backward_ms:.2f}",
    "speedup with backward": "**{ratio_backward:.2f}**",
    "peak extra MiB": "{peak_mib:.1f}",
}
WORTHWHILE = 1.05  # times as fast as all keys: below this, groups are not worthwhile


class Case(NamedTuple):
    """One size of attention: the shape (B, H, L, D) of its operands, G and k."""

    shape: tuple[int, ...]
    groups: int
    top_k: int

    def takes_mask(self, device: str) -> bool:
        """Return whether the backend "torch" attends to all keys of a head, under a mask."""
        tokens = self.shape[2]
        return takes_mask(device, tokens, tokens, self.groups + min(self.top_k, tokens))

    def __str__(self) -> str:
        sizes = zip("BHLDGk", (*self.shape, self.groups, self.top_k), strict=True)
        return " ".join(f"{letter}{size}" for letter, size in sizes)


class Inputs(NamedTuple):
    """Operands of one attention, (B, H, L, D), and centroids (H, G, D) of unit norm."""

    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor


def time_ways(case: Case, device: str = "cpu", rounds: int = 7) -> list[dict[str, Any]]:
    """Time `GLOBAL` and `WAYS` alternately, forward and with backward.

    Args:
        case: the size of the attention.
        device: where it runs.
        rounds: how often the ways take turns; medians are reported.

    Returns:
        One row for each way: milliseconds, how many times as fast as `GLOBAL` it is, and the MiB
        that a forward adds to memory (on a CPU). On CUDA operands are bfloat16, elsewhere float32.
    """
    ways = [GLOBAL, *WAYS]
    inputs = make_inputs(case, device)
    forward = medians(rounds, {way: _timer(way, inputs, case.top_k) for way in ways})
    leaves = inputs._replace(
        query=inputs.query.detach().requires_grad_(),
        key=inputs.key.detach().requires_grad_(),
        value=inputs.value.detach().requires_grad_(),
    )
    backward = medians(
        max(3, rounds // 3), {way: _timer(way, leaves, case.top_k, grad=True) for way in ways}
    )
    plain = resolve_backend("auto", inputs.query) == "torch"
    kind = inputs.query.device.type
    rows = []
    with own_process("the attention", QUIET_ALLOCATOR) as ask:
        for way in ways:
            row = {
                "case": str(case),
                "way": way,
                "under_mask": way == "auto" and plain and case.takes_mask(kind),
                "ms": forward[way],
                "backward_ms": backward[way],
                "ratio": forward[GLOBAL] / forward[way],
                "ratio_backward": backward[GLOBAL] / backward[way],
                "peak_mib": ask(peak_of_forward, way, case) if kind == "cpu" else None,
            }
            rows.append(row)
    return rows


def make_inputs(case: Case, device: str) -> Inputs:
    """Random operands of a case, and centroids; UserError for a device that is not here."""
    check_usable(device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    query, key, value = torch.randn(3, *case.shape).to(device, dtype)
    centroids = torch.randn(case.shape[1], case.groups, case.shape[3]).to(device)
    return Inputs(query, key, value, F.normalize(centroids, dim=-1))


def _timer(way: str, inputs: Inputs, top_k: int, grad: bool = False) -> Callable[[], float]:
    """A function that returns the milliseconds of one call, with the gradients of the operands if
    asked for.
    """
    query, key, value, centroids = inputs

    def attended() -> Tensor:
        if way == GLOBAL:
            return F.scaled_dot_product_attention(query, key, value)
        result = dynamic_group_attention(
            query, key, value, centroids, top_k, residual_keys=WAYS[way]
        )
        return result.output

    def with_gradients() -> object:
        return torch.autograd.grad(attended().sum(), (query, key, value))

    return partial(milliseconds, with_gradients if grad else attended)


def peak_of_forward(way: str, case: Case) -> float | None:
    """MiB added by one forward pass, output included; None if the system does not report it."""
    small = case._replace(shape=(1, 1, 256, case.shape[3]))
    _measure_peak(way, small)  # loads code and starts threads
    return _measure_peak(way, case)


def _measure_peak(way: str, case: Case) -> float | None:
    inputs = make_inputs(case, "cpu")
    return memory_peak(_timer(way, inputs, min(case.top_k, case.shape[2])))


def advice(rows: list[dict[str, Any]]) -> str:
    """One sentence on the rows of one case: what to use for inference and for training."""
    parts = []
    for purpose, ratio in (("inference", "ratio"), ("training", "ratio_backward")):
        best = max(rows, key=lambda row: row[ratio])
        if best[ratio] > WORTHWHILE:
            parts.append(f"for {purpose} use {_advice(best, ratio)}")
        else:
            parts.append(f"for {purpose} keep all keys")
    return f"{rows[0]['case']}: {'; '.join(parts)}."


def _advice(row: dict[str, Any], ratio: str) -> str:
    """A way, and how many times as fast it is."""
    how = f" ({UNDER_MASK})" if row.get("under_mask") else ""
    digits = 1 if row[ratio] > 1 else 2
    return f"{row['way']}{how}, {row[ratio]:.{digits}f} times as fast"


def cases_of_model(name: str, size: int, groups: int, top_k: int) -> list[Case]:
    """Find the sizes of attention in a timm model on one image.

    Args:
        name: of the model.
        size: side of the image in pixels.
        groups, top_k: G and k of the cases; a DGT has its own.

    Raises:
        UserError: timm has no such model, it does not take images of this size, or it has no
            self-attention.
    """
    if not timm.is_model(name):
        raise UserError(f"{name!r} is not a timm model: give the name of one, or --shape B,H,L,D")

    def find(sides: tuple[int, int]) -> list[Case]:
        model = timm.create_model(name, **size_option(name, sides)).eval()
        images = torch.zeros(1, 3, *sides)
        if isinstance(model, DynamicGroupTransformer):
            return _cases_of_dgt(model, images)
        return _cases_of_sdpa(model, images, groups, top_k)

    cases = explain_size_errors(name, (size, size), find)
    if not cases:
        raise UserError(f"{name!r} has no self-attention through PyTorch's function: give --shape")
    return list(dict.fromkeys(cases))


def _cases_of_dgt(model: DynamicGroupTransformer, images: Tensor) -> list[Case]:
    def size_of(seen: Any) -> Case:
        tokens = seen.x.shape[1:3].numel()
        heads = seen.layer.num_heads
        channels = seen.x.shape[3] // heads
        return Case((1, heads, tokens, channels), seen.layer.centroids.shape[1], seen.layer.top_k)

    return capture(model, images, size_of)[0]


def _cases_of_sdpa(model: nn.Module, images: Tensor, groups: int, top_k: int) -> list[Case]:
    attend = F.scaled_dot_product_attention
    with torch.inference_mode(), patch.object(F, attend.__name__, wraps=attend) as spy:
        model(images)
    cases = []
    for (query, key, *_), _ in spy.call_args_list:
        if query.shape == key.shape and query.dim() == 4:
            cases.append(Case(tuple(query.shape), groups, top_k))
    return cases
