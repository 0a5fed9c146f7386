"""Pack a finished run: model, card, log, and checksums.

The format is that of `dgt.weights`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from dgt.acceleration import apply_plan
from dgt.runs import LoadedRun, load_run
from dgt.runs.folder import RESULTS
from dgt.runs.model import export_model, make_record
from dgt.runs.recipe import read_yaml
from dgt.runs.settings import plain_values
from dgt.tasks import TASKS, Task
from dgt.tasks.classify import CLASSIFY, ClassificationMetrics
from dgt.training import evaluate
from dgt.utils.atomic_write import atomic_write, replacing, write_json
from dgt.utils.errors import UserError
from dgt.utils.json_files import read_json
from dgt.utils.records import wilson
from dgt.weights.folder import CARD, MODEL, PLAN, STORY, SUMS, check_weights, write_sums
from tools.weights_card import PARTS, about_data, card_text, jackknife

MATRICES = (2, 4)
"""Dimensions of tensors stored in half precision: matrices and convolutions, nearly all of a model."""
TOLERANCE = 0.00101
"""Largest difference of a headline metric between packed weights and run: a tenth of a point."""


@dataclass(frozen=True)
class Packing:
    """How a run is packed.

    Args:
        half: store matrices and convolutions in float16.
        overrides: overrides for the evaluation, as in `evaluate`.
        about: YAML file with the card's text about the data, as in `about_data`.
        plan: plan file of `dgt accelerate` for this model, to measure and to include.
        image_size: side in pixels of the images that the packed model is for and measured on; None
            for that of the training.
    """

    half: bool = False
    overrides: Sequence[str] = ()
    about: str | Path | None = None
    plan: str | Path | None = None
    image_size: int | None = None


DEFAULT = Packing()


def make_weights(run: str | Path, out: str | Path, packing: Packing = DEFAULT) -> Path:
    """Pack the folder of a finished run and measure the packed weights; `out` is written atomically.

    Args:
        run: folder of the run.
        out: folder to write, named ARCHITECTURE.TAG; an earlier folder of weights there is
            replaced.
        packing: options.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the run or a file does not exist.
        FileExistsError: If `out` contains anything else.
        UserError: If the run is not finished, its data is unknown, the packed weights do not
            reproduce its metrics, or the plan is for another model.
    """
    folder = Path(run)
    out = Path(out)
    loaded = load_run(folder)
    if not (folder / RESULTS).is_file():
        raise UserError(f"{folder} is not a finished run: it has no {RESULTS}")
    results = read_json(folder / RESULTS)
    if out.exists() and not (out / SUMS).is_file():
        raise FileExistsError(f"{out} is no earlier folder of weights: name another with --out")
    described = plain_values(read_yaml("description", packing.about)[1]) if packing.about else None
    data = loaded.recipe.data
    names = [data.dataset, Path(data.root or "").name, loaded.recipe.name]
    story = about_data(names, described)
    if packing.plan is not None:
        # checked before the evaluation, which takes long
        apply_plan(load_run(folder).network, packing.plan)
    state = loaded.network.state_dict()
    if packing.half:
        state = {key: to_half(value) for key, value in state.items()}
    with replacing(out) as partial:
        export_model(partial, loaded.network, make_record(loaded.recipe, loaded.class_names), state)
        evaluation = _evaluate(loaded, partial, packing, results["metrics"])
        _check_metrics(loaded, evaluation)
        if packing.image_size is not None:
            trained_at = loaded.recipe.data.image_size
            loaded = load_run(folder, [f"--data.image_size={packing.image_size}"])
            record = make_record(loaded.recipe, loaded.class_names)
            export_model(partial, loaded.network, record, state)
            evaluation = _evaluate(loaded, partial, packing, results["metrics"])
            evaluation |= {"image_size": packing.image_size, "trained_at": trained_at}
        if packing.plan is not None:
            evaluation["plan"] = _evaluate_plan(partial, packing, evaluation["metrics"])
            shutil.copyfile(packing.plan, partial / PLAN)
        results["evaluation"] = evaluation
        results["first_weights"] = _first_weights(loaded)
        export_model(
            partial, loaded.network, make_record(_anonymous(loaded), loaded.class_names), state
        )
        for name in STORY[:-1]:
            atomic_write(
                partial / name, without_folders((folder / name).read_text(encoding="utf-8"))
            )
        write_json(partial / STORY[-1], {**results, "command": without_folders(results["command"])})
        size = (partial / MODEL[0]).stat().st_size
        timm = not TASKS[loaded.recipe.task].has_backbone
        atomic_write(
            partial / CARD, without_folders(card_text(out.name, results, story, timm, size))
        )
        write_sums(partial)
        check_weights(partial)
    return out


def _anonymous(run: LoadedRun) -> Any:
    """The recipe without paths of the user's machine."""
    data = run.recipe.data
    root = Path(data.root).name if data.root else data.root
    return replace(run.recipe, out=None, data=replace(data, root=root))


