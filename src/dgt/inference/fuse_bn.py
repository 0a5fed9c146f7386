"""BatchNorms folded into the convolutions beside them, borders included.

Every BatchNorm of the network stands between a GELU and a convolution. Its affine map moves into that convolution; with
zero padding this is exact inside the image, and at its borders once the part of the shift that would come from outside
is taken off again. ``x + depthwise(x)`` is one depthwise convolution whose centre tap is one larger.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.inference.prepacked_conv import PackedConv
from dgt.utils.errors import UserError


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


def _conv_like(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> PackedConv:
    """A convolution of the same geometry and type with this weight and bias."""
    return PackedConv(conv, weight.to(conv.weight.dtype), bias.to(conv.weight.dtype))


class FoldedConv(nn.Module):
    """``conv(norm(x))``, or ``y + conv(y)`` with ``y = norm(x)``, as one 3x3 convolution with exact borders.

    Zero padding stands *behind* the normalisation: what is outside has no shift. The folded bias holds the shift of all
    nine taps, so at the borders the taps outside are taken off again. Under a mask the same holds for every padded
    place, and the shift becomes a convolution of the mask.

    Args:
        conv: 3x3, stride 1, padding 1, dense or depthwise.
        norm: what precedes it, or None.
        residual: add the convolution's input to its output.
    """

    taps: Tensor
    inner_bias: Tensor
    rows: Tensor
    columns: Tensor
    corners: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None, residual: bool = False) -> None:
        super().__init__()
        weight, bias = conv.weight.double(), _bias(conv)
        depthwise = conv.groups > 1
        if residual:
            weight = weight.clone()
            weight[range(len(weight)), 0 if depthwise else range(len(weight)), 1, 1] += 1
        self.has_shift = norm is not None
        taps = torch.zeros_like(weight[:, 0])  # (C, 3, 3): what the shift contributes through every tap
        if norm is not None:
            scale, shift = affine(norm)
            taps = weight[:, 0] * shift[:, None, None] if depthwise else torch.einsum("oikl,i->okl", weight, shift)
            weight = weight * (scale[:, None, None, None] if depthwise else scale[:, None, None])
        self.conv = _conv_like(conv, weight, bias + taps.sum((1, 2)))
        outer = taps[:, ::2].permute(1, 2, 0)  # (2, 3, C): the taps above and below
        constants = {
            "taps": taps[:, None],
            "inner_bias": bias,
            "rows": outer.sum(1, keepdim=True),  # (2, 1, C): what is missing in the first and the last row
            "columns": taps[:, :, ::2].permute(2, 1, 0).sum(1),  # (2, C)
            "corners": outer[:, ::2],  # (2, 2, C): what rows and columns both took off
        }
        for name, value in constants.items():
            self.register_buffer(name, value.detach().to(conv.weight.dtype).contiguous())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W); ``mask`` is bool (B, H, W), True where a token is real."""
        if mask is not None:
            real = mask.unsqueeze(1).to(x.dtype)
            x = F.conv2d(x * real, self.conv.weight, self.inner_bias, padding=1, groups=self.conv.groups)
            return x + F.conv2d(real, self.taps, padding=1) if self.has_shift else x
        x = self.conv(x)
        if self.has_shift:
            tokens = x.permute(0, 2, 3, 1)
            if torch.compiler.is_compiling():
                return (tokens - self._outside(*tokens.shape[1:3])).permute(0, 3, 1, 2)
            self._take_off_outside(tokens)
        return x

    def _take_off_outside(self, x: Tensor) -> None:
        """Subtract from (B, H, W, C), in place, what the shift would contribute from outside the image."""
        rows, columns, corners = self.rows, self.columns, self.corners
        height, width = x.shape[1:3]
        if height == 1:  # the first row is the last one
            rows, corners = rows.sum(0, keepdim=True), corners.sum(0, keepdim=True)
        if width == 1:
            columns, corners = columns.sum(0, keepdim=True), corners.sum(1, keepdim=True)
        down, across = max(height - 1, 1), max(width - 1, 1)  # steps from the first to the last
        x[:, ::down] -= rows
        x[:, :, ::across] -= columns
        x[:, ::down, ::across] += corners

    def _outside(self, height: int, width: int) -> Tensor:
        """What `_take_off_outside` subtracts, as a map (H, W, C) that a compiler computes on its way."""
        row = torch.arange(height, device=self.rows.device)[:, None, None]
        column = torch.arange(width, device=self.rows.device)[:, None]
        rows, columns = (row == 0, row == height - 1), (column == 0, column == width - 1)
        outside = columns[0] * self.columns[0] + columns[1] * self.columns[1]
        for i in range(2):
            outside = outside + rows[i] * self.rows[i]
            for j in range(2):
                outside = outside - (rows[i] & columns[j]) * self.corners[i, j]
        return outside
