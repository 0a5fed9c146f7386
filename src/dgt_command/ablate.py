"""Ablations: train every row of a table with several seeds and one recipe, and write the table.

```
OUT/runs/ROW/seed-N/      the run of one row and seed, as `dgt.training.fit` writes it
OUT/table.json, .md       the results so far; both are rewritten after every run
```

A run is finished when its `results.json` is there, or `diverged.json`, which keeps the error of a
training whose steps were no longer finite. The same command started again, after any end of the
first one, keeps finished runs, continues the unfinished one and ends with the same table.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dgt.models import cost, diagnose
from dgt.runs import load_run
from dgt.runs.folder import RESULTS, check_folder, is_run, run_folder
from dgt.runs.recipe import Recipe, build_data, changes_of, load_recipe
from dgt.runs.settings import plain_values
from dgt.tasks import TASKS
from dgt.training import fit
from dgt.utils.atomic_write import atomic_write, exclusive_lock, write_json
from dgt.utils.errors import UserError, check_range
from dgt.utils.json_files import read_json
from dgt.utils.records import markdown_table, number
from dgt_command.tables import Row, Table, load_table

DIVERGED, DIAGNOSIS = "diverged.json", "diagnosis.json"
DIAGNOSED_IMAGES = 256
MEASURES = {  # of `diagnose`, means over the blocks where k is below the number of tokens
    "selected": "mass on selected keys",
    "random": "on random keys",
    "window": "on a window",
    "best_for_all": "best k for all",
    "best_for_group": "best k of the group",
    "best_for_query": "best k of the query",
    "perplexity": "perplexity of groups",
}
CHOSEN_HERE = ("seed", "out", "name")
ALONE: dict[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto"}


class PlannedRun(NamedTuple):
    """One row with one seed, its complete recipe and the run's folder."""

    row: Row
    recipe: Recipe
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return (self.folder / RESULTS).is_file() or (self.folder / DIVERGED).is_file()

    @property
    def diagnosed(self) -> bool:
        """Whether nothing is left to diagnose."""
        return (self.folder / DIAGNOSIS).exists() or (self.folder / DIVERGED).exists()


def ablate(
    table: str | Path,
    overrides: Sequence[str] = (),
    seeds: int = 3,
    out: str | Path | None = None,
    size: str | None = None,
) -> Path:
    """Train the rows of a table that are not trained yet, and write the table.

    All rows are trained with the first seed before any is with the second, so that the table is complete early.

    Args:
        table: name of a shipped table, or path of a YAML file.
        overrides: changes of the recipe for all rows, as on the command line: `["--data.root",
            "images"]`.
        seeds: number of seeds, from 0 on.
        out: the table's folder, which is returned; None for runs/ablate-TABLE-SIZE.
        size: which of the table's sizes; None for its first.

    Raises:
        UserError: a number of seeds below 1, a key that the table sets, or what `load_table` and
            `fit` refuse.
        OSError: no such table or data; a folder with other runs or files, or another process at
            work in it.
    """
    check_range(1, seeds=seeds)
    chosen = load_table(table, size)
    folder = Path(out) if out is not None else Path("runs") / f"ablate-{chosen.name}-{chosen.size}"
    check_folder(folder)
    runs = _plan(chosen, overrides, seeds, folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "runs").is_dir():
        raise FileExistsError(
            f"{folder} contains files that do not belong to a table: choose another folder with --out"
        )
    for run in runs:
        if is_run(run.folder):
            run_folder(run.recipe, resume=True)  # raises where other settings began it
    with exclusive_lock(folder / "runs"):
        for nth, run in enumerate(runs, 1):
            if not run.finished:
                print(f"[{nth}/{len(runs)}] {run.row.name}, seed {run.recipe.seed}", flush=True)
                _train(run)
            if chosen.diagnose and not run.diagnosed:
                _diagnose(run.folder)
            write_table(folder, chosen, [(each.row, each.folder) for each in runs if each.finished])
    return folder


def _plan(table: Table, overrides: Sequence[str], seeds: int, folder: Path) -> list[PlannedRun]:
    """The runs of a table in their order, each of one process, every model built once.

    UserError for a key that is not free, several processes, or a diagnosis of what is no
    classifier.
    """
    fixed = {*CHOSEN_HERE, *table.common}.union(*(row.changes for row in table.rows))
    free = changes_of(overrides)
    if taken := sorted(fixed & free.keys()):
        why = f"cannot be changed for table {table.name!r}: it is set by the rows, --seeds or --out"
        raise UserError(f"recipe key {taken[0]!r} {why}")
    recipes = [load_recipe(table.recipe, {**free, **table.changes(row)}) for row in table.rows]
    for recipe in recipes:
        # Fabric would start this command again for every other process
        for key, one in ALONE.items():
            if (asked := getattr(recipe.trainer, key)) not in (one, "auto"):
                raise UserError(
                    f"trainer.{key} must be {one}, since one process trains each row of a table, got {asked!r}"
                )
        task = TASKS[recipe.task]
        # raises where the row's model cannot be built
        task.build(recipe.model, 2, recipe.data.image_size)
        if table.diagnose and task.has_backbone:
            why = "must be false unless the recipe's task is classification"
            raise UserError(f"diagnose of table {table.name!r} {why}, got {recipe.task!r}")
    runs = []
    for seed in range(seeds):
        for row, recipe in zip(table.rows, recipes, strict=True):
            place = folder / "runs" / row.slug / f"seed-{seed}"
            trainer = replace(recipe.trainer, **ALONE)
            runs.append(
                PlannedRun(row, replace(recipe, seed=seed, out=str(place), trainer=trainer), place)
            )
    return runs


