"""Pictures in TensorBoard while a training goes on: what the model finds in a few validation images, and its groups.

How they look is the caller's matter: `fit` takes a function, `dgt train` gives it `dgt.app.visualize.draw_training`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch import Tensor

from dgt.data.dataset import Key
from dgt.data.image_io import BrokenImage
from dgt.training.checkpoints import LoadedRun
from dgt.training.loggers import Board
from dgt.training.parallel import SHARDED
from dgt.training.recipe import Recipe

Draw = Callable[[LoadedRun, list[Tensor]], dict[str, NDArray[np.uint8]]]
"""A copy of the network, on the CPU, and uint8 images (3, H, W) as it gets them -> images (H, W, 3) by name."""

IMAGES = 4


class Pictures(Callback):
    """Draws at the first validation and then every few epochs, with the averaged weights where there is an average.

    A drawing that fails costs a warning, not the training. Sharded weights are not drawn.

    Args:
        draw: makes the pictures.
        recipe: the complete recipe; its `trainer.pictures_every` says how often.
        data: the data module, set up.
        folder: the run's folder.
    """

    def __init__(self, draw: Draw, recipe: Recipe, data: Any, folder: Path) -> None:
        self.draw, self.recipe, self.data, self.folder = draw, recipe, data, folder

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, from the first process, where it is time."""
        every, epoch = self.recipe.trainer.pictures_every, trainer.current_epoch + 1
        boards = [logger for logger in trainer.loggers if isinstance(logger, Board)]
        due = every is not None and (epoch == 1 or epoch % every == 0 or epoch == trainer.max_epochs)
        if not due or not trainer.is_global_zero or self.recipe.trainer.strategy == SHARDED:
            return
        try:
            pictures = self._pictures(pl_module)
        except Exception as error:  # whatever a drawing library raises: the training is worth more than its pictures
            print(f"dgt: warning: no pictures were drawn: {error!r}", file=sys.stderr, flush=True)
            return
        for board in boards:
            for name, picture in pictures.items():
                board.add_image(name, picture, trainer.global_step)

    def _pictures(self, pl_module: LightningModule) -> dict[str, NDArray[np.uint8]]:
        network: Any = pl_module.network
        run = LoadedRun(copy.deepcopy(network).cpu().eval(), self.recipe, list(self.data.class_names), self.folder)
        dataset = self.data.datasets["val"]
        samples = [dataset[Key(0, 0, index)] for index in range(min(IMAGES, len(dataset)))]
        return self.draw(run, [sample[0] for sample in samples if not isinstance(sample, BrokenImage)])
