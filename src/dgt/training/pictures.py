"""Pictures in TensorBoard while a training goes on: what the model finds in a few validation images, and its groups.

How they look is the caller's matter: `fit` takes a function, `dgt train` gives it `dgt.app.visualize.draw_training`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dgt.data.dataset import Key
from dgt.data.image_io import BrokenImage
from dgt.training.load import LoadedRun
from dgt.training.recipe import Recipe

Draw = Callable[[LoadedRun, list[Tensor]], dict[str, NDArray[np.uint8]]]
"""A copy of the network, on the CPU, and uint8 images (3, H, W) as it gets them -> images (H, W, 3) by name."""

IMAGES = 4


def draw_validation(
    draw: Draw, network: nn.Module, recipe: Recipe, data: Any, folder: Path
) -> dict[str, NDArray[np.uint8]]:
    """Draw a network on the first validation images.

    Args:
        draw: makes the images.
        network: in training; it is copied.
        recipe: the complete recipe.
        data: the data module, set up.
        folder: the run's folder.
    """
    run = LoadedRun(copy.deepcopy(network).cpu().eval(), recipe, list(data.class_names), folder)
    dataset = data.datasets["val"]
    samples = [dataset[Key(0, 0, index)] for index in range(min(IMAGES, len(dataset)))]
    return draw(run, [sample[0] for sample in samples if not isinstance(sample, BrokenImage)])
