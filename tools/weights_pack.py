"""Pack a finished run: model, card, log, and checksums.

The format is that of `dgt.weights`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dgt.acceleration import apply_plan
from dgt.runs import LoadedRun, load_run
from dgt.runs.folder import RESULTS, read_json
from dgt.runs.model import export_model, make_record
from dgt.runs.recipe import read_yaml
from dgt.tasks import TASKS, Task
from dgt.training import evaluate
from dgt.utils.atomic_write import atomic_write, replacing, write_json
from dgt.utils.errors import UserError
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
    """

    half: bool = False
    overrides: Sequence[str] = ()
    about: str | Path | None = None
    plan: str | Path | None = None


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
    described = read_yaml("description", packing.about)[1] if packing.about else None
    story = about_data([str(loaded.recipe.data.get("dataset")), loaded.recipe.name], described)
    if packing.plan is not None:
        # checked before the evaluation, which takes long
        apply_plan(load_run(folder).network, packing.plan)
    state = loaded.network.state_dict()
    if packing.half:
        state = {key: to_half(value) for key, value in state.items()}
    with replacing(out) as partial:
        export_model(partial, loaded.network, make_record(loaded.recipe, loaded.class_names), state)
        evaluation = _evaluate(loaded, partial, packing, results["metrics"])
        if packing.plan is not None:
            evaluation["plan"] = _evaluate_plan(partial, packing, evaluation["metrics"])
            shutil.copyfile(packing.plan, partial / PLAN)
        results["evaluation"] = evaluation
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
    root = run.recipe.data["root"]
    data = {**run.recipe.data, "root": Path(root).name if root else root}
    return replace(run.recipe, out=None, data=data)


def _evaluate(
    run: LoadedRun, packed: Path, packing: Packing, trained: Mapping[str, float]
) -> dict[str, Any]:
    """The headline metrics of the packed weights with intervals.

    Raises UserError if the run's metrics differ.
    """
    task = TASKS[run.recipe.task]
    if task.shares:
        found = evaluate(packed, packing.overrides)
        intervals = "Wilson's intervals"
    else:
        found = evaluate(packed, packing.overrides, metrics=lambda data: LeftOut(task, data, PARTS))
        intervals = f"a jackknife over {PARTS} parts of the images"
    rows = {}
    for key, label in task.headline.items():
        value = found[key]
        before = trained.get(key, value)
        if abs(value - before) > TOLERANCE:
            was = f"the run's {label} is {100 * before:.2f} %"
            raise UserError(
                f"{run.source}: {was}, that of what would be packed {100 * value:.2f} %"
            )
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
    }


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
