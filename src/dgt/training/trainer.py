"""Lightning's Trainer as a recipe states it, with everything that stands beside the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dgt.tasks import TASKS
from dgt.training.callbacks import CheckpointRecord, EpochReport, WeightEma, ema_decay
from dgt.training.finite import FiniteSteps
from dgt.training.loggers import Board, MetricsTable
from dgt.training.parallel import BrokenImagesOfAll, build_strategy
from dgt.training.progress import Journal, Pace, StepLimit, progress_callbacks
from dgt.training.randomness import StepSeeds
from dgt.training.recipe import Recipe, TrainerSettings
from dgt.training.resuming import Place
from dgt.training.saving import RunCheckpoints
from dgt.training.storage import SafeCheckpointIO

Kind = TypeVar("Kind", bound=Callback)


def build_trainer(
    recipe: Recipe, folder: Path, record: dict[str, Any], data: Any, journal: Journal, place: Place | None = None
) -> tuple[pl.Trainer, int]:
    """The recipe's Trainer with its loggers and callbacks, and the images per optimizer step.

    Args:
        recipe: the complete recipe.
        folder: the run's folder.
        record: put into every checkpoint.
        data: the data module, set up; its batches are those of one device.
        journal: the run's log.
        place: where the training goes on; None where it begins.

    Raises:
        ValueError: devices, strategy or precision that this machine does not have; fewer images than one batch.
    """
    settings = recipe.trainer
    io = SafeCheckpointIO()
    trainer = make_trainer(
        settings,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=build_strategy(settings.strategy),
        plugins=[io],
        accumulate_grad_batches=settings.accumulate,
        check_val_every_n_epoch=settings.check_val_every,
        deterministic=settings.deterministic,
        benchmark=not settings.deterministic,
        gradient_clip_val=recipe.optimizer.clip_grad,
        max_epochs=recipe.schedule.epochs if recipe.schedule.steps is None else -1,
        logger=[
            MetricsTable(folder, "", ""),
            Board(folder, "", "", default_hp_metric=False, purge_step=place and place.step),
        ],
        callbacks=[],
        enable_checkpointing=False,
        log_every_n_steps=min(20, len(data.train_dataloader())),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
    )
    batch = data.batch_size * trainer.world_size
    add_callbacks(trainer, _callbacks(recipe, folder, record, journal, io, batch))
    return trainer, batch * settings.accumulate


def _callbacks(
    recipe: Recipe, folder: Path, record: dict[str, Any], journal: Journal, io: SafeCheckpointIO, batch: int
) -> list[Callback]:
    """What stands beside the loop, in the order it is called: a skipped step is undone before anything looks at it."""
    settings, row = recipe.trainer, TASKS[recipe.task]
    steps, pace = FiniteSteps(folder, settings.max_skipped), Pace(batch)
    callbacks: list[Callback] = [StepSeeds(recipe.seed), steps]
    if recipe.ema.decay is not None:
        callbacks.append(WeightEma(ema_decay(recipe.ema.decay, batch * settings.accumulate), steps))
    if recipe.schedule.steps is not None:
        callbacks.append(StepLimit(recipe.schedule.steps))
    callbacks += [*progress_callbacks(folder, pace), EpochReport(row.summary, journal.say, pace)]
    callbacks += [BrokenImagesOfAll(), CheckpointRecord(record)]
    return [*callbacks, RunCheckpoints(folder, recipe.checkpoint, row.monitor, steps, io, journal.say)]


def add_callbacks(trainer: pl.Trainer, callbacks: Sequence[Callback]) -> None:
    """Let a Trainer call these too; those that save stay the last."""
    every = [*trainer.callbacks, *callbacks]  # type: ignore[attr-defined]
    trainer.callbacks = sorted(every, key=lambda callback: isinstance(callback, Checkpoint))  # type: ignore[attr-defined]


def find_callback(trainer: pl.Trainer, kind: type[Kind]) -> Kind | None:
    """The Trainer's callback of a class; None where it has none."""
    return next((each for each in trainer.callbacks if isinstance(each, kind)), None)  # type: ignore[attr-defined]


def callback_of(trainer: pl.Trainer, kind: type[Kind]) -> Kind:
    """The Trainer's callback of a class, one that every training has."""
    return next(each for each in trainer.callbacks if isinstance(each, kind))  # type: ignore[attr-defined]


def make_trainer(settings: TrainerSettings, **options: Any) -> pl.Trainer:
    """A Trainer on the recipe's accelerator and in its precision.

    Args:
        settings: the recipe's section `trainer`.
        options: further arguments of Lightning's Trainer.

    Raises:
        ValueError: naming the section, where the machine has not what it asks for.
    """
    accelerator, precision = settings.accelerator, choose_precision(settings)
    try:
        return pl.Trainer(accelerator=accelerator, precision=precision, enable_model_summary=False, **options)
    except (ValueError, MisconfigurationException) as error:
        raise ValueError(f"recipe section 'trainer' does not fit this machine: {error}") from error


def choose_precision(settings: TrainerSettings) -> Any:
    """Lightning's precision: the recipe's; auto is bf16-mixed on a GPU that has it and 32-true elsewhere."""
    if settings.precision != "auto":
        return settings.precision
    on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
