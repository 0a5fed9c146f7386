"""A frozen snapshot of a model, which only predicts: the same outputs, in less time on a CPU.

Layers that are exactly as they were built become layers with packed weights
(:mod:`dgt.inference.packed`). Whatever has been wrapped, hooked, parametrized, or replaced, and all
that is not of this package, is copied as it is and called as it was.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dgt.inference.cpu.interface import layout
from dgt.inference.packed import (
    PackedBlock,
    PackedConv2d,
    PackedFeedForward,
    PackedLinear,
    PackedStem,
)
from dgt.layers import (
    Block,
    ConditionalPositionEncoding,
    ConvStem,
    DGAttention,
    FeedForward,
    GlobalAttention,
    Head,
    InvertedResidualFFN,
    PatchMerging,
)
from dgt.layers.baselines.crossformer import LongShortDistanceAttention
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.longformer import LongformerAttention
from dgt.layers.baselines.random_keys import RandomKeyAttention
from dgt.layers.baselines.swin import PatchConcatenation, WindowAttention
from dgt.models.replace import TimmDGAttention
from dgt.utils.errors import UserError


def optimize_for_inference(model: nn.Module) -> nn.Module:
    """Return a frozen snapshot of a model: it only predicts, in less time on a CPU in float32.

    Like what :func:`torch.jit.freeze` returns, it holds weights of its own, packed for this
    processor: later changes of the model do not reach it, and the model stays as it is. Its parts
    have no parameters to train, and it refuses :meth:`train`, inputs that need gradients, other
    devices and types, exporting, and state dicts, each in one sentence. It is copied and pickled
    whole. Modules of the model that have been wrapped, hooked, parametrized or replaced are
    copied into it as they are, and an adapter attached to the snapshot acts.

    Args:
        model: any module that contains parts of this package: a model of :func:`timm.create_model`,
            a backbone, a detector around one. Everything else in it stays as it is.

    Returns:
        The snapshot, in evaluation mode; without native kernels, for want of a compiler, a plain
        copy without gradients.

    Raises:
        TypeError, ValueError: ``model`` is no module, or contains no parts of this package.

    Example:
        >>> model = timm.create_model("dgt_tiny").eval()
        >>> fast = dgt.optimize_for_inference(model)
        >>> images = torch.randn(1, 3, 224, 224)
        >>> torch.allclose(fast(images), model(images), atol=1e-3)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if not can_be_optimized(model):
        raise UserError(f"model must contain DGT modules, got a {type(model).__name__} without any")
    with torch.inference_mode(False), torch.no_grad():
        twin = copy.deepcopy(model).eval().requires_grad_(False)
        return twin if layout() is None else _snapshot(twin)


def can_be_optimized(model: nn.Module) -> bool:
    """Tell whether a model contains parts of this package."""
    parts = (*SNAPSHOTS, *CALLERS, PackedBlock, PackedStem, PackedFeedForward, PackedLinear)
    return any(type(module) in parts for module in model.modules())


def _snapshot(module: nn.Module, parent: nn.Module | None = None) -> nn.Module:
    """Return what stands for a module in a snapshot; its parts may be replaced in place."""
    make = SNAPSHOTS.get(type(module))
    if make is not None and _is_untouched(module):
        made = make(module)
        if made is not None:
            module = made
    elif isinstance(module, nn.Linear | nn.Conv2d) and type(parent) in CALLERS:
        return _snapshot_of_product(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _snapshot(child, module))
    return module


def _snapshot_of_product(module: nn.Linear | nn.Conv2d) -> nn.Module:
    if _is_untouched(module) and type(module) is nn.Linear:
        return PackedLinear(module.weight, module.bias)
    if _is_convolution(module, 1, (1,)) or _is_convolution(module, 3, (1, 2)):
        return PackedConv2d(module)  # type: ignore[arg-type]
    return module


def _snapshot_of_stem(stem: ConvStem) -> nn.Module | None:
    for conv, norm in zip(stem.convs, stem.norms, strict=True):
        if not (_is_convolution(conv, 3, (1, 2)) and _is_norm(norm)):
            return None
    return PackedStem(stem) if _is_gelu(stem.act) else None


def _snapshot_of_feed_forward(ffn: InvertedResidualFFN) -> nn.Module | None:
    products = (ffn.expand, ffn.project)
    if not all(_is_convolution(conv, 1, (1,)) for conv in products):
        return None
    if not _is_convolution(ffn.depthwise, 3, (1,), depthwise=True):
        return None
    if not all(map(_is_norm, (ffn.norm1, ffn.norm2, ffn.norm3))):
        return None
    if type(ffn.drop) is not nn.Dropout or not _is_untouched(ffn.drop) or not _is_gelu(ffn.act):
        return None
    return PackedFeedForward(ffn)


def _snapshot_of_block(block: Block) -> nn.Module | None:
    cpe = block.cpe
    if type(cpe) is not ConditionalPositionEncoding or not _is_untouched(cpe):
        return None
    if not _is_convolution(cpe.conv, 3, (1,), depthwise=True):
        return None
    return PackedBlock(block, cpe.conv)


SNAPSHOTS: dict[type[nn.Module], Callable[[Any], nn.Module | None]] = {
    ConvStem: _snapshot_of_stem,
    InvertedResidualFFN: _snapshot_of_feed_forward,
    Block: _snapshot_of_block,
}
# Whose linears and convolutions are called as modules, in float32.
CALLERS = (
    DGAttention,
    GlobalAttention,
    FeedForward,
    Head,
    LongShortDistanceAttention,
    LongformerAttention,
    PatchConcatenation,
    PatchMerging,
    RandomKeyAttention,
    StripeAttention,
    TimmDGAttention,
    WindowAttention,
)


def _is_untouched(module: nn.Module) -> bool:
    """Tell whether a module does nothing but its class's own work, with float32 on a CPU."""
    if "forward" in vars(module):
        return False
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return False
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(map(_is_plain, tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is an ordinary one of float32, or of counts, on a CPU."""
    is_ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu
    return is_ordinary and tensor.dtype in (torch.float32, torch.int64)


def _is_convolution(
    conv: nn.Module, kernel: int, strides: tuple[int, ...], depthwise: bool = False
) -> bool:
    """Tell whether this is an untouched convolution that keeps borders with zeros."""
    if type(conv) is not nn.Conv2d or not _is_untouched(conv):
        return False
    return (
        conv.kernel_size == (kernel, kernel)
        and conv.stride in [(stride, stride) for stride in strides]
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and conv.groups == (conv.in_channels if depthwise else 1)
        and conv.out_channels == (conv.in_channels if depthwise else conv.out_channels)
    )


def _is_norm(norm: nn.Module) -> bool:
    """Tell whether this is an untouched BatchNorm with weights and running statistics."""
    if type(norm) is not nn.BatchNorm2d or not _is_untouched(norm):
        return False
    return norm.affine and norm.running_mean is not None and not norm.training


def _is_gelu(act: nn.Module) -> bool:
    return type(act) is nn.GELU and act.approximate == "none" and _is_untouched(act)
