"""Evaluate a network on validation images, during and after training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dgt.runs.model import load_run
from dgt.runs.recipe import build_data, changes_of, parse_recipe
from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun
from dgt.training.fabric import build_fabric, precision_note
from dgt.utils.atomic_write import check_writable, write_json
from dgt.utils.distributed import world_size
from dgt.utils.errors import LOGGER, UserError
from dgt.utils.faults import explaining_faults

EVALUATION_KEYS = ("data.", "trainer.accelerator", "trainer.precision")
"""Keys of a recipe that an evaluation may change."""


def evaluate(
    path: str | Path | LoadedRun,
    overrides: Sequence[str] = (),
    predictions: str | Path | None = None,
    metrics: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Measure a trained model on the validation images of its recipe's data, or of other data,
    whose classes may be a part of the model's: labels go by names.

    Args:
        path: checkpoint, run folder or model folder, or a run already loaded, whose network stays
            as it is.
        overrides: changes to the recipe's `data`, `trainer.accelerator` and `trainer.precision`,
            such as `["--data.root", "images"]`. The rest of the recipe is the model's past.
        predictions: file for a detector's detections, in the format of COCO's results; None to
            write none. Where the data has no ids as COCO's files have, those of images and categories
            are their places from 0, of images in the order of the split's names or rows.
        metrics: makes the `Metrics` to measure from the data module, set up; None for the task's
            own.

    Returns:
        The task's metrics (for classification `loss`, `top1`, `top5`; shares in [0, 1]), the number
        of `images` and of `broken_images`.

    Raises:
        FileNotFoundError, UserError: as `load_run` and the data do.
        UserError: the data has classes that the model does not have, the machine lacks what
            `trainer` asks for, another key is changed, the task does not write `predictions`, or
            they cannot be written there.

    Example:
        >>> evaluate("runs/scenes", ["--data.root", "images"])["top1"]
    """
    for key in sorted(changes_of(overrides)):
        if not key.startswith(EVALUATION_KEYS):
            allowed = ", ".join(EVALUATION_KEYS)
            raise UserError(
                f"recipe key {key!r} cannot be changed in an evaluation, only {allowed}"
            )
    run = path if isinstance(path, LoadedRun) else load_run(path, overrides)
    task = TASKS[run.recipe.task]
    if predictions is not None and not task.has_results:
        raise UserError(
            f"predictions can only be written for detectors, but {run.source} has task {task.name!r}"
        )
    if predictions is not None:
        check_writable(predictions, "predictions")
    recipe = parse_recipe(run.recipe.to_dict(), overrides)
    data = build_data(recipe)
    data.setup("validate", run.class_names)
    for note in data.notes:
        LOGGER.warning(note)
    fabric = build_fabric(replace(recipe.trainer, devices=1, num_nodes=1, strategy="auto"))
    if note := precision_note(recipe.trainer, fabric):
        LOGGER.warning(note)
    network = copy.deepcopy(run.network) if run is path else run.network
    network = fabric.strategy.precision.convert_module(network).to(fabric.device)
    make_metrics = task.metrics if metrics is None else metrics
    measured = make_metrics(data)
    with explaining_faults(), closing(data.val_dataloader()) as loader:
        measure(fabric, measured, network, loader)
    values = measured.compute()
    for remark in measured.remarks:
        LOGGER.warning(remark)
    if predictions is not None:
        write_json(Path(predictions), measured.results)
    report = data.broken_images["val"]
    return {**values, "images": report.total - len(report), "broken_images": len(report)}


def measure(
    fabric: Fabric,
    metrics: Any,
    network: nn.Module,
    loader: Any,
    between: Callable[[], None] | None = None,
) -> None:
    """Run one validation; leaves the network in evaluation mode. All processes use the buffers of the
    first, which are exported: BatchNorm's differ where
    each process keeps its own statistics.

    Args:
        fabric: says the device and the precision.
        metrics: the `Metrics` to update.
        network: in any mode.
        loader: of the validation images.
        between: called before every batch.
    """
    network.eval()
    if world_size() > 1:
        for buffer in network.buffers():
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0)
    loader.device = fabric.device
    with torch.no_grad(), _whole(network):
        for images, targets in loader:
            if between is not None:
                between()
            with fabric.autocast():
                metrics.update(network, to_precision(fabric, images), targets)


@contextmanager
def _whole(network: nn.Module) -> Iterator[None]:
    """Hold all weights of a network that processes share: one may have more batches, or windows of
    images, than another, and would wait for that one's share.
    """
    parts = [each for each in network.modules() if isinstance(each, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not network, recurse=False)  # as it was
            part.reshard()


def to_precision(fabric: Fabric, images: Any) -> Any:
    """Images in the type of the weights; under a mixed precision they stay as they are."""
    precision = fabric.strategy.precision
    return images if precision.precision.endswith("mixed") else precision.convert_input(images)
