"""How Swin and CSWin come from image to tokens, and from one stage to the next; for the hybrids of the appendix.

Sizes that patches do not tile are padded with zeros on the right and below, so every map is ``ceil(size / stride)``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from torch import Tensor, nn

from dgt.layers.convolution import keep_real
from dgt.layers.windows import pad_map


class PatchStem(nn.Module):
    """One strided convolution, then LayerNorm.

    Args:
        in_chans: channels of the image.
        dim: channels out.
        stride: side of a patch in pixels, even.
        overlap: whether the convolution sees 2 stride - 1 pixels (CSWin) or just its patch (Swin).
    """

    def __init__(self, in_chans: int, dim: int, stride: int = 4, overlap: bool = False, **factory: Any) -> None:
        super().__init__()
        self.stride = stride
        kernel, padding = (2 * stride - 1, stride // 2) if overlap else (stride, 0)
        self.conv = nn.Conv2d(in_chans, dim, kernel, stride, padding, **factory)
        self.norm = LayerNorm(dim, **factory)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, ceil(H / stride), ceil(W / stride), dim); ``mask`` is of that size."""
        stride = self.stride
        below, right = (stride - image.shape[2] % stride) % stride, (stride - image.shape[3] % stride) % stride
        x = self.conv(F.pad(image, (0, right, 0, below)))
        return keep_real(self.norm(x.permute(0, 2, 3, 1)), mask)


class PatchConcatenation(nn.Module):
    """Swin's patch merging: the channels of 2 x 2 tokens side by side, LayerNorm, and a linear without bias.

    Args:
        in_dim: channels in.
        dim: channels out.
    """

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * in_dim, **factory)
        self.reduction = nn.Linear(4 * in_dim, dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        x = pad_map(x, 2, 2)
        top, bottom = x[:, ::2], x[:, 1::2]
        x = torch.cat([top[:, :, ::2], bottom[:, :, ::2], top[:, :, 1::2], bottom[:, :, 1::2]], dim=-1)
        return self.reduction(self.norm(x))
