"""Train a recipe: build the components, run the training loop, write the result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch.distributed as dist
from lightning_fabric import Fabric, seed_everything
from timm.layers import convert_sync_batchnorm
from torch import nn

from dgt.data.image_io import BrokenImagesError
from dgt.data.segmentation import SegmentationData
from dgt.layers import convert_sync_centroids
from dgt.models.heads.backbone import STRIDES, FeatureBackbone
from dgt.runs.checkpoints import latest_checkpoint
from dgt.runs.folder import RESULTS, run_folder
from dgt.runs.model import (
    compare_preparation,
    export_model,
    initialize,
    make_record,
    pretraining,
    weight_file,
)
from dgt.runs.recipe import Recipe, build_data
from dgt.runs.settings import to_yaml
from dgt.tasks import TASKS
from dgt.tasks.network import check_input_size
from dgt.tasks.optim import batch_scale, build_optimizer, check_rates
from dgt.tasks.parts import freeze
from dgt.training.average import WeightAverage
from dgt.training.fabric import build_fabric, has_bfloat16_units, precision_note
from dgt.training.log import Report
from dgt.training.loop import ADVICE, Draw, Objective, Training
from dgt.training.results import results
from dgt.training.state import Checkpoints, TrainingState, compare_data
from dgt.training.tracker import Tracker, load_tracker
from dgt.utils.atomic_write import atomic_write, exclusive_lock, remove_leftovers, write_json
from dgt.utils.class_names import changes
from dgt.utils.distributed import gather_objects, rank, world_size
from dgt.utils.errors import LOGGER, LostProcess, NonFiniteInput, UserError
from dgt.utils.faults import explain
from dgt.utils.json_files import read_json

LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|remote process|TCPStore|heartbeat",
    re.I,
)
"""Error messages of gloo, NCCL and the store when another process is gone.

Some of it as a plain RuntimeError.
"""
BROKEN_IMAGES = "broken_images.txt"


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Args:
        folder: of the run.
        metrics: of the final model on the validation images; shares in [0, 1].
        epochs: how many were trained.
        seconds: wall time, over all processes that took turns.
    """

    folder: Path
    metrics: dict[str, float]
    epochs: int
    seconds: float


