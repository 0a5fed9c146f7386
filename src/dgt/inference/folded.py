"""Layers that only predict, on any device and in any type: normalizations are in the weights.

BatchNorm of running statistics is y = s x + t per channel. After a linear or before one it is part
of weight and bias. Before a 3x3 convolution with zeros around the map, which come after the norm,

    conv(pad(s x + t)) = conv'(pad(x)) + b',

where conv' has the weights W s, and b', a map, is the bias and the convolution by W t of ones with
zeros around them: the shift fades at the border, and at padding. The residual x + conv(x) adds one
to a depthwise convolution's center. Weights are folded in float64 and rounded once.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.inference.frozen import ORIGINAL, Frozen
from dgt.layers import ConvStem, DGAttention, InvertedResidualFFN, convolution, mask_padding
from dgt.layers.convolution import channels_first, channels_last, zero_padding
from dgt.models.replace import TimmDGAttention
from dgt.ops.checks import describe, full_precision


def scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """What BatchNorm multiplies with and adds at inference, (C,) and (C,) in float64."""
    mean = cast(Tensor, norm.running_mean).double()
    variance = cast(Tensor, norm.running_var).double()
    scale = norm.weight.double() / (variance + norm.eps).sqrt()
    return scale, norm.bias.double() - mean * scale


def bias_of(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """The bias in float64, zeros where there is none."""
    if layer.bias is None:
        return layer.weight.new_zeros(len(layer.weight), dtype=torch.float64)
    return layer.bias.double()


def linear_of(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> nn.Linear:
    """A linear with these (C', C) and (C',), which are not trained."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(weight.to(dtype, copy=True), requires_grad=False)
    linear.bias = nn.Parameter(bias.to(dtype, copy=True), requires_grad=False)
    return linear.eval()


