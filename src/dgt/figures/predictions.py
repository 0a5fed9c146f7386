"""What `dgt predict` writes for models whose answer is a picture, one row for each task; and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dgt.figures.detections import SHOWN_SCORE, predict_objects
from dgt.figures.label_map import draw_prediction
from dgt.training import LoadedRun

DRAWERS: dict[str, Callable[[LoadedRun, Path, Path], dict[str, Any]]] = {
    "segment": draw_prediction,
    "detect": predict_objects,
}
"""Task -> function of a trained model, an image file and the folder to write into; returns plain values for JSON."""


def write_predictions(run: LoadedRun, images: Sequence[str | Path], out: str | Path) -> list[dict[str, Any]]:
    """Predict image files and write what was found into a folder.

    Args:
        run: the trained model, of a task in `DRAWERS`.
        images: image files.
        out: folder to write; made where it is missing.

    Returns:
        For each file, in order, plain values: `image`, `error` (None, or why it could not be read), and what the task
        tells, the `files` written among it.

    Raises:
        ValueError: two images of one name, whose drawings would be the same files.
        NotADirectoryError: `out` is a file.
        OSError: `out` cannot be written to.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, {folder} is a file")
    names = [Path(image).stem for image in images]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"images must have different names, their drawings are named so; got {twice[0]!r} twice")
    folder.mkdir(parents=True, exist_ok=True)
    return [_predict(run, Path(image), folder) for image in images]


def prediction_lines(prediction: Mapping[str, Any]) -> list[str]:
    """What a prediction of any task says, for people: classes, the objects that are drawn, files.

    Args:
        prediction: one of :func:`write_predictions`, or a :class:`dgt.training.Prediction` as a dict.
    """
    lines = [f"  {100 * score:6.2f} %  {name}" for name, score in prediction.get("classes", ())]
    if "objects" in prediction:
        drawn = [found for found in prediction["objects"] if found["score"] >= SHOWN_SCORE]
        for found in drawn:
            x0, y0, x1, y1 = found["box"]
            place = f"x {x0:.0f} to {x1:.0f}, y {y0:.0f} to {y1:.0f}"
            lines.append(f"  {100 * found['score']:6.2f} %  {found['category']}  ({place})")
        fainter = len(prediction["objects"]) - len(drawn)
        lines.append(
            f"  {len(drawn)} objects of at least {100 * SHOWN_SCORE:.0f} %, {fainter} below, which are not drawn"
        )
    return [*lines, *(f"  {path}" for path in prediction.get("files", ()))]


def _predict(run: LoadedRun, image: Path, folder: Path) -> dict[str, Any]:
    try:
        if not image.is_file():
            raise FileNotFoundError(f"there is no image file {str(image)!r}")
        return {"image": str(image), "error": None, **DRAWERS[run.recipe.task](run, image, folder)}
    except (FileNotFoundError, ValueError) as error:
        return {"image": str(image), "error": str(error)}
