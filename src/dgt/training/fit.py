"""From a recipe to a trained model: build the parts, hand them to the loop, write down what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric, seed_everything

from dgt.data.image_io import BrokenImagesError
from dgt.tasks import TASKS
from dgt.tasks.optim import batch_scale, build_optimizer
from dgt.training.ema import WeightAverage, ema_decay
from dgt.training.load import initialize
from dgt.training.log import QUIET, RunLog, StatusFile
from dgt.training.loop import Training
from dgt.training.objective import Objective
from dgt.training.parallel import SHARDED, build_fabric, explain_lost_processes, full_weights, synchronise_batchnorm
from dgt.training.pictures import Draw
from dgt.training.preemption import Interrupted
from dgt.training.recipe import Recipe, build_data
from dgt.training.run import (
    RESULTS,
    choose_run_folder,
    environment,
    export_model,
    finished_results,
    make_record,
    run_to_resume,
)
from dgt.training.state import Checkpoints, ResumePoint, TrainingState, latest_checkpoint
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import LOGGER, NonFiniteInput

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
        draw: makes the images that `trainer.pictures_every` asks for; None for none.

    Raises:
        FileNotFoundError: the data or `model.init_from` is not there.
        FileExistsError: `out` holds a run that got as far as a checkpoint (with `resume`: one of another recipe), or
            files of something else.
        NotADirectoryError: `out` is a file.
        ValueError: the model or the data cannot be built as the recipe says; no checkpoint of the run can be read.
        BrokenImagesError: more images are unreadable than `data.max_broken_share` allows; the run's folder lists them.
        FloatingPointError: too many steps in a row were not finite.
        LostProcess: another process of the training is gone.
        Preempted: a signal asked to stop, and all is saved (`Interrupted`: at once); unless caught, ends the process.
    """
    folder = run_to_resume(recipe) if resume else None
    if folder is not None and (results := finished_results(folder)) is not None:
        return Result(folder, results["metrics"], results["epochs"], results["seconds"])
    point = None
    if folder is None:
        folder = choose_run_folder(recipe, resume)
    else:
        with RunLog(None):
            point = latest_checkpoint(folder)
    data = build_data(recipe)
    data.setup("fit")
    fabric = build_fabric(recipe.trainer, TASKS[recipe.task])
    fabric.launch()  # from here on every process of the training is here; nothing was written before
    folder = fabric.broadcast(folder)
    with RunLog(folder if fabric.is_global_zero else None):
        return _fit(recipe, folder, fabric, data, point, draw)


def _fit(
    recipe: Recipe, folder: Path, fabric: Fabric, data: Any, point: ResumePoint | None, draw: Draw | None
) -> Result:
    """Train in a folder that is chosen, from `point` on."""
    record = make_record(recipe, data.class_names)
    if fabric.is_global_zero:
        atomic_write(folder / "recipe.yaml", recipe.to_yaml())
        (folder / BROKEN_IMAGES).unlink(missing_ok=True)  # of an earlier try
    status = StatusFile(folder if fabric.is_global_zero else None)
    listing = _listing_broken_images(data, folder, fabric)
    with _noting_failure(status), _explaining_divergence(), explain_lost_processes(), listing:
        global_batch = data.batch_size * fabric.world_size * recipe.trainer.accumulate
        state = build_state(recipe, fabric, data, global_batch, point is None)
        checkpoints = Checkpoints(folder, recipe.checkpoint, record, recipe.trainer.strategy == SHARDED)
        if fabric.is_global_zero:
            checkpoints.clean()
        if point is not None:
            checkpoints.load(state, point)
            place = f"step {point.step} (epochs complete: {point.epoch})"
            LOGGER.info(f"resumed after {place} from {point.checkpoint.name}")
        training = Training(recipe, folder, fabric, state, data, checkpoints, status, draw)
        training.run()
        weights = full_weights(state.evaluated)
        result = Result(folder, state.progress.metrics, state.progress.epoch, training.throughput.seconds)
        if fabric.is_global_zero:
            export_model(folder / "model", state.evaluated, record, weights)
            write_json(folder / RESULTS, _results(result, recipe, training, global_batch))
            if any(data.ledgers.values()):
                data.write_broken_images(folder / BROKEN_IMAGES)
            status.write("finished")
    return result


def build_state(recipe: Recipe, fabric: Fabric, data: Any, global_batch: int, fresh: bool) -> TrainingState:
    """Network, average and optimizer of a recipe on its devices, with the first weights where the training begins."""
    seed_everything(recipe.seed, verbose=False)
    task = TASKS[recipe.task]
    network = task.build(recipe.model, data.num_classes, recipe.data["image_size"])
    if recipe.model.init_from is not None and fresh:
        initialize(network, recipe.model.init_from)
    if recipe.trainer.sync_batchnorm:
        network = synchronise_batchnorm(network, fabric.device)
    if recipe.trainer.compile:
        network.compile()
    objective = fabric.setup_module(Objective(network, task.losses, recipe.trainer.max_skipped is not None))
    optimizer = fabric.setup_optimizers(build_optimizer(network, recipe.optimizer, global_batch))
    average = None
    if recipe.ema.decay is not None:
        average = WeightAverage(network, ema_decay(recipe.ema.decay, global_batch))
        if recipe.trainer.compile:
            average.module.compile()
    return TrainingState(fabric, objective, network, average, optimizer, data)


@contextmanager
def _noting_failure(status: StatusFile) -> Iterator[None]:
    """Note in the log and in the status what ends a training early: a stop, or an error, which whoever called shows."""
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop, Interrupted):
            LOGGER.info("interrupted at once; `--resume auto` goes on from the last checkpoint, where there is one")
        status.write("stopped")
        raise
    except Exception as error:
        LOGGER.info(f"failed: {str(error).partition(chr(10))[0] or type(error).__name__}", extra=QUIET)
        status.write("failed", error)
        raise


@contextmanager
def _explaining_divergence() -> Iterator[None]:
    """Turn the attention's refusal of NaN, which here comes of the weights, into what it means for a training.

    Raises:
        FloatingPointError: in its place.
    """
    try:
        yield
    except NonFiniteInput as error:
        raise FloatingPointError(
            "the training diverged, the attention met NaN: lower optimizer.lr or set optimizer.clip_grad"
        ) from error


@contextmanager
def _listing_broken_images(data: Any, folder: Path, fabric: Fabric) -> Iterator[None]:
    """Where unreadable images stop the run, list them in its folder first; each process all it knows."""
    try:
        yield
    except BrokenImagesError:
        rank = fabric.global_rank
        data.write_broken_images(folder / (f"broken_images.{rank}.txt" if rank else BROKEN_IMAGES))
        raise


def _results(result: Result, recipe: Recipe, training: Training, global_batch: int) -> dict[str, Any]:
    """What `results.json` says."""
    progress = training.progress
    return {
        "recipe": recipe.name,
        "task": recipe.task,
        "model": recipe.model.name,
        "parameters": sum(parameter.numel() for parameter in training.state.network.parameters()),
        "metrics": result.metrics,
        "best": progress.best,
        "epochs": result.epochs,
        "steps": progress.step,
        "seconds": round(result.seconds, 2),
        "seed": recipe.seed,
        "global_batch": global_batch,
        "learning_rate": recipe.optimizer.lr * batch_scale(recipe.optimizer, global_batch),
        "precision": training.fabric.strategy.precision.precision,
        "skipped_steps": progress.skipped,
        "broken_images": sum(len(ledger) for ledger in training.data.ledgers.values()),
        **environment(),
    }
