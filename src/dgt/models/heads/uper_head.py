"""The two heads of UperNet (Unified Perceptual Parsing, Xiao et al. 2018), over four feature maps.

Weights have the names that transformers gives them.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOL_SCALES = (1, 2, 3, 6)


class ConvNormReLU(nn.Sequential):
    """A convolution that keeps the size of its input, BatchNorm, and ReLU."""

    def __init__(self, in_channels: int, channels: int, kernel: int) -> None:
        conv = nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2, bias=False)
        parts = OrderedDict(conv=conv, batch_norm=nn.BatchNorm2d(channels), activation=nn.ReLU())
        super().__init__(parts)


class PyramidHead(nn.Module):
    """Pooling at several scales over the last map, and a feature pyramid over all maps.

    Args:
        in_channels: channels of the maps, the finest first.
        channels: width of the head.
        num_classes: number of classes.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, num_classes: int) -> None:
        super().__init__()
        *finer, coarsest = in_channels
        self.classifier = nn.Conv2d(channels, num_classes, 1)
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(scale), ConvNormReLU(coarsest, channels, 1))
            for scale in POOL_SCALES
        )
        pooled = coarsest + len(POOL_SCALES) * channels
        self.bottleneck = ConvNormReLU(pooled, channels, 3)
        self.lateral_convs = nn.ModuleList(ConvNormReLU(width, channels, 1) for width in finer)
        self.fpn_convs = nn.ModuleList(ConvNormReLU(channels, channels, 3) for _ in finer)
        self.fpn_bottleneck = ConvNormReLU(len(in_channels) * channels, channels, 3)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map (B, C, H, W) maps to (B, num_classes, H, W) logits of the size of the first."""
        top = maps[-1]
        context = [_resize(pool(top), top) for pool in self.psp_modules]
        level = self.bottleneck(torch.cat([top, *context], dim=1))
        outputs = [level]
        for place in reversed(range(len(maps) - 1)):
            lateral = self.lateral_convs[place](maps[place])
            level = lateral + _resize(level, lateral)
            outputs.insert(0, self.fpn_convs[place](level))
        resized = [outputs[0], *(_resize(output, outputs[0]) for output in outputs[1:])]
        logits: Tensor = self.classifier(self.fpn_bottleneck(torch.cat(resized, dim=1)))
        return logits


class AuxiliaryHead(nn.Module):
    """A 3x3 convolution and a classifier over the third map, which training adds.

    Args:
        in_channels: channels of the maps, the finest first.
        channels: width of the head.
        num_classes: number of classes.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(ConvNormReLU(in_channels[2], channels, 3))
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map (B, C, H, W) maps to (B, num_classes, H, W) logits of the size of the third."""
        logits: Tensor = self.classifier(self.convs(maps[2]))
        return logits


def _resize(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)
