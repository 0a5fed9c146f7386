"""From a recipe to a trained model: build the parts, hand them to the loop, write down what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric, seed_everything
from timm.layers import convert_sync_batchnorm

from dgt.data.image_io import BrokenImagesError
from dgt.tasks import TASKS
from dgt.tasks.optim import batch_scale, build_optimizer
from dgt.training.log import Report
from dgt.training.loop import Draw, Objective, Preempted, Training
from dgt.training.parallel import build_fabric, lost_process
from dgt.training.recipe import Recipe, build_data
from dgt.training.run import RESULTS, environment, export_model, finished_results, initialize, make_record, run_folder
from dgt.training.state import Checkpoints, TrainingState, WeightAverage, latest_checkpoint
from dgt.utils.atomic_write import atomic_write, remove_leftovers, write_json
from dgt.utils.errors import LOGGER, NonFiniteInput, UserError

BROKEN_IMAGES = "broken_images.txt"


@dataclass(frozen=True)
class Result:
    """What a training came to."""

    folder: Path  # of the run
    metrics: dict[str, float]  # of the final model on the validation images; shares in [0, 1]
    epochs: int
    seconds: float  # wall time


def fit(recipe: Recipe, resume: bool = False, draw: Draw | None = None) -> Result:
    """Train a recipe from its first step to its last and write the run's folder.

    Args:
        recipe: complete and checked, from `load_recipe`.
        resume: continue where a run in the same folder was stopped; what is finished is left as it is.
        draw: makes the images that `trainer.pictures_every` asks for; None for none.

    Raises:
        OSError: the data or `model.init_from` is not there; as `run_folder` for `out`.
        UserError: the model or the data cannot be built as the recipe says; no checkpoint of the run can be read.
        BrokenImagesError: more images are unreadable than `data.max_broken_share` allows; the run's folder lists them.
        FloatingPointError: too many steps in a row were not finite.
        LostProcess: another process of the training is gone.
        Preempted: a signal asked to stop, and all is saved; unless caught, ends the process.
    """
    folder = run_folder(recipe, resume)
    if (results := finished_results(folder)) is not None:
        return Result(folder, results["metrics"], results["epochs"], results["seconds"])
    with Report(None):
        checkpoint = latest_checkpoint(folder)
    data = build_data(recipe)
    data.setup("fit")
    fabric = build_fabric(recipe.trainer, TASKS[recipe.task])
    fabric.launch()  # from here on every process of the training is here; nothing was written before
    folder = fabric.broadcast(folder)
    with Report(folder if fabric.is_global_zero else None) as report:
        if fabric.is_global_zero:
            atomic_write(folder / "recipe.yaml", recipe.to_yaml())
            report.write_status("begun")
            remove_leftovers(folder / "checkpoints")
            (folder / BROKEN_IMAGES).unlink(missing_ok=True)  # of an earlier try
        with _noting_failure(folder, report, data):
            state = build_state(recipe, fabric, data, fresh=checkpoint is None)
            if checkpoint is not None:
                state.load(*checkpoint)
                place = f"step {state.progress.step} (epochs complete: {state.progress.epoch})"
                LOGGER.info(f"resumed after {place} from {checkpoint[0].name}")
            checkpoints = Checkpoints(folder, recipe.checkpoint, make_record(recipe, data.class_names))
            training = Training(recipe, state, checkpoints, report, draw)
            training.run()
            weights = state.state_dict()["state_dict"]
            if fabric.is_global_zero:
                export_model(folder / "model", state.evaluated, checkpoints.record, weights)
                write_json(folder / RESULTS, _results(recipe, training))
                if any(data.broken_images.values()):
                    data.write_broken_images(folder / BROKEN_IMAGES)
                report.write_status("finished")
    return Result(folder, state.progress.metrics, state.progress.epoch, state.progress.seconds)


def build_state(recipe: Recipe, fabric: Fabric, data: Any, fresh: bool) -> TrainingState:
    """Network, average and optimizer of a recipe on its devices, with the first weights where the training begins."""
    seed_everything(recipe.seed, verbose=False)
    task = TASKS[recipe.task]
    network = task.build(recipe.model, data.num_classes, recipe.data["image_size"])
    if recipe.model.init_from is not None and fresh:
        initialize(network, recipe.model.init_from)
    if recipe.trainer.sync_batchnorm and fabric.world_size > 1:
        if fabric.device.type != "cuda":
            raise UserError("trainer.sync_batchnorm must be false without GPUs, for which alone torch has it")
        network = convert_sync_batchnorm(network)
    if recipe.trainer.compile:
        network.compile()
    objective = fabric.setup_module(Objective(network, task.losses))
    global_batch = data.batch_size * fabric.world_size * recipe.trainer.accumulate
    optimizer = fabric.setup_optimizers(build_optimizer(network, recipe.optimizer, global_batch))
    average = None
    if recipe.ema.decay is not None:
        average = WeightAverage(network, recipe.ema.decay, global_batch)
        if recipe.trainer.compile:
            average.module.compile()
    return TrainingState(fabric, objective, network, average, optimizer, data, global_batch)


@contextmanager
def _noting_failure(folder: Path, report: Report, data: Any) -> Iterator[None]:
    """Note in the log and the status what ends a training early: a stop, or an error, which whoever called shows.

    Raises FloatingPointError in place of the attention's refusal of NaN, which here comes of the weights, LostProcess
    in place of what a collective says when another process has gone.
    """
    try:
        yield
    except (Preempted, KeyboardInterrupt) as stop:
        if isinstance(stop, KeyboardInterrupt):
            LOGGER.info("interrupted at once; `--resume auto` resumes from the last checkpoint, where there is one")
        report.write_status("stopped")
        raise
    except Exception as error:
        told: Exception = lost_process(error) or error
        if isinstance(error, NonFiniteInput):
            advice = "lower optimizer.lr or set optimizer.clip_grad"
            told = FloatingPointError(f"the training diverged, the attention met NaN: {advice}")
        if isinstance(error, BrokenImagesError):
            data.write_broken_images(folder / BROKEN_IMAGES)
        LOGGER.debug(f"failed: {str(told).partition(chr(10))[0] or type(told).__name__}")  # whoever called shows it
        report.write_status("failed", str(told))
        if told is error:
            raise
        raise told from error


def _results(recipe: Recipe, training: Training) -> dict[str, Any]:
    """What `results.json` says."""
    state, progress = training.state, training.progress
    return {
        **{"recipe": recipe.name, "task": recipe.task, "model": recipe.model.name, "seed": recipe.seed},
        **{"metrics": progress.metrics, "best": progress.best, "epochs": progress.epoch, "steps": progress.step},
        "parameters": sum(parameter.numel() for parameter in state.network.parameters()),
        "seconds": round(progress.seconds, 2),
        "global_batch": state.global_batch,
        "learning_rate": recipe.optimizer.lr * batch_scale(recipe.optimizer, state.global_batch),
        "precision": state.fabric.strategy.precision.precision,
        "skipped_steps": progress.skipped,
        "broken_images": sum(len(report) for report in state.data.broken_images.values()),
        **environment(),
    }
