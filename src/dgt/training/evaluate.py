"""Using a trained model: its metrics on a data set, and what it finds in single images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun, Prediction
from dgt.training.fit import build_fabric
from dgt.training.loop import measure
from dgt.training.recipe import build_data, override_keys, parse_recipe
from dgt.training.run import load_run
from dgt.utils.atomic_write import write_json
from dgt.utils.errors import UserError, check_range

TRAINER_KEYS = ("trainer.accelerator", "trainer.precision")


def evaluate(
    path: str | Path | LoadedRun, overrides: Sequence[str] = (), predictions: str | Path | None = None, parts: int = 0
) -> dict[str, Any]:
    """Measure a trained model on the validation images of its recipe's data, or of other data.

    Args:
        path: checkpoint, run folder or model folder, or one already loaded.
        overrides: changes to the recipe's `data`, `trainer.accelerator` and `trainer.precision`, such as
            `["--data.root", "images"]`. The rest of the recipe is the model's past.
        predictions: file for a detector's detections, in the format of COCO's results; None to write none.
        parts: tell also `left_out`, the metrics without each of so many parts of the batches; 0 for none.

    Returns the task's metrics (for classification `loss`, `top1`, `top5`; shares in [0, 1]), the number of `images` and
    of `broken_images`. Raises as `load_run` and the data do; UserError for data of other classes, a machine that lacks
    what `trainer` asks for, an override of another key, `predictions` of another task, fewer batches than `parts`.
    """
    for key in sorted(override_keys(overrides)):
        if key.partition(".")[0] != "data" and key not in TRAINER_KEYS:
            allowed = " and ".join(TRAINER_KEYS)
            raise UserError(f"recipe key {key!r} cannot be changed in an evaluation, only data.* and {allowed}")
    run = path if isinstance(path, LoadedRun) else load_run(path)
    task = TASKS[run.recipe.task]
    if predictions is not None and not task.has_results:
        raise UserError(f"predictions are written of detectors alone, {run.source} is of task {task.name!r}")
    recipe = parse_recipe(run.recipe.to_dict(), overrides)
    data = build_data(recipe)
    data.setup("validate")
    if list(data.class_names) != run.class_names:
        theirs, ours = (f"{len(names)} ({', '.join(names[:5])})" for names in (data.class_names, run.class_names))
        raise UserError(f"the data has other classes than the model: {theirs} in the data, {ours} in {run.source}")
    fabric = build_fabric(replace(recipe.trainer, devices=1, num_nodes=1, strategy="auto"), task)
    network = fabric.strategy.precision.convert_module(run.network).to(fabric.device)
    metrics, loader = task.metrics(data), data.val_dataloader()
    if len(loader) < parts:
        raise UserError(f"data.batch_size: expected at least {parts} batches of validation images, got {len(loader)}")
    without = [task.metrics(data) for _ in range(parts)]
    measure(fabric, LeftOut(metrics, without) if parts else metrics, network, loader)
    found: dict[str, Any] = metrics.compute()
    if predictions is not None:
        write_json(Path(predictions), metrics.results)
    if parts:
        found["left_out"] = [part.compute() for part in without]
    report = data.broken_images["val"]
    return {**found, "images": report.total - len(report), "broken_images": len(report)}


class LeftOut:
    """The metrics of all batches, and of all but every n-th in each of n `parts`; the network runs once a batch."""

    def __init__(self, whole: Any, parts: Sequence[Any]) -> None:  # `Metrics` whose network is a function here
        self.whole, self.parts, self.batches = whole, parts, 0

    def update(self, network: Any, images: Any, targets: Any) -> None:
        """Add one batch to the whole, and to all parts but one."""
        outputs: list[Any] = []

        def remembering(given: Any) -> Any:
            outputs.append(network(given))
            return outputs[-1]

        self.whole.update(remembering, images, targets)
        for number, part in enumerate(self.parts):
            if number != self.batches % len(self.parts):
                left = iter(outputs)
                part.update(lambda _, left=left: next(left), images, targets)
        self.batches += 1


def predict(path: str | Path | LoadedRun, images: Sequence[str | Path], top_k: int = 5) -> list[Prediction]:
    """What a trained model finds in single image files, as its task says.

    Args:
        path: checkpoint, run folder or model folder, or one already loaded.
        images: image files.
        top_k: classes that a classifier gives for each image; more than the model knows gives all.

    Returns one prediction per file, in their order; a file that cannot be read has `error` set and nothing else. Raises
    as `load_run`; UserError for `top_k` below 1.
    """
    check_range(1, top_k=top_k)
    run = path if isinstance(path, LoadedRun) else load_run(path)

    def of_one(image: str | Path) -> Prediction:
        try:
            return replace(TASKS[run.recipe.task].predict(run, image, top_k), image=str(image))
        except (FileNotFoundError, ValueError) as error:
            return Prediction(str(image), error=str(error))

    return [of_one(image) for image in images]
