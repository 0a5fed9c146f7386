"""A frozen snapshot of a model, which only predicts: the same outputs, in less time.

Layers that are exactly as they were built become layers with packed weights for the native CPU
kernels (:mod:`dgt.inference.packed`), in float32 on a CPU, and elsewhere layers without
normalizations (:mod:`dgt.inference.folded`). Whatever has been wrapped, hooked, parametrized, or
replaced, and all that is not of this package, is copied as it is and called as it was.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dgt.inference.cpu.interface import layout
from dgt.inference.folded import (
    FROZEN_ATTENTION,
    FoldedConvolution,
    FoldedFeedForward,
    FoldedStem,
    frozen_attention,
)
from dgt.inference.frozen import Frozen, FrozenBlock
from dgt.inference.packed import (
    PackedConv2d,
    PackedFeedForward,
    PackedLinear,
    PackedPosition,
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
from dgt.layers.plain import is_unchanged
from dgt.models.replace import TimmDGAttention
from dgt.utils.errors import UserError

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def optimize_for_inference(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a frozen snapshot of a model: it only predicts, in less time.

    Like what :func:`torch.jit.freeze` returns, it holds weights of its own: in float32 on a CPU
    packed for this processor, elsewhere with BatchNorm folded into them, in the type that the
    snapshot computes in. Later changes of the model do not reach it, and the model stays as it is.
    Its parts have no parameters to train, and it refuses :meth:`train`, inputs that need gradients,
    other devices and types (under autocast it takes images of any), exporting, and state dicts,
    each in one sentence. It is copied and pickled whole. Modules of the model that have been
    wrapped, hooked, parametrized or replaced are copied into it as they are, and an adapter
    attached to the snapshot acts.

    Args:
        model: any module that contains parts of this package: a model of :func:`timm.create_model`,
            a backbone, a detector around one. Everything else in it stays as it is.
        dtype: type of all weights in the snapshot but those of normalizations, float64, float32,
            bfloat16 or float16; None leaves every weight in its own. On a GPU bfloat16 spares the
            casts of autocast, and half of the bytes.

    Returns:
        The snapshot, in evaluation mode.

    Raises:
        TypeError, ValueError: ``model`` is no module, or contains nothing that a snapshot makes faster;
            ``dtype`` is no such type, or given for a snapshot.

    Example:
        >>> model = timm.create_model("dgt_tiny").eval()
        >>> fast = dgt.optimize_for_inference(model)
        >>> images = torch.randn(1, 3, 224, 224)
        >>> torch.allclose(fast(images), model(images), atol=1e-3)
        True
        >>> fast = dgt.optimize_for_inference(model.cuda(), dtype=torch.bfloat16)  # doctest: +SKIP
        >>> fast(images.cuda().bfloat16())  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if dtype is not None and dtype not in TYPES:
        known = ", ".join(str(known) for known in TYPES)
        raise TypeError(f"dtype must be one of {known}, or None, got {dtype!r}")
    if not can_be_optimized(model):
        kind = type(model).__name__
        raise UserError(
            f"model must contain modules that a snapshot makes faster, got a {kind} without any"
        )
    if dtype is not None and any(isinstance(module, Frozen) for module in model.modules()):
        raise UserError("dtype must be None for a snapshot: optimize the original model again")
    with torch.inference_mode(False), torch.no_grad():
        twin = copy.deepcopy(model).eval().requires_grad_(False)
        if dtype == torch.float32:
            _cast(twin, dtype)
        twin = _snapshot(twin, dtype)
        return twin if dtype is None else _cast(twin, dtype)


def can_be_optimized(model: nn.Module) -> bool:
    """Tell whether a model contains parts of this package."""
    parts = (*SNAPSHOTS, *CALLERS, FrozenBlock, Frozen)
    return any(type(module) in parts or isinstance(module, Frozen) for module in model.modules())


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give all weights of a model a type, in place.

    BatchNorm takes inputs of another type than its statistics, which stay float32 at least; folded
    convolutions have theirs already.
    """
    for module in model.modules():
        if isinstance(module, FoldedConvolution):
            continue
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        wanted = torch.promote_types(dtype, torch.float32) if is_norm else dtype
        module._apply(partial(_as_type, dtype=wanted), recurse=False)
    return model


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in a type; one of counts as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _snapshot(
    module: nn.Module, dtype: torch.dtype | None, parent: nn.Module | None = None
) -> nn.Module:
    """Return what stands for a module in a snapshot; its parts may be replaced in place."""
    make = SNAPSHOTS.get(type(module))
    if make is not None and _is_untouched(module, type(module)):
        made = make(module, dtype)
        if made is not None:
            module = made
    elif isinstance(module, nn.Linear | nn.Conv2d) and type(parent) in CALLERS:
        return _snapshot_of_product(module) if _is_packable(module, dtype) else module
    for name, child in list(module.named_children()):
        setattr(module, name, _snapshot(child, dtype, module))
    if type(module) in FROZEN_ATTENTION and _is_untouched(module, type(module)):
        return frozen_attention(module)  # type: ignore[arg-type]
    return module


