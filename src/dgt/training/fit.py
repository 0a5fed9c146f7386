"""From a recipe to a trained model: build the parts, hand them to the loop, write down what came out; and measure one.

Processes are started by Fabric itself, torchrun or Slurm. Under "ddp" each holds the whole network, under "fsdp2" a
share of the weights, gradients and optimizer's moments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import yaml
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dgt.data.image_io import BrokenImagesError
from dgt.tasks import TASKS, Task
from dgt.tasks.base import LoadedRun
from dgt.tasks.optim import build_optimizer
from dgt.training.log import Report
from dgt.training.loop import ADVICE, Draw, Objective, Training, measure
from dgt.training.recipe import Recipe, TrainerSettings, build_data, override_keys, parse_recipe
from dgt.training.run import RESULTS, export_model, initialize, load_run, make_record, read_json, results, run_folder
from dgt.training.state import Checkpoints, TrainingState, latest_checkpoint
from dgt.utils.atomic_write import alone, atomic_write, remove_leftovers, write_json
from dgt.utils.distributed import rank, world_size
from dgt.utils.errors import LOGGER, LostProcess, NonFiniteInput, UserError

# What gloo, NCCL and the store say of a process that is no longer there: plain RuntimeErrors, some of them.
LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|remote process|TCPStore|heartbeat", re.I)
BROKEN_IMAGES = "broken_images.txt"
OF_AN_EVALUATION = ("data.", "trainer.accelerator", "trainer.precision")  # keys that may change


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
        OSError: the data or `model.init_from` is not there; as `run_folder` for `out`; a process is training there.
        UserError: the model or the data cannot be built as the recipe says; no checkpoint of the run can be read.
        BrokenImagesError: more images are unreadable than `data.max_broken_share` allows; the run's folder lists them.
        FloatingPointError: too many steps in a row were not finite.
        LostProcess: another process of the training is gone.
        Preempted: a signal asked to stop, and all is saved; unless caught, ends the process.
    """
    folder = run_folder(recipe, resume)
    if (folder / RESULTS).is_file():
        found = read_json(folder / RESULTS)
        return Result(folder, found["metrics"], found["epochs"], found["seconds"])
    data = build_data(recipe)
    data.setup("fit")
    fabric = build_fabric(recipe.trainer, TASKS[recipe.task])
    fabric.launch()  # from here on every process of the training is here; nothing was written before
    folder = fabric.broadcast(folder)
    writer = alone(folder) if fabric.is_global_zero else nullcontext()
    with writer, Report(folder if fabric.is_global_zero else None) as report, explaining(folder, data):
        if fabric.is_global_zero:
            atomic_write(folder / "recipe.yaml", yaml.safe_dump(recipe.to_dict(), sort_keys=False))
            report.write_status("begun")
            remove_leftovers(folder / "checkpoints")
            (folder / BROKEN_IMAGES).unlink(missing_ok=True)  # of an earlier try
        checkpoint = latest_checkpoint(folder)
        state = build_state(recipe, fabric, data, fresh=checkpoint is None)
        if checkpoint is not None:
            state.load(*checkpoint)
            place = f"step {state.progress.step} (epochs complete: {state.progress.epoch})"
            LOGGER.info(f"resumed after {place} from {checkpoint[0].name}")
        checkpoints = Checkpoints(folder, recipe.checkpoint, make_record(recipe, data.class_names))
        Training(recipe, state, checkpoints, report, draw).run()
        weights = state.state_dict()["state_dict"]
        if fabric.is_global_zero:
            export_model(folder / "model", state.evaluated, checkpoints.record, weights)
            write_json(folder / RESULTS, results(recipe, state))
            if any(data.broken_images.values()):
                data.write_broken_images(folder / BROKEN_IMAGES)
    return Result(folder, state.progress.metrics, state.progress.epoch, state.progress.seconds)


def build_fabric(settings: TrainerSettings, task: Task) -> Fabric:
    """Fabric with the recipe's devices and precision, not yet launched; UserError where machine or task lacks them."""
    precision: Any = settings.precision
    if precision == task.refused_precision:
        mixed = precision.replace("true", "mixed")
        raise UserError(f"trainer.precision must not be {precision!r} for task {task.name!r}; {mixed!r} is possible")
    if precision == "auto":
        on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        precision = "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    strategy: Any = ModelParallelStrategy(_shard) if settings.strategy == "fsdp2" else settings.strategy
    try:
        places: dict[str, Any] = {"devices": settings.devices, "num_nodes": settings.num_nodes}
        return Fabric(accelerator=settings.accelerator, strategy=strategy, precision=precision, **places)
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"recipe section 'trainer' does not fit this machine: {error}") from error


