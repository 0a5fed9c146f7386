"""Pictures in TensorBoard while a training goes on: what the model finds in a few validation images, and its groups.

How they look is the caller's matter: `fit` takes a function, `dgt train` gives it `dgt.figures.training.draw_training`.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from PIL import Image

from dgt.data.dataset import Key
from dgt.data.image_io import BrokenImage
from dgt.training.checkpoints import LoadedRun
from dgt.training.loggers import Board
from dgt.training.parallel import SHARDED
from dgt.training.recipe import Recipe

Draw = Callable[[LoadedRun, list[Path]], dict[str, NDArray[np.uint8]]]
"""A copy of the network in training, on the CPU, and image files -> pictures (H, W, 3) by name."""

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
        with tempfile.TemporaryDirectory() as folder:
            return self.draw(run, self._write_images(Path(folder)))

    def _write_images(self, folder: Path) -> list[Path]:
        """The first validation images as files, as the model sees them."""
        dataset, paths = self.data.datasets["val"], []
        for index in range(min(IMAGES, len(dataset))):
            sample = dataset[Key(0, 0, index)]
            if not isinstance(sample, BrokenImage):
                paths.append(folder / f"{index}.png")
                Image.fromarray(sample[0].permute(1, 2, 0).numpy()).save(paths[-1])
        return paths