def _snapshot_of_product(module: nn.Linear | nn.Conv2d) -> nn.Module:
    if _is_untouched(module, nn.Linear):
        return PackedLinear(module.weight, module.bias)
    if _is_convolution(module, 1, (1,)) or _is_convolution(module, 3, (1, 2)):
        return PackedConv2d(module)  # type: ignore[arg-type]
    return module


def _snapshot_of_stem(stem: ConvStem, dtype: torch.dtype | None) -> nn.Module | None:
    for conv, norm in zip(stem.convs, stem.norms, strict=True):
        if not (_is_convolution(conv, 3, (1, 2)) and _is_norm(norm)):
            return None
    if not _is_gelu(stem.act):
        return None
    if _is_packable(stem, dtype):
        return PackedStem(stem)
    return FoldedStem(stem, dtype or _type_of(stem.convs[0]))


def _snapshot_of_feed_forward(
    ffn: InvertedResidualFFN, dtype: torch.dtype | None
) -> nn.Module | None:
    for linear in (ffn.expand, ffn.project):
        if not _is_untouched(linear, nn.Linear):
            return None
    if not _is_convolution(ffn.depthwise, 3, (1,), depthwise=True):
        return None
    if not all(map(_is_norm, (ffn.norm1, ffn.norm2, ffn.norm3))):
        return None
    if not _is_untouched(ffn.drop, nn.Dropout) or not _is_gelu(ffn.act):
        return None
    if _is_packable(ffn, dtype):
        return PackedFeedForward(ffn)
    return FoldedFeedForward(ffn, dtype or _type_of(ffn.expand))


def _snapshot_of_block(block: Block, dtype: torch.dtype | None) -> nn.Module | None:
    cpe = block.cpe
    if cpe is None or not _is_untouched(cpe, ConditionalPositionEncoding):
        return None
    if not _is_convolution(cpe.conv, 3, (1,), depthwise=True):
        return None
    if _is_packable(cpe, dtype):
        return FrozenBlock(block, PackedPosition(cpe.conv))
    position = FoldedConvolution(cpe.conv, dtype or _type_of(cpe.conv), is_residual=True)
    return FrozenBlock(block, position)


SNAPSHOTS: dict[type[nn.Module], Callable[[Any, torch.dtype | None], nn.Module | None]] = {
    ConvStem: _snapshot_of_stem,
    InvertedResidualFFN: _snapshot_of_feed_forward,
    Block: _snapshot_of_block,
}
# Whose linears and convolutions are called as modules.
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


def _is_untouched(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Tell whether a module does nothing but this class's own work, with ordinary tensors."""
    if not is_unchanged(module, cls):
        return False
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(map(_is_plain, tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is an ordinary one of numbers or of counts."""
    is_ordinary = type(tensor) in (Tensor, nn.Parameter)
    return is_ordinary and tensor.dtype in (*TYPES, torch.int64)


def _is_packable(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Tell whether the native kernels can have a module's tensors: float32, on a CPU."""
    if layout() is None or dtype not in (None, torch.float32):
        return False
    tensors = [*module.parameters(), *module.buffers()]
    return all(tensor.is_cpu and tensor.dtype in (torch.float32, torch.int64) for tensor in tensors)


def _type_of(layer: Any) -> torch.dtype:
    """The type of a layer's weight."""
    return layer.weight.dtype


def _is_convolution(
    conv: nn.Module, kernel: int, strides: tuple[int, ...], depthwise: bool = False
) -> bool:
    """Tell whether this is an untouched convolution that keeps borders with zeros."""
    if not isinstance(conv, nn.Conv2d) or not _is_untouched(conv, nn.Conv2d):
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
    if not isinstance(norm, nn.BatchNorm2d) or not _is_untouched(norm, nn.BatchNorm2d):
        return False
    return norm.affine and norm.running_mean is not None and not norm.training


def _is_gelu(act: nn.Module) -> bool:
    return _is_untouched(act, nn.GELU) and act.approximate == "none"
