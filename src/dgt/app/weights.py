"""`dgt weights make`: a finished run packed with its story. The format of such folders is `dgt.weights`' matter."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dgt.acceleration import apply_plan
from dgt.tasks import TASKS, Task
from dgt.training import LoadedRun, evaluate, load_run
from dgt.training.recipe import read_yaml
from dgt.training.run import RESULTS, export_model, make_record, read_json
from dgt.utils.atomic_write import atomic_write, replacing, write_json
from dgt.utils.errors import UserError
from dgt.weights.card import PARTS, about_data, card_text, jackknife, wilson
from dgt.weights.folder import CARD, MODEL, PLAN, STORY, SUMS, check_weights, write_sums

HALVED = (2, 4)  # dimensions of what is kept in half precision: matrices and convolutions, nearly all of a model
TOLERANCE = 0.00101  # how far a headline metric of the packed weights may be from the run's: a tenth of a point


def make_weights(
    run: str | Path,
    out: str | Path,
    half: bool = False,
    overrides: Sequence[str] = (),
    about: str | Path | None = None,
    plan: str | Path | None = None,
) -> Path:
    """Pack the folder of a finished run, measured as it is packed; `out` appears whole or not at all.

    Args:
        run: its folder.
        out: the folder to write, named ARCHITECTURE.TAG; an earlier folder of weights there is replaced.
        half: keep matrices and convolutions in float16.
        overrides: of the evaluation, as `evaluate` takes them.
        about: YAML file with what the card says of the data, as `dgt.weights.card.about_data` takes it.
        plan: file of `dgt accelerate` for this model, to measure with and to add.

    Raises:
        FileNotFoundError: no run there, or no such file; FileExistsError: `out` holds something else.
        UserError: the run is not finished, its data is not known, the packed weights do not reach its metrics, or the
            plan is not one for its model.
    """
    folder, out = Path(run), Path(out)
    loaded = load_run(folder)
    if not (folder / RESULTS).is_file():
        raise UserError(f"{folder} is not a finished run: it has no {RESULTS}")
    results = read_json(folder / RESULTS)
    if out.exists() and not (out / SUMS).is_file():
        raise FileExistsError(f"{out} is no earlier folder of weights: name another with --out")
    data, root = loaded.recipe.data, loaded.recipe.data["root"]
    described = read_yaml("description", about)[1] if about else None
    story = about_data([str(data.get("dataset")), loaded.recipe.name], described)
    if plan is not None:
        apply_plan(load_run(folder).network, plan)  # refused now rather than after the evaluation
    with replacing(out) as partial:
        state = {key: halved(value) if half else value for key, value in loaded.network.state_dict().items()}
        export_model(partial, loaded.network, make_record(loaded.recipe, loaded.class_names), state)
        results["evaluation"] = _measured(loaded, partial, overrides, results["metrics"], half)
        if plan is not None:
            results["evaluation"]["plan"] = _with_plan(partial, plan, overrides, results["evaluation"]["metrics"])
            shutil.copyfile(plan, partial / PLAN)
        recipe = replace(loaded.recipe, out=None, data={**data, "root": root and Path(root).name})
        export_model(partial, loaded.network, make_record(recipe, loaded.class_names), state)
        for name in STORY[:-1]:
            atomic_write(partial / name, without_folders((folder / name).read_text(encoding="utf-8")))
        write_json(partial / STORY[-1], results | {"command": without_folders(results["command"])})
        size, timm = (partial / MODEL[0]).stat().st_size, not hasattr(loaded.network, "backbone")
        atomic_write(partial / CARD, without_folders(card_text(out.name, results, story, timm, size)))
        write_sums(partial)
        check_weights(partial)
    return out


def _measured(
    run: LoadedRun, packed: Path, overrides: Sequence[str], trained: Mapping[str, float], half: bool
) -> dict[str, Any]:
    """The headline metrics of the packed weights with intervals; UserError where the run's were others."""
    task, rows = TASKS[run.recipe.task], {}
    told = evaluate(packed, overrides, metrics=None if task.shares else lambda data: LeftOut(task, data, PARTS))
    for key, label in task.headline.items():
        value, before = told[key], trained.get(key, told[key])
        if abs(value - before) > TOLERANCE:
            was, now = 100 * before, 100 * value
            raise UserError(f"{run.source}: the run's {label} is {was:.2f} %, that of what would be packed {now:.2f} %")
        left_out = [part[key] for part in told.get("left_out", ())]
        low, high = wilson(value, told["images"]) if key in task.shares else jackknife(value, left_out)
        rows[key] = {"label": label, "value": value, "low": low, "high": high, "of_the_run": before}
    found = {"metrics": rows, "images": told["images"], "broken_images": told["broken_images"]}
    found["intervals"] = "Wilson's intervals" if task.shares else f"a jackknife over {PARTS} parts of the images"
    return found | {"stored": "matrices and convolutions in float16, the rest in float32" if half else "in float32"}


class LeftOut:
    """A task's metrics of all batches and, as `left_out`, of all but every n-th in each of n parts."""

    def __init__(self, task: Task, data: Any, parts: int) -> None:
        self.whole: Any = task.metrics(data)
        self.parts: list[Any] = [task.metrics(data) for _ in range(parts)]
        self.batches = 0

    def update(self, network: Any, images: Any, targets: Any) -> None:
        """Add one batch to the whole, and to all parts but one; the network runs once."""
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

    def compute(self) -> dict[str, Any]:
        """As the task's, and `left_out`; UserError where there are fewer batches than parts."""
        if self.batches < len(self.parts):
            expected = f"at least {len(self.parts)} batches of validation images"
            raise UserError(f"data.batch_size: expected {expected}, got {self.batches}")
        return {**self.whole.compute(), "left_out": [part.compute() for part in self.parts]}


def _with_plan(packed: Path, plan: str | Path, overrides: Sequence[str], keys: Iterable[str]) -> dict[str, Any]:
    """What the plan says of itself, and the headline metrics of the packed weights with it."""
    run = load_run(packed)
    report = apply_plan(run.network, plan)
    told, rows = evaluate(run, overrides), report.to_json()
    layers = rows.pop("layers")
    rows |= {"grouped": sum(layer["choice"] == "groups" for layer in layers), "attentions": len(layers)}
    return rows | {"metrics": {key: told[key] for key in keys}}


def halved(value: Tensor) -> Tensor:
    """A tensor as it is kept in half precision. Raises UserError where float16 cannot hold it."""
    half = value.half() if value.dim() in HALVED and value.is_floating_point() else value
    if not half.isfinite().all():
        raise UserError("half: the weights hold numbers that float16 cannot: leave --half out")
    return half


def without_folders(text: str) -> str:
    """A text with the last part alone of every absolute path: a user's folders are nobody's matter."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\"=,]+/)+", "", text)


def weights_line(folder: str | Path, results: Mapping[str, Any]) -> str:
    """A line on a folder of weights that was checked: name, bytes, metrics, place."""
    rows, path = results["evaluation"]["metrics"].values(), Path(folder)
    told = "  ".join(f"{row['label']} {100 * row['value']:.2f} %" for row in rows)
    return f"{path.resolve().name:<28}{(path / MODEL[0]).stat().st_size / 1e6:>7.1f} MB  {told}  {path}"
