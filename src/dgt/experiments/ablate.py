"""Ablations: every row of a table trained with several seeds by one recipe, and the table they make.

```
OUT/runs/ROW/seed-N/      the run of one row and seed, as `dgt.training.fit` writes it
OUT/table.json, .md       what is trained so far; both written anew after every run
```

A run is finished when its `results.json` is there, or `diverged.json`, which keeps the error of a training whose steps
were no longer finite. The same command started again, after any end of the first one, keeps finished runs, goes on with
the unfinished one and ends with the same table.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from dgt.experiments.report import DIAGNOSIS, alone, write_table
from dgt.experiments.tables import Row, Table, load_table
from dgt.models import diagnose
from dgt.tasks import TASKS
from dgt.training import fit, load_run
from dgt.training.recipe import Recipe, build_data, load_recipe, override_keys
from dgt.training.run import RESULTS, check_folder, is_run, run_folder
from dgt.utils.atomic_write import write_json
from dgt.utils.errors import UserError, check_range

DIVERGED = "diverged.json"
DIAGNOSED_IMAGES = 256
CHOSEN_HERE = {"seed": "--seeds chooses the seeds", "out": "--out is the table's folder", "name": "the rows name them"}


class PlannedRun(NamedTuple):
    """One row with one seed, its complete recipe and the run's folder."""

    row: Row
    recipe: Recipe
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return (self.folder / RESULTS).is_file() or (self.folder / DIVERGED).is_file()


def ablate(
    table: str | Path,
    overrides: Sequence[str] = (),
    seeds: int = 3,
    out: str | Path | None = None,
    size: str | None = None,
) -> Path:
    """Train the rows of a table, as far as that is not done yet, and write the table.

    All rows are trained with the first seed before any is with the second, so that the table is whole early.

    Args:
        table: name of a shipped table, or path of a YAML file.
        overrides: changes of the recipe for all rows, as on the command line: `["--data.root", "images"]`.
        seeds: number of seeds, from 0 on.
        out: the table's folder; None for runs/ablate-TABLE-SIZE.
        size: which of the table's sizes; None for its first.

    Returns:
        The table's folder.

    Raises:
        FileNotFoundError: no such table, or the data is not there.
        FileExistsError: the folder holds runs with other settings, or files of something else, or another process is
            at work in it.
        NotADirectoryError: the folder is a file.
        UserError: a number of seeds below 1, a key that the table sets, or what `load_table` and `fit` refuse.
        BrokenImagesError: as `fit`.
    """
    check_range(1, seeds=seeds)
    chosen = load_table(table, size)
    folder = Path(out) if out is not None else Path("runs") / f"ablate-{chosen.name}-{chosen.size}"
    check_folder(folder)
    runs = _plan(chosen, overrides, seeds, folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "runs").is_dir():
        raise FileExistsError(f"{folder} holds files that are not a table's: give another folder with --out")
    for run in runs:
        if is_run(run.folder):
            run_folder(run.recipe, resume=True)  # raises where other settings began it
    with alone(folder / "runs"):
        for number, run in enumerate(runs, 1):
            if not run.finished:
                print(f"[{number}/{len(runs)}] {run.row.name}, seed {run.recipe.seed}", flush=True)
                _train(run)
            if chosen.diagnose and not (run.folder / DIVERGED).exists():
                _diagnose(run.folder)
            write_table(folder, chosen, [(each.row, each.folder) for each in runs if each.finished])
    return folder


def _plan(table: Table, overrides: Sequence[str], seeds: int, folder: Path) -> list[PlannedRun]:
    """The runs of a table in their order; every model is built once, to see that it can.

    Raises:
        UserError: a key that the table, or this command, sets itself.
    """
    own = {key for row in table.rows for key in (*table.common, *row.changes)}
    for key in sorted(override_keys(overrides)):
        if key in CHOSEN_HERE:
            raise UserError(f"recipe key {key!r} cannot be changed for a table: {CHOSEN_HERE[key]}")
        if key in own:
            raise UserError(f"recipe key {key!r} cannot be changed for table {table.name!r}: its rows set it")
    recipes = [load_recipe(table.recipe, [*overrides, *table.overrides(row)]) for row in table.rows]
    for recipe in recipes:
        TASKS[recipe.task].build(recipe.model, 2, recipe.data["image_size"])
    runs = []
    for seed in range(seeds):
        for row, recipe in zip(table.rows, recipes, strict=True):
            place = folder / "runs" / row.slug / f"seed-{seed}"
            runs.append(PlannedRun(row, replace(recipe, seed=seed, out=str(place)), place))
    return runs


def _train(run: PlannedRun) -> None:
    """Train one run, from where it was stopped on; a divergence is its result."""
    if run.folder.exists() and not is_run(run.folder):
        shutil.rmtree(run.folder)  # stopped while its first file was written
    try:
        fit(run.recipe, resume=True)
    except FloatingPointError as error:
        write_json(run.folder / DIVERGED, {"error": str(error)})


def _diagnose(folder: Path) -> None:
    """Measure groups and selection of a finished run on its first validation images, unless that is done."""
    if (folder / DIAGNOSIS).is_file():
        return
    run = load_run(folder)
    data = build_data(run.recipe)
    data.setup("validate")
    batches = islice(data.val_dataloader(), -(-DIAGNOSED_IMAGES // data.batch_size))
    blocks = diagnose(run.network, torch.cat([batch[0] for batch in batches])[:DIAGNOSED_IMAGES])
    write_json(folder / DIAGNOSIS, [block._asdict() for block in blocks])
