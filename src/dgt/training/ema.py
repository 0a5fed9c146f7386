"""The average of the weights that is evaluated and exported: timm's, with centroids that stay on the unit sphere."""

from __future__ import annotations

import math

from timm.utils import ModelEmaV3
from torch import nn

from dgt.layers import renormalize_centroids

EMA_REFERENCE_BATCH = 1024


def ema_decay(decay: float, global_batch: int) -> float:
    """Decay per step that forgets, image for image, as fast as `decay` does at batch 1024.

    Args:
        decay: share of the average kept at each step of 1024 images.
        global_batch: images per optimizer step.
    """
    return math.pow(decay, global_batch / EMA_REFERENCE_BATCH)


class WeightAverage(ModelEmaV3):
    """Exponential moving average of weights and floating buffers, which begins with the weights after the first step.

    Args:
        network: whose weights are averaged; it is copied.
        decay: share of the average kept at each optimizer step.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__(network, decay=decay, stochastic_rounding=False)
        self.requires_grad_(False)

    def update(self, network: nn.Module, step: int) -> None:  # type: ignore[override]
        """Take in the weights after an optimizer step, counted from 1."""
        super().update(network, step)
        renormalize_centroids(self.module)