def _train(run: PlannedRun) -> None:
    """Train one run, or resume it; a divergence is its result."""
    if run.folder.exists() and not is_run(run.folder):
        shutil.rmtree(run.folder)  # stopped while its first file was written
    try:
        fit(run.recipe, resume=run.folder.exists())
    except FloatingPointError as error:
        write_json(run.folder / DIVERGED, {"error": str(error)})


def _diagnose(folder: Path) -> None:
    """Measure groups and selection of a finished run on its first validation images."""
    run = load_run(folder)
    data = build_data(run.recipe)
    data.setup("validate")
    batches = islice(data.val_dataloader(), -(-DIAGNOSED_IMAGES // data.batch_size))
    blocks = diagnose(run.network, torch.cat([batch[0] for batch in batches])[:DIAGNOSED_IMAGES])
    write_json(folder / DIAGNOSIS, [block._asdict() for block in blocks])


def write_table(folder: Path, table: Table, runs: Sequence[tuple[Row, Path]]) -> None:
    """Write `table.json` and `table.md`, each whole, of the finished runs: row and folder, in any
    order.
    """
    recipe = load_recipe(runs[0][1] / "recipe.yaml")
    metric, label = next(iter(TASKS[recipe.task].headline.items()))
    folders = {row.name: [place for other, place in runs if other == row] for row in table.rows}
    content = {
        "table": table.name,
        "title": table.title,
        "size": table.size,
        "recipe": table.recipe,
        "metric": metric,
        "paper": table.paper,
        "column": table.column,
        "rows": [
            _row(table, row, folders[row.name], metric) for row in table.rows if folders[row.name]
        ],
    }
    write_json(folder / "table.json", content)
    atomic_write(folder / "table.md", markdown(content, label))


def _row(table: Table, row: Row, folders: Sequence[Path], metric: str) -> dict[str, Any]:
    """One row: its settings, one entry a seed, mean and spread over those that did not diverge."""
    done = [place for place in folders if (place / RESULTS).is_file()]
    results = [read_json(place / RESULTS) for place in done]
    values = [result["metrics"][metric] for result in results]
    return {
        "name": row.name,
        "model": load_recipe(folders[0] / "recipe.yaml").model.name,
        "changes": plain_values(row.changes),
        "paper": row.paper,
        "parameters": results[0]["parameters"] if results else None,
        "flops": _flops(done[0]) if results else None,
        "mean": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "seconds": statistics.fmean(result["seconds"] for result in results) if results else None,
        "diverged": len(folders) - len(done),
        "measures": _measures(done) if table.diagnose else None,
        "runs": results,
    }


@cache
def _flops(run: Path) -> int | None:
    """FLOPs of a finished run's network; None for one with a head on its backbone."""
    loaded = load_run(run)
    side = loaded.recipe.data.image_size
    return (
        None if TASKS[loaded.recipe.task].has_backbone else cost(loaded.network, (side, side)).flops
    )


def _measures(folders: Sequence[Path]) -> dict[str, float] | None:
    """Means of the measures over seeds and blocks whose k leaves some keys out; None without such blocks."""
    files = [place / DIAGNOSIS for place in folders if (place / DIAGNOSIS).is_file()]
    blocks = [
        block
        for file in files
        for block in json.loads(file.read_bytes())
        if block["top_k"] < block["tokens"]
    ]
    values_of = {name: [block.get(name) for block in blocks] for name in MEASURES}
    return (
        {name: statistics.fmean(values) for name, values in values_of.items() if None not in values}
        if blocks
        else None
    )


def markdown(content: Mapping[str, Any], label: str) -> str:
    """The content of `table.json` as a page of Markdown.

    `label` is the metric's human-readable name.
    """
    measured = [
        name for name in MEASURES if any(name in (row["measures"] or {}) for row in content["rows"])
    ]
    heads = [
        "",
        "parameters, M",
        "GFLOPs",
        f"{label}, %",
        "seeds",
        "minutes",
        *(MEASURES[name] for name in measured),
    ]
    heads += [f"{content['column']}, %"] if content["paper"] else []
    rows = []
    for row in content["rows"]:
        cells = [
            row["name"],
            number(row["parameters"], 3, 1e-6),
            number(row["flops"], 3, 1e-9),
            _score(row),
        ]
        cells += [str(len(row["runs"]) + row["diverged"]), number(row["seconds"], 1, 1 / 60)]
        cells += [
            number((row["measures"] or {}).get(name), 1 if name == "perplexity" else 3)
            for name in measured
        ]
        rows.append(cells + ([number(row["paper"], 1)] if content["paper"] else []))
    return f"# {content['title']}\n\n{_caption(content)}\n\n{markdown_table(heads, rows)}"


def _caption(content: Mapping[str, Any]) -> str:
    """The training settings, the hardware, and the source of the paper's numbers."""
    text = f"Recipe `{content['recipe']}`, size {content['size']}; mean ± standard deviation over seeds."
    text += " FLOPs count a multiply-add as one."
    for run in [run for row in content["rows"] for run in row["runs"]][:1]:
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "timm"))
        text += f" {run['epochs']} epochs, {run['steps']} steps; {run['device']}; {versions}."
        text += f"\nCommand: `{run['command']}`."
    if content["paper"]:
        text += f"\nThe column {content['column']}: {content['paper']}; from different trainings."
    return text


def _score(row: Mapping[str, Any]) -> str:
    score = number(row["mean"], 2, 100, row["spread"])
    if not row["diverged"]:
        return score
    diverged = f"{row['diverged']} diverged"
    return diverged if row["mean"] is None else f"{score} ({diverged})"
