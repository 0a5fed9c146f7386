"""Predict image files with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dgt.runs.model import load_run
from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun, Prediction
from dgt.utils.errors import check_range


def predict(
    path: str | Path | LoadedRun, images: Sequence[str | Path], top_k: int = 5
) -> list[Prediction]:
    """Apply a trained model to single image files.

    Args:
        path: checkpoint, run folder or model folder, or a run already loaded.
        images: image files.
        top_k: how many classes a classifier gives for each image; more than the model knows gives
            all.

    Returns:
        One prediction per file, in their order; a file that cannot be read has `error` set and
        nothing else.

    Raises:
        FileNotFoundError, UserError: as `load_run`.
        UserError: `top_k` is below 1.

    Example:
        >>> from dgt.runs import predict
        >>> predict("runs/scenes", ["photo.jpg"])[0].classes  # doctest: +SKIP
        [('disc', 0.93), ('ring', 0.05)]
    """
    check_range(1, top_k=top_k)
    run = path if isinstance(path, LoadedRun) else load_run(path)
    task = TASKS[run.recipe.task]
    found = []
    for image in images:
        try:
            prediction = task.predict(run, image, top_k)
            found.append(replace(prediction, image=str(image)))
        except (FileNotFoundError, ValueError) as error:
            found.append(Prediction(str(image), error=str(error)))
    return found