def fit(recipe: Recipe, resume: bool = False, draw: Draw | None = None) -> Result:
    """Train a recipe from its first step to its last and write the run's folder.

    Args:
        recipe: complete and checked, from `load_recipe`.
        resume: continue where a run in the same folder was stopped; what is finished is left as it
            is.
        draw: makes the images that `trainer.pictures_every` asks for; None for none.

    Returns:
        The folder and the metrics of the final model.

    Raises:
        TypeError: `recipe` is none.
        OSError: the data or `model.init_from` is not there; as `run_folder` for `out`; a process is
            training there.
        UserError: the model or the data cannot be built as the recipe says; no checkpoint of the
            run can be read; a run is resumed with other classes; the tracker's package is missing;
            the recipe names parts that the model does not have; a rate of the schedule is above
            the optimizer's.
        BrokenImagesError: more images are unreadable than `data.max_broken_share` allows; the run's
            folder lists them.
        FloatingPointError: too many steps in a row were not finite.
        LostProcess: another process of the training is gone.
        Preempted: a signal asked to stop, and all is saved; unless caught, ends the process.

    Example:
        >>> from dgt.runs import load_recipe
        >>> from dgt.training import fit
        >>> fit(load_recipe("scenes", ["--schedule.epochs", "1"])).metrics["top1"]  # doctest: +SKIP
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be what load_recipe returns, got {recipe!r}")
    check_rates(recipe.optimizer, recipe.schedule)
    folder = _check_places(recipe, resume)
    if (folder / RESULTS).is_file():
        earlier = read_json(folder / RESULTS)
        return Result(folder, earlier["metrics"], earlier["epochs"], earlier["seconds"])
    data = build_data(recipe)
    data.setup("fit")
    check_parts(recipe, data)
    TASKS[recipe.task].metrics(data)  # a library that it lacks is named now, not after an epoch
    fabric = build_fabric(recipe.trainer)
    # from here on all processes are running; nothing was written before
    fabric.launch()
    check_processes(data)
    folder = fabric.broadcast(folder)
    first = fabric.is_global_zero
    lock = exclusive_lock(folder) if first else nullcontext()
    with lock, Report(folder if first else None) as report, explaining(folder, data):
        checkpoint = latest_checkpoint(folder)
        if checkpoint is not None:
            remarks = compare_data(*checkpoint, recipe, data)
            for remark in remarks if first else ():
                LOGGER.warning(remark)
        if first:
            _begin_folder(folder, recipe, report)
            if note := precision_note(recipe.trainer, fabric):
                LOGGER.info(note)
        for note in data.notes:
            LOGGER.info(note)
        if first and recipe.trainer.tracker is not None:
            report.tracker = Tracker(recipe, folder)
        state = _start_state(recipe, fabric, data, checkpoint, resume)
        for note in optimizer_notes(recipe, state) if first else ():
            LOGGER.info(note)
        checkpoints = Checkpoints(folder, recipe.checkpoint, make_record(recipe, data.class_names))
        Training(recipe, state, checkpoints, report, draw).run()
        weights = state.evaluated_weights()
        if first:
            export_model(folder / "model", state.evaluated, checkpoints.record, weights)
            write_json(folder / RESULTS, results(recipe, state))
            if any(data.broken_images.values()):
                data.write_broken_images(folder / BROKEN_IMAGES)
    return Result(folder, state.progress.metrics, state.progress.epoch, state.progress.seconds)


def _check_places(recipe: Recipe, resume: bool) -> Path:
    """The folder of the run; raises as `fit` where it, the first weights or the tracker's package
    cannot be had, before the data is read.
    """
    load_tracker(recipe.trainer.tracker)
    folder = run_folder(recipe, resume)
    has_checkpoint = any((folder / "checkpoints").glob("*.ckpt"))
    if recipe.model.init_from is not None and not has_checkpoint:
        weight_file(recipe.model.init_from)
    return folder


def _begin_folder(folder: Path, recipe: Recipe, report: Report) -> None:
    """Write the recipe and the first status, and remove what earlier processes left unfinished."""
    atomic_write(folder / "recipe.yaml", to_yaml(recipe.to_dict()))
    report.write_status("begun")
    remove_leftovers(folder / "checkpoints")
    (folder / BROKEN_IMAGES).unlink(missing_ok=True)  # of an earlier try


def _start_state(
    recipe: Recipe,
    fabric: Fabric,
    data: Any,
    checkpoint: tuple[Path, dict[str, Any]] | None,
    resume: bool,
) -> TrainingState:
    """The state that the training starts from: that of the newest checkpoint, or a new one, which the
    log says where it was to `resume`.
    """
    if resume and checkpoint is None:
        LOGGER.info("there is no checkpoint to resume from: the training begins")
    state = build_state(recipe, fabric, data, fresh=checkpoint is None)
    if checkpoint is not None:
        path, stored = checkpoint
        state.load(path, stored)
        place = f"step {state.progress.step} (epochs complete: {state.progress.epoch})"
        LOGGER.info(f"resumed after {place} from {path.name}")
    return state


def build_state(recipe: Recipe, fabric: Fabric, data: Any, fresh: bool) -> TrainingState:
    """Build network, average and optimizer of a recipe on its devices.

    Args:
        recipe: complete and checked.
        fabric: launched.
        data: the data module, set up.
        fresh: whether the training begins, so that first weights are read.
    """
    seed_everything(recipe.seed, verbose=False)
    task = TASKS[recipe.task]
    # a checkpoint has all weights: a machine that resumes may have no network
    settings = recipe.model if fresh else recipe.model.untrained()
    network = task.build(settings, data.num_classes, recipe.data.image_size)
    if fresh:
        check_sizes(network, recipe)
    if recipe.model.init_from is not None and fresh:
        before = initialize(network, recipe.model.init_from, data.class_names, recipe.task)
        compare_preparation(recipe, before, f"model.init_from: {recipe.model.init_from}")
    elif settings.args.get("pretrained"):
        compare_preparation(recipe, pretraining(network), f"the pretrained {recipe.model.name}")
    if recipe.trainer.sync_batchnorm and fabric.world_size > 1:
        if fabric.device.type != "cuda":
            raise UserError(
                "trainer.sync_batchnorm must be false without GPUs: torch supports it only on GPUs"
            )
        network = convert_sync_batchnorm(network)
    convert_sync_centroids(network)
    frozen = freeze(network, recipe.model.freeze)
    if recipe.trainer.compile:
        network.compile()
    objective = fabric.setup_module(Objective(network, task.losses))
    global_batch = data.batch_size * fabric.world_size * recipe.trainer.accumulate
    optimizer = fabric.setup_optimizers(build_optimizer(network, recipe.optimizer, global_batch))
    average = None
    if recipe.ema.decay is not None:
        average = WeightAverage(network, recipe.ema.decay ** (global_batch / 1024))
        if recipe.trainer.compile:
            average.module.compile()
    return TrainingState(fabric, objective, network, average, optimizer, data, global_batch, frozen)


def check_parts(recipe: Recipe, data: Any) -> None:
    """UserError where a recipe names parts of its model that are not there, or freezes all; builds
    the model where it names some.
    """
    if recipe.model.freeze or recipe.optimizer.lr_scale or recipe.optimizer.layer_decay is not None:
        network = TASKS[recipe.task].build(
            recipe.model.untrained(), data.num_classes, recipe.data.image_size
        )
        freeze(network, recipe.model.freeze)
        build_optimizer(network, recipe.optimizer, data.batch_size)


def check_sizes(network: nn.Module, recipe: Recipe) -> None:
    """UserError where a classifier cannot be run on images of the recipe's size, or where a network with
    a backbone, which meets images of any size, can be run on none but squares of it.
    """
    side = recipe.data.image_size
    backbone = getattr(network, "backbone", None)
    if not isinstance(backbone, FeatureBackbone):
        check_input_size(network, recipe.model.name, side, side, ", as data.image_size has them")
        return
    config = timm.get_pretrained_cfg(recipe.model.name)
    # of a segmenter, whose images may be seen in windows
    window = recipe.data.test.window if isinstance(recipe.data, SegmentationData) else None
    if config is not None and config.fixed_input_size and window != side:
        remedy = ", as images of this task may have: take a model of any size"
        if isinstance(recipe.data, SegmentationData):
            remedy += f", or set data.test.window to {side}"
        check_input_size(backbone, recipe.model.name, side, side + STRIDES[-1], remedy)


def check_processes(data: Any) -> None:
    """UserError, in all processes, where they do not see the same images, as where a node has a part of
    them: each step would take others than said, and some processes wait for the rest forever.
    """
    counts = {part: len(dataset) for part, dataset in data.datasets.items()}
    seen = gather_objects((counts, data.class_names))
    for number, (images, names) in enumerate(seen):
        if (images, names) != seen[0]:
            differs = changes(seen[0][1], names) or f"its images are {images}, not {seen[0][0]}"
            raise UserError(
                f"all processes must see the same images, but to process {number} data.root shows "
                f"others than to the first: {differs}"
            )


def optimizer_notes(recipe: Recipe, state: TrainingState) -> list[str]:
    """Lines for a step of another number of images than the recipe's rates are stated for, and for an
    optimizer that is slow on this machine.
    """
    notes = []
    images, stated = state.global_batch, recipe.optimizer.lr_batch
    if stated not in (None, images):
        rate = recipe.optimizer.lr * batch_scale(recipe.optimizer, images)
        notes.append(
            f"a step has {images} images, and optimizer.lr is stated for {stated}: it is scaled to "
            f"{rate:.3g}, as are all rates; data.batch_size and trainer.accumulate set the images of "
            "a step"
        )
    on_cpu = state.fabric.device.type == "cpu"
    if on_cpu and "muon" in recipe.optimizer.name and not has_bfloat16_units():
        notes.append(
            f"optimizer.name {recipe.optimizer.name} computes in bfloat16, which this CPU has no units "
            "for: its steps take many times as long as those of others"
        )
    return notes


@contextmanager
def explaining(folder: Path, data: Any) -> Iterator[None]:
    """Translate errors during training: NaN in the attention is divergence, a failed collective a lost process.

    Args:
        folder: of the run, which lists broken images.
        data: the data module.
    """
    try:
        yield
    except BrokenImagesError:
        data.write_broken_images(folder / BROKEN_IMAGES)
        raise
    except NonFiniteInput as error:
        raise FloatingPointError(f"training diverged: NaN in the attention; {ADVICE}") from error
    except Exception as error:
        message = " ".join(str(error).split())
        by_message = isinstance(error, RuntimeError) and LOST.search(message)
        lost = isinstance(error, dist.DistError) or by_message
        if world_size() == 1 or not lost:
            better = explain(error)
            if better is None:
                raise
            raise better from error
        raise LostProcess(
            f"process {rank()} of {world_size()} lost another process, whose output says why it ended; restarted "
            f"with `--resume auto` the run resumes from its last checkpoint ({message[:200]})"
        ) from error
