"""What a training step computes: the network with its losses, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dgt.tasks import Losses
from dgt.utils.errors import NonFiniteInput


class Batch:
    """Images and targets of one batch; opaque to Fabric, which would round their floats to bfloat16, boxes too."""

    def __init__(self, images: Any, targets: Any) -> None:
        self.images, self.targets = images, targets


class Objective(nn.Module):
    """The network with its losses: batch -> losses, the one forward that DDP and FSDP2 wrap.

    Args:
        network: what is trained.
        losses: of the task.
        nan_is_a_loss: whether the attention's refusal of NaN gives a loss of NaN (of all weights: DDP waits for each).
    """

    def __init__(self, network: nn.Module, losses: Callable[..., Losses], nan_is_a_loss: bool) -> None:
        super().__init__()
        self.network, self.losses, self.nan_is_a_loss = network, losses, nan_is_a_loss

    def forward(self, batch: Batch) -> Losses:
        """Losses of one batch; "loss" is what is minimised."""
        try:
            return self.losses(self.network, batch.images, batch.targets)
        except NonFiniteInput:
            if not self.nan_is_a_loss:
                raise
            weights = [weight for weight in self.network.parameters() if weight.requires_grad]
            return {"loss": torch.stack([weight.flatten()[:1].sum() * 0.0 for weight in weights]).sum() + torch.nan}
