"""The convolutional parts: stem, patch merging, position encoding (CPE), feed-forward (IRFFN).

Everything outside attention is CMT's (stem, inverted residual feed-forward network) or CPVT's
(conditional position encoding). Every convolution has a bias, which reproduces the paper's
parameter counts. Tensors are (B, H, W, C): LayerNorm and linears need no copy, and convolutions see
the same memory as (B, C, H, W) in PyTorch's channels-last format. A ``mask`` (B, H, W), True where
a token is real, zeroes padding before every spatial convolution, so that a padded image gives the
same result as the image alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.plain import can_be_skipped, is_unchanged
from dgt.layers.recomputation import activate_and_norm
from dgt.ops.checks import is_transformed
from dgt.ops.maps import add_depthwise, can_run_on_map


def mask_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding of a map.

    Args:
        x: (B, H, W, C).
        mask: bool (B, H, W), True where a token is real, or None.

    Returns:
        (B, H, W, C), zero where ``mask`` is False; ``x`` itself without a mask.

    Example:
        >>> mask = torch.tensor([[[True, False]]])
        >>> mask_padding(torch.ones(1, 1, 2, 1), mask).flatten()
        tensor([1., 0.])
    """
    return x if mask is None else x * mask.unsqueeze(-1)


def channels_first(x: Tensor) -> Tensor:
    """View (B, H, W, C) as (B, C, H, W)."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """View (B, C, H, W) as (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding of (B, C, H, W), as :func:`mask_padding`."""
    return x if mask is None else x * mask.unsqueeze(1)


def is_autocast_on(device: torch.device) -> bool:
    """Tell whether autocast is at work on a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def add_convolved(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Add to (B, C, H, W) its depthwise convolution.

    On CPUs this is one operator in training (:mod:`dgt.ops.maps`), which reads the map once, where
    the module does just what its class does; it is not called then.
    """
    if _is_add_depthwise(x, conv):
        summed: Tensor = add_depthwise(x, conv.weight, conv.bias)
        return summed
    return x + conv(x)


def _is_add_depthwise(x: Tensor, conv: nn.Conv2d) -> bool:
    """Tell whether the operator computes the sum of this map and what the module gives."""
    if not can_run_on_map(x, *conv.parameters(recurse=False)) or not is_unchanged(conv, nn.Conv2d):
        return False
    channels = x.shape[1]
    shape = (channels, channels, channels, (3, 3), (1, 1), (1, 1), (1, 1), "zeros")
    found = (
        conv.in_channels,
        conv.out_channels,
        conv.groups,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.padding_mode,
    )
    if found != shape or conv.bias is None:
        return False
    # Autocast rounds a map to its type, but for one that is in that type already.
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    return x.dtype in (torch.float32, cast)


def add_position(x: Tensor, cpe: Any) -> Tensor:
    """Add to (B, H, W, C) its position encoding (Eq. 8)."""
    if is_unchanged(cpe, ConditionalPositionEncoding):
        return channels_last(add_convolved(channels_first(x), cpe.conv))
    encoded: Tensor = x + cpe(x)
    return encoded


@register_notrace_module
class LayerNorm(nn.LayerNorm):
    """LayerNorm over channels that returns the type of its input under autocast, too.

    PyTorch's returns float32 there on a GPU, and whatever is added to it becomes float32 as well:
    twice the bytes in every later block. Means and variances are float32 inside of the kernel
    either way.

    Args:
        dim: channels C.
        factory: ``device`` and ``dtype``.

    Example:
        >>> LayerNorm(64)(torch.randn(1, 7, 7, 64)).shape
        torch.Size([1, 7, 7, 64])
    """

    def __init__(self, dim: int, **factory: Any) -> None:
        super().__init__(dim, eps=1e-6, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C) to the same shape and type."""
        # On CPUs autocast leaves LayerNorm alone, which takes both types at once.
        if x.dtype.itemsize > 2 or x.is_cpu or not is_autocast_on(x.device):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


@can_be_skipped
class ConvStem(nn.Module):
    """Three 3x3 convolutions, the first with a stride, each followed by GELU and BatchNorm.

    Args:
        in_chans: channels of the image.
        width: channels of the result.
        stride: of the first convolution.
        factory: ``device`` and ``dtype``.

    Example:
        >>> ConvStem(3, 32)(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 32, 32, 32])
    """

    def __init__(self, in_chans: int, width: int, stride: int = 2, **factory: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(in_chans, width, 3, stride, 1, **factory)])
        for _ in range(2):
            self.convs.append(nn.Conv2d(width, width, 3, 1, 1, **factory))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, **factory) for _ in range(3))
        self.act = nn.GELU()

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, H', W', width); ``mask`` is (B, H', W')."""
        x = image
        if not is_transformed():  # vmap knows of no other layout
            x = image.contiguous(memory_format=torch.channels_last)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = activate_and_norm(conv(x), self.act, norm, zero_padding, mask)
        return channels_last(x)


class PatchMerging(nn.Module):
    """Halve height and width (rounding up): 3x3 convolution of stride 2, then LayerNorm.

    Args:
        in_dim: channels of the input.
        dim: channels of the result.
        factory: ``device`` and ``dtype``.

    Example:
        >>> PatchMerging(32, 64)(torch.randn(1, 15, 15, 32)).shape
        torch.Size([1, 8, 8, 64])
    """

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, 2, 1, **factory)
        self.norm = LayerNorm(dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        return self.norm(channels_last(self.conv(channels_first(x))))


@can_be_skipped
class ConditionalPositionEncoding(nn.Module):
    """Position from content: a depthwise 3x3 convolution with zero padding (Eq. 8).

    The residual is the block's.

    Args:
        dim: channels C.
        factory: ``device`` and ``dtype``.

    Example:
        >>> ConditionalPositionEncoding(64)(torch.randn(1, 7, 7, 64)).shape
        torch.Size([1, 7, 7, 64])
    """

    def __init__(self, dim: int, **factory: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        return channels_last(self.conv(channels_first(x)))


@can_be_skipped
class InvertedResidualFFN(nn.Module):
    """CMT's feed-forward network (Eq. 10): expand, residual depthwise 3x3, project.

    The residual comes before the second GELU. CMT's convolutions of 1x1 are linears, which need
    neither views nor a kernel for the bias.

    Args:
        dim: channels C.
        ratio: expansion R.
        drop: rate of dropout after the projection.
        factory: ``device`` and ``dtype``.

    Example:
        >>> InvertedResidualFFN(64)(torch.randn(1, 7, 7, 64)).shape
        torch.Size([1, 7, 7, 64])
    """

    def __init__(self, dim: int, ratio: float = 4.0, drop: float = 0.0, **factory: Any) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.expand = nn.Linear(dim, hidden, **factory)
        self.norm1 = nn.BatchNorm2d(hidden, **factory)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **factory)
        self.norm2 = nn.BatchNorm2d(hidden, **factory)
        self.project = nn.Linear(hidden, dim, **factory)
        self.norm3 = nn.BatchNorm2d(dim, **factory)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        x = channels_first(self.expand(x))
        x = activate_and_norm(x, self.act, self.norm1, self.mix, mask)
        x = activate_and_norm(x, self.act, self.norm2, self.merge)
        return channels_last(self.drop(self.norm3(x)))

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Add to (B, hidden, H, W) its depthwise convolution, between neighbors."""
        return add_convolved(zero_padding(x, mask), self.depthwise)

    def merge(self, x: Tensor) -> Tensor:
        """Project (B, hidden, H, W) to (B, C, H, W)."""
        return channels_first(self.project(channels_last(x)))
