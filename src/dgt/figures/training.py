"""What TensorBoard shows of a training: classes, label maps or objects found in a few images, and the groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from dgt.figures.predictions import DRAWERS
from dgt.figures.visualize import visualize
from dgt.models import DynamicGroupTransformer
from dgt.training import LoadedRun, predict


def draw_training(run: LoadedRun, images: list[Path]) -> dict[str, NDArray[np.uint8]]:
    """Draw what a model finds in image files, and its groups where it has dynamic group attention.

    Args:
        run: the model, on the CPU.
        images: image files; what is drawn is written beside them.

    Returns:
        Pictures (H, W, 3) uint8: "predictions", or "predictions/0" and so on, and "groups".
    """
    pictures = {}
    if run.recipe.task == "classify":
        pictures["predictions"] = _classes(run, images)
    else:
        for index, image in enumerate(images):
            found = DRAWERS[run.recipe.task](run, image, image.parent)
            drawn = [path for path in found["files"] if str(path).endswith(".png")]
            pictures[f"predictions/{index}"] = _pixels(Path(drawn[-1]))
    if isinstance(run.network, DynamicGroupTransformer) and images:
        path = images[0].parent / "groups.png"
        visualize([run], images[:1], path)
        pictures["groups"] = _pixels(path)
    return pictures


def _classes(run: LoadedRun, images: list[Path]) -> NDArray[np.uint8]:
    """The images in a row, each under the class the model gives it and its probability."""
    figure = Figure(figsize=(2.2 * max(1, len(images)), 2.6), facecolor="white", layout="constrained")
    for place, (path, found) in enumerate(zip(images, predict(run, images, top_k=1), strict=True)):
        axes = figure.add_subplot(1, len(images), place + 1)
        axes.imshow(_pixels(path))
        axes.set_axis_off()
        name, share = found.classes[0]
        axes.set_title(f"{name}\n{100 * share:.0f} %", fontsize=9)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return drawn


def _pixels(path: Path) -> NDArray[np.uint8]:
    return np.asarray(Image.open(path).convert("RGB"))
