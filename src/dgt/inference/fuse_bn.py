"""BatchNorms folded into the convolutions beside them, borders included.

Every BatchNorm of the network stands between a GELU and a convolution. Its affine map moves into that convolution; with
zero padding this is exact inside the image, and at its borders once the part of the shift that would come from outside
is taken off again. ``x + depthwise(x)`` is one depthwise convolution whose centre tap is one larger.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.utils.errors import UserError

ENDS, INNER = slice(None, None, 2), slice(1, 2)  # of three rows or columns


def affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return scale and shift, float64 (C,), of a BatchNorm in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("BatchNorm must track running statistics to be folded, got track_running_stats=False")
    scale = (norm.running_var.double() + norm.eps).rsqrt() * norm.weight.double()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def fold_after(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return ``norm(conv(x))`` as one convolution: exact for any kernel and padding."""
    scale, shift = affine(norm)
    weight = conv.weight.double() * scale[:, None, None, None]
    return _conv_like(conv, weight, _bias(conv) * scale + shift)


def fold_before(norm: nn.BatchNorm2d, conv: nn.Conv2d) -> nn.Conv2d:
    """Return ``conv(norm(x))`` as one convolution, for a 1x1 convolution: exact because it has no padding."""
    scale, shift = affine(norm)
    weight = conv.weight.double()
    return _conv_like(conv, weight * scale[:, None, None], _bias(conv) + weight[..., 0, 0] @ shift)


def _bias(conv: nn.Conv2d) -> Tensor:
    return conv.weight.new_zeros(conv.out_channels).double() if conv.bias is None else conv.bias.double()


def _conv_like(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution of the same geometry and type with this weight and bias."""
    like = copy.deepcopy(conv)
    like.weight = nn.Parameter(weight.detach().to(conv.weight.dtype))
    like.bias = nn.Parameter(bias.detach().to(conv.weight.dtype))
    return like


class PredictsOnly(nn.Module):
    """A part that cannot be trained."""

    def train(self, mode: bool = True) -> "PredictsOnly":
        """Stay in evaluation mode; RuntimeError when asked to train."""
        if mode:
            raise RuntimeError("the inference form of a model cannot be trained: train the model it was made from")
        return super().train(False)


class FoldedConv(PredictsOnly):
    """``conv(norm(x))``, or ``y + conv(y)`` with ``y = norm(x)``, as one 3x3 convolution with exact borders.

    Zero padding stands *behind* the normalisation: what is outside has no shift. The folded bias holds the shift of all
    nine taps, so at the borders the taps outside are taken off again. Under a mask the same holds for every padded
    place, and the shift becomes a convolution of the mask.

    Args:
        conv: 3x3, stride 1, padding 1, dense or depthwise.
        norm: what precedes it.
        residual: add the convolution's input to its output.
    """

    inner_bias: Tensor
    taps: Tensor  # (C', 1, 3, 3): what the shift contributes through every tap
    edges: Tensor  # (1, C', 3, 3): what it would contribute from outside to an image of 3 x 3

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, residual: bool = False) -> None:
        super().__init__()
        weight, bias = conv.weight.double().clone(), _bias(conv)
        scale, shift = (value[:, None, None] for value in affine(norm))
        depthwise = conv.groups > 1
        if residual:
            weight[range(len(weight)), 0 if depthwise else range(len(weight)), 1, 1] += 1
        if depthwise:
            scale, shift = scale[:, None], shift[:, None]
        taps = (weight * shift).sum(1, keepdim=True)
        self.conv = _conv_like(conv, weight * scale, bias + taps.sum((1, 2, 3)))
        for name, value in (("inner_bias", bias), ("taps", taps)):
            self.register_buffer(name, value.detach().to(conv.weight.dtype))
        self.register_buffer("edges", self._outside(3, 3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W); ``mask`` is bool (B, H, W), True where a token is real."""
        if mask is not None:
            real = mask.unsqueeze(1).to(x.dtype)
            x = F.conv2d(x * real, self.conv.weight, self.inner_bias, padding=1, groups=self.conv.groups)
            return x + F.conv2d(real, self.taps, padding=1)
        x = self.conv(x)
        height, width = x.shape[2:]
        if torch.compiler.is_compiling() or min(height, width) < 3:
            return x - self._outside(height, width)
        rows, columns, corners = (self.edges[:, :, i, j] for i, j in ((ENDS, INNER), (INNER, ENDS), (ENDS, ENDS)))
        x[:, :, :: height - 1] -= rows
        x[..., :: width - 1] -= columns
        x[:, :, :: height - 1, :: width - 1] += rows + columns - corners
        return x

    def _outside(self, height: int, width: int) -> Tensor:
        """What the shift would contribute from outside to (1, C', H, W): along a side the same, so 3 x 3 tell all."""
        inside = F.conv2d(self.taps.new_ones(1, 1, min(height, 3), min(width, 3)), self.taps, padding=1)
        outside = self.taps.sum((2, 3)).view(1, -1, 1, 1) - inside
        place = [torch.arange(size, device=inside.device) for size in (height, width)]
        rows, columns = (p.clamp(max=1) + (p >= max(len(p) - 1, 2)) for p in place)
        return outside[:, :, rows[:, None], columns]
