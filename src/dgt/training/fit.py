"""From a recipe to a trained model: build the parts, hand them to Lightning's Trainer, write down what came out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from dgt.data.image_io import BrokenImagesError
from dgt.tasks import TASKS, TrainingTask
from dgt.tasks.optim import batch_scale
from dgt.training.callbacks import EpochReport, WeightEma
from dgt.training.checkpoints import initialize
from dgt.training.files import write_json, write_whole
from dgt.training.finite import FiniteSteps, is_refusal
from dgt.training.loggers import quiet_writer_threads
from dgt.training.parallel import full_weights, synchronise_batchnorm, task_class, telling_lost_processes
from dgt.training.pictures import Draw, Pictures
from dgt.training.progress import Journal, Pace, StatusFile
from dgt.training.recipe import Recipe, build_data
from dgt.training.resuming import Place, finished_results, go_on, newest_place, run_to_resume
from dgt.training.runs import choose_run_folder, environment, export_model, make_record
from dgt.training.saving import RunCheckpoints
from dgt.training.trainer import add_callbacks, build_trainer, callback_of, find_callback

BROKEN_IMAGES = "broken_images.txt"


@dataclass(frozen=True)
class Result:
    """What a training came to.

    Args:
        folder: the run's folder.
        metrics: of the final model on the validation images, without the prefix `val/`; shares in [0, 1].
        epochs: epochs trained.
        seconds: wall time of the training.
    """

    folder: Path
    metrics: dict[str, float]
    epochs: int
    seconds: float


def fit(recipe: Recipe, resume: bool = False, draw: Draw | None = None) -> Result:
    """Train a recipe from its first step to its last and write the run's folder.

    Args:
        recipe: complete and checked, from `load_recipe`.
        resume: go on where a run in the same folder was stopped; what is finished is left as it is.
        draw: makes the pictures that `trainer.pictures_every` asks for; None for none.

    Raises:
        FileNotFoundError: the data or `model.init_from` is not there.
        FileExistsError: `out` holds a run that got as far as a checkpoint (with `resume`: one of another recipe), or
            files of something else.
        NotADirectoryError: `out` is a file.
        ValueError: the model or the data cannot be built as the recipe says; no checkpoint of the run can be read.
        BrokenImagesError: more images are unreadable than `data.max_broken_share` allows; the run's folder lists them.
        FloatingPointError: too many steps in a row were not finite.
        Preempted: a signal asked to stop, and all is saved (`Interrupted`: at once); unless caught, ends the process.
    """
    first = getattr(rank_zero_only, "rank", 0) == 0
    folder = run_to_resume(recipe) if resume else None
    if folder is not None and (results := finished_results(folder)) is not None:
        return Result(folder, results["metrics"], results["epochs"], results["seconds"])
    place = None if folder is None else newest_place(folder)
    if folder is None:
        folder = choose_run_folder(recipe, resume) if first else Path(recipe.out or "runs")
    pl.seed_everything(recipe.seed, workers=True, verbose=False)
    data = build_data(recipe)
    data.setup("fit")
    record = make_record(recipe, data.class_names)
    journal = Journal(folder if first else None)
    trainer, global_batch = build_trainer(recipe, folder, record, data, journal, place)
    task = _build_task(recipe, trainer, data, global_batch, place is None)
    if draw is not None:
        add_callbacks(trainer, [Pictures(draw, recipe, data, folder)])
    if trainer.is_global_zero:
        write_whole(folder / "recipe.yaml", recipe.to_yaml())
        (folder / BROKEN_IMAGES).unlink(missing_ok=True)  # of an earlier try
    with journal.noting_failure():
        metrics = _train(trainer, task, data, folder, place)
        weights = full_weights(task.network)
        seconds = callback_of(trainer, Pace).seconds
        result = Result(trainer.strategy.broadcast(folder), metrics, trainer.current_epoch, seconds)
        if trainer.is_global_zero:
            export_model(folder / "model", task.network, record, weights)
            write_json(folder / "results.json", _results(result, recipe, trainer, global_batch, task.network, data))
            if any(data.ledgers.values()):
                data.write_broken_images(folder / BROKEN_IMAGES)
            callback_of(trainer, StatusFile).write(trainer, "finished")
    return result


def _build_task(recipe: Recipe, trainer: pl.Trainer, data: Any, global_batch: int, fresh: bool) -> TrainingTask:
    """The recipe's network in its task, with its first weights where the training begins."""
    row = TASKS[recipe.task]
    network = row.build(recipe.model, data.num_classes, recipe.data["image_size"])
    if recipe.model.init_from is not None and fresh:
        initialize(network, recipe.model.init_from)
    if recipe.trainer.sync_batchnorm:
        network = synchronise_batchnorm(network, trainer.strategy.root_device)
    if recipe.trainer.compile:
        network.compile()
    task_type = task_class(row.task, recipe.trainer.strategy)
    return task_type(network, data.num_classes, recipe.optimizer, recipe.schedule, global_batch)


