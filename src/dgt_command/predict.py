"""`dgt predict`: predictions for image files, as text and as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgt.inference.optimize import can_be_optimized, optimize_for_inference
from dgt.runs import LoadedRun, predict
from dgt.runs.folder import check_folder
from dgt.runs.prediction import image_paths
from dgt.tasks import TASKS
from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import UserError


def predict_files(
    run: LoadedRun, images: Sequence[str | Path], out: str | Path, top_k: int = 5
) -> Iterator[dict[str, Any]]:
    """Predict image files one after another, and write the files of the model's task, if it has any.

    The model predicts as a snapshot (:func:`dgt.optimize_for_inference`).

    Args:
        run: the trained model.
        images: image files, and folders of them.
        out: folder of the files.
        top_k: how many classes a classifier gives.

    Returns:
        Plain values for each image, in order, as soon as it is predicted: `image`, `error` (None, or
        why it could not be read), what the task finds, and the `files` written.

    Raises:
        UserError: two images have one name, so that their drawings would be the same files.
        OSError: `out` is a file or cannot be written to.
    """
    folder, task = Path(out), TASKS[run.recipe.task]
    paths = image_paths(images)
    names = [""] * len(paths)
    if task.files is not None:
        check_folder(folder)
        names = drawing_names(paths)
    if can_be_optimized(run.network):
        run = replace(run, network=optimize_for_inference(run.network))
    return (
        _predict(run, image, folder, name, top_k) for image, name in zip(paths, names, strict=True)
    )


def _predict(run: LoadedRun, image: str, folder: Path, name: str, top_k: int) -> dict[str, Any]:
    """The prediction for one image, whose files are written; their names begin with `name`."""
    task = TASKS[run.recipe.task]
    (prediction,) = predict(run, [image], top_k)
    answer = prediction.to_dict()
    if task.files is not None and prediction.error is None:
        contents = task.files(run, prediction, task.draw(run, prediction))
        files = {folder / f"{name}_{end}": content for end, content in contents.items()}
        for path, content in files.items():
            atomic_write(path, content)
        answer["files"] = [str(path) for path in files]
    return answer


def drawing_names(images: Sequence[str]) -> list[str]:
    """What the drawings of images are named after: the file without its ending, and where two have
    the same, the file's folder with its whole name. UserError where these are the same, too.
    """
    paths = [Path(image) for image in images]
    stems = Counter(path.stem for path in paths)
    names = [
        path.stem if stems[path.stem] == 1 else f"{path.absolute().parent.name}_{path.name}"
        for path in paths
    ]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"images must have different file names, which their drawings are named after; got {name!r} twice"
        )
    return names


def prediction_lines(prediction: Mapping[str, Any]) -> list[str]:
    """What a prediction of `predict_files` says, human-readable: classes, the objects that are
    drawn, files.
    """
    lines = [f"  {100 * score:6.2f} %  {name}" for name, score in prediction.get("classes", ())]
    if "objects" in prediction:
        from dgt.figures.detections import SHOWN_SCORE

        drawn = [each for each in prediction["objects"] if each["score"] >= SHOWN_SCORE]
        for each in drawn:
            x0, y0, x1, y1 = each["box"]
            place = f"x {x0:.0f} to {x1:.0f}, y {y0:.0f} to {y1:.0f}"
            lines.append(f"  {100 * each['score']:6.2f} %  {each['category']}  ({place})")
        sure = f"at least {100 * SHOWN_SCORE:.0f} %"
        fainter = len(prediction["objects"]) - len(drawn)
        lines.append(
            f"  {len(drawn)} objects with a score of {sure}; {fainter} below that are not drawn"
        )
    return [*lines, *(f"  {path}" for path in prediction.get("files", ()))]
