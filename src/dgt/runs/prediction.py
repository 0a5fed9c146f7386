"""Predict image files with a trained model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dgt.data.folders import image_files, left_out_note
from dgt.runs.model import load_run
from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun, Prediction
from dgt.utils.errors import LOGGER, UserError, check_range
from dgt.utils.faults import explaining_faults


def predict(
    path: str | Path | LoadedRun, images: str | Path | Sequence[str | Path], top_k: int = 5
) -> list[Prediction]:
    """Apply a trained model to single image files.

    Args:
        path: checkpoint, run folder or model folder, or a run already loaded.
        images: an image file or a folder, of which every image below is taken, or several.
        top_k: how many classes a classifier gives for each image; more than the model knows gives
            all.

    Returns:
        One prediction per file, in their order, those of a folder by their paths; a file that
        cannot be read has `error` set and nothing else.

    Raises:
        FileNotFoundError, UserError: as `load_run`.
        UserError: `top_k` is below 1, or a folder has no images.

    Example:
        >>> from dgt.runs import predict
        >>> predict("runs/scenes", ["photo.jpg"])[0].classes  # doctest: +SKIP
        [('disc', 0.93), ('ring', 0.05)]
    """
    check_range(1, top_k=top_k)
    run = path if isinstance(path, LoadedRun) else load_run(path)
    task = TASKS[run.recipe.task]
    predictions = []
    for image in image_paths(images):
        try:
            with explaining_faults():
                prediction = task.predict(run, image, top_k)
            predictions.append(replace(prediction, image=str(image)))
        except (FileNotFoundError, ValueError) as error:
            predictions.append(Prediction(str(image), error=str(error)))
    return predictions


def image_paths(images: str | Path | Sequence[str | Path]) -> list[str]:
    """Image files, with those below a folder in its place; UserError for a folder without any."""
    paths: list[str] = []
    for image in [images] if isinstance(images, str | Path) else images:
        if not Path(image).is_dir():
            paths.append(str(image))
            continue
        left_out: Counter[str] = Counter()
        below = image_files(image, left_out)
        notes = left_out_note(image, left_out)
        if not below:
            raise UserError(
                "; ".join([f"there are no images in the folder {str(image)!r}", *notes])
            )
        for note in notes:
            LOGGER.warning(note)
        paths += below
    return paths