def _shard(objective: nn.Module, _: Any) -> nn.Module:
    """Shard every block of the network, and what is left as one; its `forward_methods` gather weights as well."""
    network = cast(nn.Module, objective.network)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (world_size(),))
    for module in [*(each for each in network.modules() if "Block" in type(each).__name__), network]:
        fully_shard(module, mesh=mesh)
    for name in getattr(network, "forward_methods", ()):
        register_fsdp_forward_method(network, name)
    return objective


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
        average = ModelEmaV3(network, recipe.ema.decay ** (global_batch / 1024), stochastic_rounding=False)
        if recipe.trainer.compile:
            average.module.compile()
    return TrainingState(fabric, objective, network, average, optimizer, data, global_batch)


@contextmanager
def explaining(folder: Path, data: Any) -> Iterator[None]:
    """Say what an error means here: the attention's NaN comes of the weights, a collective's of a lost process."""
    try:
        yield
    except BrokenImagesError:
        data.write_broken_images(folder / BROKEN_IMAGES)
        raise
    except NonFiniteInput as error:
        raise FloatingPointError(f"the training diverged, the attention met NaN: {ADVICE}") from error
    except Exception as error:
        told = " ".join(str(error).split())
        lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and LOST.search(told))
        if world_size() == 1 or not lost:
            raise
        raise LostProcess(
            f"process {rank()} of {world_size()} lost another one, whose own output says why it ended; started again "
            f"with `--resume auto` the run resumes from its last checkpoint ({told[:200]})"
        ) from error


def evaluate(
    path: str | Path | LoadedRun,
    overrides: Sequence[str] = (),
    predictions: str | Path | None = None,
    metrics: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Measure a trained model on the validation images of its recipe's data, or of other data.

    Args:
        path: checkpoint, run folder or model folder, or one already loaded.
        overrides: changes to the recipe's `data`, `trainer.accelerator` and `trainer.precision`, such as
            `["--data.root", "images"]`. The rest of the recipe is the model's past.
        predictions: file for a detector's detections, in the format of COCO's results; None to write none.
        metrics: data module, set up -> the `Metrics` to measure; None for the task's own.

    Returns the task's metrics (for classification `loss`, `top1`, `top5`; shares in [0, 1]), the number of `images` and
    of `broken_images`. Raises as `load_run` and the data do; UserError for data of other classes, a machine that lacks
    what `trainer` asks for, an override of another key, `predictions` of another task.
    """
    for key in sorted(override_keys(overrides)):
        if not key.startswith(OF_AN_EVALUATION):
            allowed = ", ".join(OF_AN_EVALUATION)
            raise UserError(f"recipe key {key!r} cannot be changed in an evaluation, only {allowed}")
    run = path if isinstance(path, LoadedRun) else load_run(path, overrides)
    task = TASKS[run.recipe.task]
    if predictions is not None and not task.has_results:
        raise UserError(f"predictions are written of detectors alone, {run.source} is of task {task.name!r}")
    recipe = parse_recipe(run.recipe.to_dict(), overrides)
    data = build_data(recipe)
    data.setup("validate")
    if list(data.class_names) != run.class_names:
        theirs, ours = (f"{len(names)} ({', '.join(names[:5])})" for names in (data.class_names, run.class_names))
        raise UserError(f"the data has other classes than the model: {theirs} in the data, {ours} in {run.source}")
    fabric = build_fabric(replace(recipe.trainer, devices=1, num_nodes=1, strategy="auto"), task)
    network = fabric.strategy.precision.convert_module(run.network).to(fabric.device)
    measured = (metrics or task.metrics)(data)
    measure(fabric, measured, network, data.val_dataloader())
    found = measured.compute()
    if predictions is not None:
        write_json(Path(predictions), measured.results)
    report = data.broken_images["val"]
    return {**found, "images": report.total - len(report), "broken_images": len(report)}
