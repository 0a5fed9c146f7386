"""From a recipe to a trained model: build the parts, hand them to Lightning's Trainer, write down what came out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from dgt.data.decoding import BrokenImagesError
from dgt.tasks import TASKS
from dgt.tasks.optim import batch_scale
from dgt.training.callbacks import CheckpointRecord, WeightEma, ema_decay, progress_callbacks
from dgt.training.checkpoints import initialize
from dgt.training.files import write_json, write_whole
from dgt.training.parallel import (
    BrokenImagesOfAll,
    build_strategy,
    full_weights,
    synchronise_batchnorm,
    task_class,
    telling_lost_processes,
)
from dgt.training.recipe import Recipe, TrainerSettings, build_data
from dgt.training.runs import choose_run_folder, environment, export_model, make_record

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


def fit(recipe: Recipe) -> Result:
    """Train a recipe from its first step to its last and write the run's folder.

    Args:
        recipe: complete and checked, from `load_recipe`.

    Raises:
        FileNotFoundError: the data or `model.init_from` is not there.
        FileExistsError: `out` holds a run that got as far as a checkpoint, or files of something else.
        NotADirectoryError: `out` is a file.
        ValueError: the model or the data cannot be built as the recipe says.
        BrokenImagesError: more images are unreadable than `data.max_broken_share` allows; the run's folder lists them.
        FloatingPointError: the loss, or what the attention is given, is no longer a number.
    """
    row = TASKS[recipe.task]
    folder = choose_run_folder(recipe) if getattr(rank_zero_only, "rank", 0) == 0 else Path(recipe.out or "runs")
    pl.seed_everything(recipe.seed, workers=True, verbose=False)
    data = build_data(recipe)
    data.setup("fit")
    network = row.build(recipe.model, data.num_classes, recipe.data["image_size"])
    if recipe.model.init_from is not None:
        initialize(network, recipe.model.init_from)
    record = make_record(recipe, data.class_names)
    trainer, global_batch = build_trainer(recipe, folder, record, data)
    if recipe.trainer.sync_batchnorm:
        network = synchronise_batchnorm(network, trainer.strategy.root_device)
    task_type = task_class(row.task, recipe.trainer.strategy)
    task = task_type(network, data.num_classes, recipe.optimizer, recipe.schedule, global_batch)
    if recipe.trainer.compile:
        network.compile()
    if trainer.is_global_zero:
        write_whole(folder / "recipe.yaml", recipe.to_yaml())
        (folder / BROKEN_IMAGES).unlink(missing_ok=True)  # of an earlier try
    start = time.perf_counter()
    with warnings.catch_warnings():
        _ignore_expected_warnings()
        with _telling_divergence(), telling_lost_processes(), _listing_broken_images(data, folder, trainer.global_rank):
            trainer.fit(task, datamodule=data)
            seconds = time.perf_counter() - start
            if trainer.current_epoch % recipe.trainer.check_val_every or recipe.schedule.steps is not None:
                trainer.validate(task, datamodule=data, verbose=False)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    metrics = {key.removeprefix("val/"): value for key, value in logged.items() if key.startswith("val/")}
    weights = full_weights(network)
    result = Result(trainer.strategy.broadcast(folder), metrics, trainer.current_epoch, seconds)
    if trainer.is_global_zero:
        export_model(folder / "model", network, record, weights)
        write_json(folder / "results.json", _results(result, recipe, trainer, global_batch, network, data))
        if any(data.ledgers.values()):
            data.write_broken_images(folder / BROKEN_IMAGES)
    return result


def build_trainer(recipe: Recipe, folder: Path, record: dict[str, Any], data: Any) -> tuple[pl.Trainer, int]:
    """The recipe's Trainer with its loggers and callbacks, and the images per optimizer step.

    Args:
        recipe: the complete recipe.
        folder: the run's folder.
        record: put into every checkpoint.
        data: the data module, set up; its batches are those of one device.

    Raises:
        ValueError: devices, strategy or precision that this machine does not have; fewer images than one batch.
    """
    settings = recipe.trainer
    row = TASKS[recipe.task]
    callbacks = [
        *progress_callbacks(row.summary),
        BrokenImagesOfAll(),
        CheckpointRecord(record),
        *_checkpoints(folder, row.monitor),
    ]
    trainer = make_trainer(
        settings,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=build_strategy(settings.strategy),
        accumulate_grad_batches=settings.accumulate,
        check_val_every_n_epoch=settings.check_val_every,
        deterministic=settings.deterministic,
        benchmark=not settings.deterministic,
        gradient_clip_val=recipe.optimizer.clip_grad,
        max_epochs=recipe.schedule.epochs if recipe.schedule.steps is None else -1,
        max_steps=recipe.schedule.steps or -1,
        logger=[CSVLogger(folder, "", ""), TensorBoardLogger(folder, "", "", default_hp_metric=False)],
        callbacks=callbacks,
        log_every_n_steps=min(20, len(data.train_dataloader())),
        num_sanity_val_steps=0,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
    )
    global_batch = data.batch_size * trainer.world_size * settings.accumulate
    if recipe.ema.decay is not None:
        trainer.callbacks.insert(0, WeightEma(ema_decay(recipe.ema.decay, global_batch)))  # type: ignore[attr-defined]
    return trainer, global_batch


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


def _checkpoints(folder: Path, monitor: str) -> list[Callback]:
    """Keep the best epoch and the last one: two callbacks, since `save_last` skips epochs that are not the best."""
    place: dict[str, Any] = {"dirpath": folder / "checkpoints", "enable_version_counter": False}
    best = ModelCheckpoint(**place, filename="best", monitor=monitor, mode="max")
    last = ModelCheckpoint(**place, filename="last", save_on_train_epoch_end=True, save_on_exception=True)
    return [best, last]


def choose_precision(settings: TrainerSettings) -> Any:
    """Lightning's precision: the recipe's; auto is bf16-mixed on a GPU that has it and 32-true elsewhere."""
    if settings.precision != "auto":
        return settings.precision
    on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"


@contextmanager
def _telling_divergence() -> Iterator[None]:
    """Turn the attention's refusal of NaN, which here comes of the weights, into what it means for a training.

    Raises:
        FloatingPointError: in its place.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(("query must be free of NaN", "key must be free of NaN")):
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
    best = getattr(trainer.checkpoint_callback, "best_model_score", None)
    return {
        "recipe": recipe.name,
        "task": recipe.task,
        "model": recipe.model.name,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "metrics": result.metrics,
        "best": None if best is None else float(best),
        "epochs": result.epochs,
        "steps": trainer.global_step,
        "seconds": round(result.seconds, 2),
        "seed": recipe.seed,
        "global_batch": global_batch,
        "learning_rate": recipe.optimizer.lr * batch_scale(recipe.optimizer, global_batch),
        "precision": str(trainer.precision),
        "broken_images": sum(len(ledger) for ledger in data.ledgers.values()),
        **environment(),
    }
