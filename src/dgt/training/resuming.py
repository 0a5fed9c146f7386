"""Going on with a training that was stopped: is it the same training, and from which checkpoint.

The same command line started again, with `--resume auto`, begins where there is nothing yet, goes on where a run was
stopped, and says so where it is finished. A recipe that differs in what the weights depend on is refused.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from dgt.training.files import write_whole
from dgt.training.loggers import table_text
from dgt.training.recipe import Recipe, load_recipe
from dgt.training.runs import check_folder, is_run
from dgt.training.saving import step_checkpoints
from dgt.training.storage import read_checkpoint

RESULTS = "results.json"
METRICS = "metrics.csv"

# What may change between a stop and its resumption: places, speed, and how much is put up with or looked at.
# A change of the number of processes is found when the checkpoint is opened.
FREE = (
    *("name", "out", "checkpoint", "data.root", "data.num_workers", "data.cache", "data.max_broken_share"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.check_val_every"),
    *("trainer.max_skipped", "trainer.pictures_every", "trainer.compile"),
)


@dataclass(frozen=True)
class Place:
    """Where a training goes on.

    Args:
        checkpoint: the file.
        step: optimizer steps taken.
        epoch: epochs completed.
        world_size: processes that trained.
    """

    checkpoint: Path
    step: int
    epoch: int
    world_size: int


def run_to_resume(recipe: Recipe) -> Path | None:
    """The folder of the recipe's run (`out`, or runs/NAME), if it holds one that began.

    Raises:
        FileExistsError: the folder holds files of something else, or the run of another recipe.
        NotADirectoryError: `out` is a file.
    """
    folder = Path(recipe.out) if recipe.out is not None else Path("runs") / recipe.name
    check_folder(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not is_run(folder):
        raise FileExistsError(f"{folder} holds files that are not a run's: give another folder with --out")
    if not step_checkpoints(folder) and not (folder / RESULTS).exists():
        return None
    there, asked = (dict(_leaves(each.to_dict())) for each in (load_recipe(folder / "recipe.yaml"), recipe))
    for key in sorted({*there, *asked}):
        if there.get(key) != asked.get(key) and not _is_free(key):
            raise FileExistsError(
                f"{folder} was begun with {key} {there.get(key)!r}, now {asked.get(key)!r} is asked for: give the "
                "same, or another folder with --out"
            )
    return folder


def newest_place(folder: Path) -> Place | None:
    """The newest checkpoint of a run that is whole; damaged ones are told on standard error and left alone.

    Args:
        folder: the run's folder.

    Returns:
        None where the run has none yet.

    Raises:
        ValueError: there are some, and all are damaged.
    """
    paths = step_checkpoints(folder)
    for path in paths:
        try:
            stored = _head(path)
            loops = stored["loops"]["fit_loop"]["epoch_progress"]["current"]
            return Place(path, int(stored["global_step"]), int(loops["processed"]), int(stored["world_size"]))
        except (ValueError, KeyError, OSError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            print(f"dgt: warning: {path.name} cannot be used, trying the one before: {reason}", file=sys.stderr)
    if paths:
        raise ValueError(
            f"all {len(paths)} checkpoints in {paths[0].parent} are damaged: remove that folder to begin again"
        )
    return None


def finished_results(folder: Path) -> dict[str, Any] | None:
    """What `results.json` of a run says; None where the run is not finished.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / RESULTS
    if not path.is_file():
        return None
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return results


def go_on(trainer: Trainer, place: Place, folder: Path, say: Callable[[str], None]) -> None:
    """Check that as many processes train as before, tell from where, and keep what the loggers wrote up to `place`.

    Args:
        trainer: not used so far.
        place: from `newest_place`.
        folder: the run's folder.
        say: tells the user a sentence, in the run's log as well.

    Raises:
        ValueError: another number of processes, which would share out the images in another way.
    """
    if trainer.world_size != place.world_size:
        raise ValueError(
            f"{folder} was trained by {place.world_size} processes, now there are {trainer.world_size}: set "
            "trainer.devices and trainer.num_nodes as before"
        )
    say(f"resumed after step {place.step} (epochs complete: {place.epoch}) from {place.checkpoint.name}")
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, CSVLogger) and (folder / METRICS).is_file():
            _continue_csv(logger, folder / METRICS, place.step)


def _continue_csv(logger: CSVLogger, path: Path, step: int) -> None:
    """Keep the rows before a step, which Lightning would begin anew."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        rows = [row for row in reader if (row.get("step") or "").isdigit() and int(row["step"]) < step]
    writer = logger.experiment  # it removes the file
    write_whole(path, table_text(names, rows))
    writer.metrics_keys = names


def _head(path: Path) -> dict[str, Any]:
    """What a checkpoint holds beside weights; a folder of a sharded one is complete once it has its name."""
    if not path.is_dir():
        return read_checkpoint(path)
    return read_checkpoint(path / "meta.pt")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)