def _train(trainer: pl.Trainer, task: TrainingTask, data: Any, folder: Path, place: Place | None) -> dict[str, float]:
    """Train to the end, from `place` on, and validate; returns the metrics without the prefix `val/`."""
    with warnings.catch_warnings():
        _ignore_expected_warnings()
        if place is not None:
            go_on(trainer, place, folder, callback_of(trainer, RunCheckpoints).say)
        listing = _listing_broken_images(data, folder, trainer.global_rank)
        with _telling_divergence(), telling_lost_processes(), quiet_writer_threads(), listing:
            checkpoint = None if place is None else place.checkpoint
            trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            if (average := find_callback(trainer, WeightEma)) is not None:
                average.on_train_end(trainer, task)  # Lightning leaves it out where no step was left to do
            if callback_of(trainer, EpochReport).validated_step != trainer.global_step:
                trainer.validate(task, datamodule=data, verbose=False)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key.removeprefix("val/"): value for key, value in logged.items() if key.startswith("val/")}


@contextmanager
def _telling_divergence() -> Iterator[None]:
    """Turn the attention's refusal of NaN, which here comes of the weights, into what it means for a training.

    Raises:
        FloatingPointError: in its place.
    """
    try:
        yield
    except ValueError as error:
        if not is_refusal(error):
            raise
        raise FloatingPointError(
            "the training diverged, the attention met NaN: lower optimizer.lr or set optimizer.clip_grad"
        ) from error


@contextmanager
def _listing_broken_images(data: Any, folder: Path, rank: int) -> Iterator[None]:
    """Where unreadable images stop the run, list them in its folder first.

    Another process than the first writes under a name of its own, and into `recipe.out`, all it knows.

    Raises:
        BrokenImagesError: as it came.
    """
    try:
        yield
    except BrokenImagesError:
        name = BROKEN_IMAGES if rank == 0 else f"{Path(BROKEN_IMAGES).stem}.{rank}.txt"
        if folder.is_dir():
            data.write_broken_images(folder / name)
        raise


def _ignore_expected_warnings() -> None:
    """Lightning's hints that do not apply: our own folder is not empty, and the user chose the number of workers."""
    for message in (".*exists and is not empty.*", ".*does not have many workers.*", ".*number of training batches.*"):
        warnings.filterwarnings("ignore", message=message)


def _results(
    result: Result, recipe: Recipe, trainer: pl.Trainer, global_batch: int, network: nn.Module, data: Any
) -> dict[str, Any]:
    """What `results.json` says."""
    return {
        "recipe": recipe.name,
        "task": recipe.task,
        "model": recipe.model.name,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "metrics": result.metrics,
        "best": callback_of(trainer, RunCheckpoints).best,
        "epochs": result.epochs,
        "steps": trainer.global_step,
        "seconds": round(result.seconds, 2),
        "seed": recipe.seed,
        "global_batch": global_batch,
        "learning_rate": recipe.optimizer.lr * batch_scale(recipe.optimizer, global_batch),
        "precision": str(trainer.precision),
        "skipped_steps": callback_of(trainer, FiniteSteps).skipped,
        "broken_images": sum(len(ledger) for ledger in data.ledgers.values()),
        **environment(),
    }