class FoldedConvolution(Frozen):
    """A 3x3 convolution with zeros around the map, with the norm before it and the residual.

    Args:
        conv: the convolution, dense or depthwise, of stride 1 or 2.
        dtype: of the weights.
        norm: BatchNorm of its input; None for none.
        is_residual: add the input, or what the norm makes of it, to a depthwise convolution.
    """

    weight: Tensor
    bias: Tensor
    taps: Tensor | None

    def __init__(
        self,
        conv: nn.Conv2d,
        dtype: torch.dtype,
        norm: nn.BatchNorm2d | None = None,
        is_residual: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels = conv.in_channels
        self.stride = conv.stride
        self.groups = conv.groups
        weight = conv.weight.double()
        wide = torch.promote_types(dtype, torch.float32)
        if is_residual:
            center = weight.new_zeros(9)
            center[4] = 1.0
            weight = weight + center.view(1, 1, 3, 3)
        taps, bias_type = None, dtype
        if norm is not None:
            scale, shift = (
                # Of inputs: a depthwise convolution has each in a row of its own.
                value[:, None, None, None] if conv.groups > 1 else value[None, :, None, None]
                for value in scale_and_shift(norm)
            )
            taps, bias_type = (weight * shift).sum(1, keepdim=True).to(wide), wide
            weight = weight * scale
        laid_out = weight.to(dtype).contiguous(memory_format=torch.channels_last)
        self.register_buffer("weight", laid_out, persistent=False)
        self.register_buffer("bias", bias_of(conv).to(bias_type), persistent=False)
        self.register_buffer("taps", taps, persistent=False)
        self.kept: tuple[Any, Tensor] | None = None  # the map b' of the last size
        self.training = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H', W', C'); padding, where ``mask`` (B, H, W) is False, is zero
        after the norm.
        """
        x = channels_first(mask_padding(self.checked(x), mask))
        if self.taps is None:
            return channels_last(
                F.conv2d(x, self.weight, self.bias, self.stride, 1, groups=self.groups)
            )
        convolved = F.conv2d(x, self.weight, None, self.stride, 1, groups=self.groups)
        return channels_last(convolved.add_(self.shifted(x, mask, convolved.dtype)))

    def checked(self, x: Tensor) -> Tensor:
        """Return an input (B, H, W, C).

        Raises:
            RuntimeError: gradients are asked for, or the calls are recorded for another process.
            TypeError, ValueError: for another type, device or shape.
        """
        self.check_prediction(x)
        dtype, device = self.weight.dtype, self.weight.device
        # Under autocast a convolution takes any type.
        is_taken = x.dtype == dtype or (
            x.is_floating_point() and convolution.is_autocast_on(device)
        )
        if x.device != device or not is_taken:
            raise TypeError(f"{ORIGINAL}, in {dtype} on {device}, got {describe(x)}")
        if x.dim() != 4 or x.shape[-1] != self.in_channels or 0 in x.shape[1:]:
            expected = f"x must have {self.in_channels} channels and not be empty"
            raise ValueError(f"{expected}, got {describe(x)}")
        return x

    def shifted(self, x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The map b', (1 or B, C', H', W'); without a mask that of the last size is kept."""
        assert self.taps is not None
        if mask is not None:
            return self.fading(mask[:, None], dtype)
        key = (*x.shape[2:], dtype, self.taps.device)
        kept = self.kept
        if kept is not None and kept[0] == key:
            return kept[1]
        found = self.fading(self.taps.new_ones(1, 1, *x.shape[2:]), dtype)
        if not torch.compiler.is_compiling():
            self.kept = (key, found)
        return found

    def fading(self, real: Tensor, dtype: torch.dtype) -> Tensor:
        """The map b' of (B, 1, H, W), one where a token is real and zero elsewhere."""
        assert self.taps is not None
        with full_precision(self.taps.device):
            real = real.to(self.taps.dtype)
            found = F.conv2d(real, self.taps, self.bias, self.stride, 1).to(dtype)
        return found.contiguous(memory_format=torch.channels_last)


class FoldedFeedForward(Frozen):
    """A :class:`dgt.layers.InvertedResidualFFN` without normalizations.

    Args:
        ffn: the network, in evaluation mode.
        dtype: of the weights.
    """

    def __init__(self, ffn: InvertedResidualFFN, dtype: torch.dtype) -> None:
        super().__init__()
        self.expand = linear_of(ffn.expand.weight, bias_of(ffn.expand), dtype)
        self.act = ffn.act
        self.depthwise = FoldedConvolution(ffn.depthwise, dtype, ffn.norm1, is_residual=True)
        before, after = scale_and_shift(ffn.norm2), scale_and_shift(ffn.norm3)
        project = ffn.project.weight.double()
        bias = bias_of(ffn.project) + project @ before[1]
        weight = after[0][:, None] * project * before[0]
        self.project = linear_of(weight, after[0] * bias + after[1], dtype)
        self.training = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        self.check_prediction(x)
        x = self.depthwise(self.act(self.expand(x)), mask)
        return self.project(self.act(x))


class FoldedStem(Frozen):
    """A :class:`dgt.layers.ConvStem` of which only the last normalization is left.

    Args:
        stem: the stem, in evaluation mode.
        dtype: of the weights.
    """

    def __init__(self, stem: ConvStem, dtype: torch.dtype) -> None:
        super().__init__()
        norms = [None, *stem.norms]
        pairs: Any = zip(stem.convs, norms, strict=False)
        self.convs = nn.ModuleList(FoldedConvolution(conv, dtype, norm) for conv, norm in pairs)
        self.act = stem.act
        self.norm = stem.norms[-1]
        self.training = False

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`dgt.layers.ConvStem.forward`."""
        x = channels_last(image.contiguous(memory_format=torch.channels_last))
        masks = (None, mask, mask)  # of the convolutions' inputs: images come without padding
        for conv, real in zip(self.convs, masks, strict=True):
            x = self.act(conv(x, real))
        return channels_last(zero_padding(self.norm(channels_first(x)), mask))


class UnitCentroids(Frozen):
    """Mixed into attention: its centroids have unit norm already."""

    centroids: Tensor

    def unit_centroids(self) -> Tensor:
        """Return the (H, G, D) centroids."""
        return self.centroids


class FrozenAttention(UnitCentroids, DGAttention):
    """:class:`dgt.DGAttention` with centroids that stay."""


class FrozenTimmAttention(UnitCentroids, TimmDGAttention):
    """The attention of :func:`dgt.replace_attention` with centroids that stay."""


FROZEN_ATTENTION: dict[type[nn.Module], type[nn.Module]] = {
    DGAttention: FrozenAttention,
    TimmDGAttention: FrozenTimmAttention,
}


def frozen_attention(attention: DGAttention) -> DGAttention:
    """Turn an attention layer, in place, into one whose centroids stay, and return it."""
    attention.centroids = attention.unit_centroids()
    attention.__class__ = FROZEN_ATTENTION[type(attention)]  # type: ignore[assignment]
    return attention
