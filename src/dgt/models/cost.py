"""Parameters and FLOPs of any model, by stage, in the paper's convention.

One multiply-add counts one. A convolution or linear layer counts its multiply-adds, DG-Attention
2 k L C + 2 L G C + k G log2(L) (the last per head), global attention 2 L^2 C, a normalization one
per element. Counting runs the model on the meta device under ``torch.utils.flop_counter``, so it
sees what is executed and computes nothing; the operators' formulas are in :mod:`dgt.ops.flops`.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dgt.ops.checks import check_count
from dgt.utils.errors import UserError

Value = TypeVar("Value")
aten = torch.ops.aten


def _count_norm(x: Any, *_: Any, **__: Any) -> int:
    """One per element; torch's counter counts two per multiply-add, and `_count` halves the sum."""
    return 2 * math.prod(x)


NORMS = {
    aten.native_layer_norm: _count_norm,
    aten.native_group_norm: _count_norm,
    aten.native_batch_norm: _count_norm,
    aten._native_batch_norm_legit_no_training: _count_norm,
}

# Parameters in millions and GFLOPs at 224 px, as printed in Table 1.
PAPER = {"dgt_tiny": (24.09, 4.35), "dgt_small": (51.76, 9.41), "dgt_base": (90.28, 16.4)}


class StageCost(NamedTuple):
    """Parameters and FLOPs of one direct part of a model.

    Attributes:
        name: of the part.
        params: number of parameters.
        flops: multiply-adds of one image.
    """

    name: str
    params: int
    flops: int


class Cost(NamedTuple):
    """Parameters and FLOPs (multiply-adds of one image) of a model, and the same by stage.

    Stages are stem, stages and head, or the direct children of other models, in order.

    Attributes:
        params: number of parameters.
        flops: multiply-adds of one image.
        stages: cost of each direct part, by name.
    """

    params: int
    flops: int
    stages: tuple[StageCost, ...]


def cost(model: nn.Module | str, image_size: tuple[int, int] = (224, 224)) -> Cost:
    """Count the parameters of a model and its FLOPs for one image.

    Args:
        model: takes (B, C, H, W) images; or the name of a timm model.
        image_size: height and width in pixels.

    Returns:
        Parameters and FLOPs, in all and by stage.

    Raises:
        TypeError: ``model`` is neither a module nor a name, or ``image_size`` no pair of ints.
        ValueError: a size below 1.
        UserError: timm has no such model, or it takes no images of this size. A module raises for
            those what it raises.

    Example:
        >>> dgt.cost("dgt_tiny").params
        24093928
    """
    if not isinstance(model, str | nn.Module):
        came = type(model).__name__
        raise TypeError(f"model must be a module or the name of a timm model, got {came}")
    if not isinstance(image_size, tuple | list) or len(image_size) != 2:
        raise TypeError(f"image_size must be (height, width) in pixels, got {image_size!r}")
    for pixels in image_size:
        check_count("image_size", pixels)
    if not isinstance(model, str):
        return _count(_on_meta(model), image_size)
    if not timm.is_model(model):
        raise UserError(f"model must be a module or the name of a timm model, got {model!r}")

    def count_at(size: tuple[int, int]) -> Cost:
        return _count(timm.create_model(model, device="meta", **size_option(model, size)), size)

    return explain_size_errors(model, image_size, count_at)


def _count(twin: Any, image_size: tuple[int, int]) -> Cost:
    """Count a module on the meta device."""
    twin.eval()
    twin.requires_grad_(False)  # the counter would follow inputs that ask for gradients
    shape = (1, getattr(twin, "in_chans", 3), *image_size)
    dtype = next(twin.parameters()).dtype
    with FlopCounterMode(display=False, custom_mapping=NORMS) as counter, torch.no_grad():
        twin(torch.empty(shape, device="meta", dtype=dtype))
    counts = {name: sum(ops.values()) // 2 for name, ops in counter.get_flop_counts().items()}
    root = type(twin).__name__
    stages = [
        StageCost(name, _params(part), counts.get(f"{root}.{name}", 0))
        for name, part in _parts(twin)
    ]
    return Cost(_params(twin), counts["Global"], tuple(stages))


def attention_share(tokens: int, channels: int, top_k: int = 98, num_groups: int = 48) -> float:
    """Eq. 7: the multiply-adds of DG-Attention as a share of those of global attention.

    (2 k L C + 2 L G C + k G log2 L) / (2 L^2 C). As in the printed ratios, a layer chooses its keys
    once; :func:`cost` counts the choice for every head, as Table 1 does.

    Args:
        tokens: L.
        channels: C, of all heads.
        top_k: k, clamped to L.
        num_groups: G.

    Returns:
        The share; above 1 where k >= L, where nothing is saved.

    Example:
        >>> round(attention_share(56 * 56, 64), 3)
        0.047
    """
    top_k = min(top_k, tokens)
    choice = top_k * num_groups * math.log2(tokens) / (2 * tokens**2 * channels)
    return (top_k + num_groups) / tokens + choice


def size_option(name: str, image_size: int | tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `timm.create_model` for a size in pixels.

    That is ``img_size`` for a model that it builds for one size, and nothing for others.
    """
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.fixed_input_size:
        return {}
    return {"img_size": image_size}


def explain_size_errors(
    name: str, image_size: tuple[int, int], run: Callable[[tuple[int, int]], Value]
) -> Value:
    """Return what ``run`` gives for images of a size.

    Raises:
        UserError: it fails at this size, but not at the timm model's own.
    """
    try:
        return run(image_size)
    except Exception as refused:  # of any kind: models assert, reshape, convolve, divide by zero
        run(getattr(timm.get_pretrained_cfg(name), "input_size", (3, *image_size))[1:])
        height, width = image_size
        message = f"model must accept images of {height} x {width} pixels: {refused}"
        raise UserError(message) from refused


def _params(model: nn.Module) -> int:
    """Count the parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _on_meta(model: nn.Module) -> nn.Module:
    """Copy a model's structure to the meta device without copying its weights."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the direct children, with the members of a list of stages one by one."""
    for name, child in model.named_children():
        is_list = isinstance(child, nn.ModuleList | nn.Sequential)
        if is_list and name in ("stages", "layers", "blocks"):
            for inner, part in child.named_children():
                yield f"{name}.{inner}", part
        else:
            yield name, child