def _evaluate(
    run: LoadedRun, packed: Path, packing: Packing, trained: Mapping[str, float]
) -> dict[str, Any]:
    """The headline metrics of the packed weights with intervals, and a classifier's predictions."""
    task = TASKS[run.recipe.task]
    predictions = {}
    if task is CLASSIFY:
        found = evaluate(packed, packing.overrides, metrics=Predictions)
        intervals = "Wilson's intervals"
        predictions = {key: " ".join(map(str, found[key])) for key in ("labels", "predicted")}
    else:
        found = evaluate(packed, packing.overrides, metrics=lambda data: LeftOut(task, data, PARTS))
        intervals = f"a jackknife over {PARTS} parts of the images"
    rows = {}
    for key, label in task.headline.items():
        value = found[key]
        before = trained.get(key, value)
        if key in task.shares:
            low, high = wilson(value, found["images"])
        else:
            low, high = jackknife(value, [part[key] for part in found["left_out"]])
        rows[key] = {"label": label, "value": value, "low": low, "high": high, "of_the_run": before}
    return {
        "metrics": rows,
        "images": found["images"],
        "broken_images": found["broken_images"],
        "intervals": intervals,
        "stored": "matrices and convolutions in float16, the rest in float32"
        if packing.half
        else "in float32",
        **predictions,
    }


def _check_metrics(run: LoadedRun, evaluation: Mapping[str, Any]) -> None:
    """Raise UserError where the metrics of the packed weights are not those of the run."""
    for row in evaluation["metrics"].values():
        if abs(row["value"] - row["of_the_run"]) > TOLERANCE:
            raise UserError(
                f"{run.source}: the run's {row['label']} is {100 * row['of_the_run']:.2f} %, "
                f"that of what would be packed {100 * row['value']:.2f} %"
            )


def _first_weights(run: LoadedRun) -> dict[str, Any] | None:
    """The name of what the training began with, if anything, and of a finished run how it was made."""
    source = run.recipe.model.init_from
    if source is None:
        return None
    first = {"name": Path(source).name}
    if (Path(source) / RESULTS).is_file():
        results = read_json(Path(source) / RESULTS)
        first |= {key: results[key] for key in ("epochs", "steps", "seconds")}
        first["command"] = without_folders(results["command"])
    return first


class Predictions(ClassificationMetrics):
    """A classifier's metrics, with the label and the most probable class of every image."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.labels: list[int] = []
        self.predicted: list[int] = []

    def update(self, network: Any, images: Tensor, targets: Tensor) -> None:
        """Add images (B, 3, H, W) with labels (B,)."""
        logits = network(images)
        super().update(cast(nn.Module, lambda _: logits), images, targets)
        self.labels += targets.tolist()
        # Of equal ones that of the metrics.
        best = logits.float().topk(min(5, logits.shape[1])).indices
        self.predicted += best[:, 0].tolist()

    def compute(self) -> dict[str, Any]:
        """The metrics, `labels` and `predicted`, in the order of the images."""
        return {**super().compute(), "labels": self.labels, "predicted": self.predicted}


class LeftOut:
    """A task's metrics over all batches and, as `left_out`, without each of n parts (every n-th batch)."""

    def __init__(self, task: Task, data: Any, parts: int) -> None:
        self.whole: Any = task.metrics(data)
        self.parts: list[Any] = [task.metrics(data) for _ in range(parts)]
        self.batches = 0

    @property
    def remarks(self) -> list[str]:
        """What the task's metrics say beside their numbers."""
        return list(self.whole.remarks)

    def update(self, network: Any, images: Any, targets: Any) -> None:
        """Add one batch to the total and to all parts but one; the network runs once."""
        outputs: list[Any] = []

        def record(given: Any) -> Any:
            outputs.append(network(given))
            return outputs[-1]

        self.whole.update(record, images, targets)
        for number, part in enumerate(self.parts):
            if number != self.batches % len(self.parts):
                replay = iter(outputs)
                part.update(lambda _, replay=replay: next(replay), images, targets)
        self.batches += 1

    def compute(self) -> dict[str, Any]:
        """The task's metrics and `left_out`; UserError if there are fewer batches than parts."""
        if self.batches < len(self.parts):
            expected = f"at least {len(self.parts)} batches of validation images"
            raise UserError(f"data.batch_size: expected {expected}, got {self.batches}")
        return {**self.whole.compute(), "left_out": [part.compute() for part in self.parts]}


def _evaluate_plan(packed: Path, packing: Packing, keys: Iterable[str]) -> dict[str, Any]:
    """The plan's own figures, and the headline metrics of the packed weights with the plan."""
    run = load_run(packed)
    about = apply_plan(run.network, str(packing.plan)).to_json()
    layers = about.pop("layers")
    found = evaluate(run, packing.overrides)
    return {
        **about,
        "grouped": sum(layer["choice"] == "groups" for layer in layers),
        "attentions": len(layers),
        "metrics": {key: found[key] for key in keys},
    }


def to_half(value: Tensor) -> Tensor:
    """A tensor in half precision. Raises UserError if float16 cannot represent it."""
    if value.dim() not in MATRICES or not value.is_floating_point():
        return value
    half = value.half()
    if not half.isfinite().all():
        raise UserError("half: the weights hold numbers that float16 cannot: leave --half out")
    return half


def without_folders(text: str) -> str:
    """A text with absolute paths reduced to their last part, so that no user folders are published."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\"=,]+/)+", "", text)
