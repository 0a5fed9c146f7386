"""Randomness inside a training step as a function of (seed, epoch, batch, process): dropout, drop path, sampling.

The data layer draws its own randomness the same way (`dgt.utils.seeding`). Together they make a training that is
stopped anywhere and goes on from a checkpoint meet the draws that it would have met.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from dgt.utils.seeding import seed_sequence


class StepSeeds(Callback):
    """Seed Python's, NumPy's and PyTorch's global generators, those of devices too, before every training batch.

    Args:
        seed: the recipe's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed for this batch."""
        parts = ("step", self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)
        python_seed, numpy_seed, torch_seed = (int(word) for word in seed_sequence(*parts).generate_state(3))
        random.seed(python_seed)
        np.random.seed(numpy_seed)  # noqa: NPY002  # the global one is what libraries draw from
        torch.manual_seed(torch_seed)
