"""Parameters and FLOPs of any model, by stage, in the paper's convention.

One multiply-add counts one. A convolution or linear counts its multiply-adds, DG-Attention 2 k L C + 2 L G C + k G
log2(L) (per head the last), global attention 2 L^2 C, a normalisation one per element. Counting runs the model on the
meta device under ``torch.utils.flop_counter``, so it sees what is executed and computes nothing; the operators'
formulas are in :mod:`dgt.ops.flops`.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dgt.utils.errors import UserError

Value = TypeVar("Value")
aten = torch.ops.aten

NORMS = dict.fromkeys(  # one per element; torch's counter counts two per multiply-add, and `_count` halves the sum
    (aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit_no_training),
    lambda x, *_, **__: 2 * math.prod(x),
)

# Parameters in millions and GFLOPs at 224 px, as printed in Table 1.
PAPER = {"dgt_tiny": (24.09, 4.35), "dgt_small": (51.76, 9.41), "dgt_base": (90.28, 16.4)}


class StageCost(NamedTuple):
    """Parameters and FLOPs of one direct part of a model."""

    name: str
    params: int
    flops: int


class Cost(NamedTuple):
    """Parameters and FLOPs of a model, the multiply-adds of one image, and the same by stage, in order.

    Stages are stem, stages and head, or of other models the direct children.
    """

    params: int
    flops: int
    stages: tuple[StageCost, ...]


def cost(model: nn.Module | str, image_size: tuple[int, int] = (224, 224)) -> Cost:
    """Count parameters and FLOPs of one image of this height and width in pixels.

    ``model`` takes (B, C, H, W) images, or is the name of a timm model; TypeError or UserError where it is neither, or
    a named one takes no images of this size. A module raises for those what it raises.
    """
    if not isinstance(model, str | nn.Module):
        raise TypeError(f"model must be a module or the name of a timm model, got {type(model).__name__}")
    if not isinstance(model, str):
        return _count(_on_meta(model), image_size)
    if not timm.is_model(model):
        raise UserError(f"model must be a module or the name of a timm model, got {model!r}")
    return refusals_told(
        model, image_size, lambda at: _count(timm.create_model(model, device="meta", **size_option(model, at)), at)
    )


def _count(twin: Any, image_size: tuple[int, int]) -> Cost:
    """The cost of a module on the meta device."""
    twin.eval().requires_grad_(False)  # the counter would follow what a module gets that asks for gradients
    shape, dtype = (1, getattr(twin, "in_chans", 3), *image_size), next(twin.parameters()).dtype
    with FlopCounterMode(display=False, custom_mapping=NORMS) as counter, torch.no_grad():
        twin(torch.empty(shape, device="meta", dtype=dtype))
    counts = {name: sum(ops.values()) // 2 for name, ops in counter.get_flop_counts().items()}
    root = type(twin).__name__
    stages = (StageCost(name, _params(part), counts.get(f"{root}.{name}", 0)) for name, part in _parts(twin))
    return Cost(_params(twin), counts["Global"], tuple(stages))


def attention_share(tokens: int, channels: int, top_k: int = 98, num_groups: int = 48) -> float:
    """Eq. 7: multiply-adds of DG-Attention, (2 k L C + 2 L G C + k G log2 L), in those of global attention, 2 L^2 C.

    L is ``tokens`` and C all ``channels``: as the printed ratios have it, a layer chooses its keys once. :func:`cost`
    counts the choice for every head, as Table 1 has it. Where k >= L nothing is saved, and the share is above 1.
    """
    top_k = min(top_k, tokens)
    return (top_k + num_groups) / tokens + top_k * num_groups * math.log2(tokens) / (2 * tokens**2 * channels)


def size_option(name: str, image_size: int | tuple[int, int]) -> dict[str, Any]:
    """What `timm.create_model` is told of a size in pixels: ``img_size`` for a model that it builds for one size."""
    config = timm.get_pretrained_cfg(name)
    return {"img_size": image_size} if config is not None and config.fixed_input_size else {}


def refusals_told(name: str, image_size: tuple[int, int], run: Callable[[tuple[int, int]], Value]) -> Value:
    """What ``run`` gives for images of a size; UserError where it fails there, but not at the timm model's own size."""
    try:
        return run(image_size)
    except Exception as refused:  # of many kinds: models assert, reshape, convolve, divide by what is zero
        run(getattr(timm.get_pretrained_cfg(name), "input_size", (3, *image_size))[1:])
        raise UserError(f"model must take images of {image_size[0]} x {image_size[1]} pixels: {refused}") from refused


def _params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _on_meta(model: nn.Module) -> nn.Module:
    """Copy a model's structure to the meta device without copying its weights."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children, with the members of a list of stages one by one."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and name in ("stages", "layers", "blocks"):
            yield from ((f"{name}.{inner}", part) for inner, part in child.named_children())
        else:
            yield name, child
