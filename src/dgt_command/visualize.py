"""Visualize trained models: `dgt visualize`, `dgt diagnose`, and the images in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgt.figures import (
    GroupPanel,
    choose_groups,
    figure_contact_sheet,
    figure_group_map,
    figure_groups,
    panels_of,
    raster,
    save_animation,
    save_figure,
)
from dgt.figures.diagnosis import figure_diagnosis
from dgt.figures.io import check_path
from dgt.models import BlockDiagnosis, DynamicGroupTransformer, diagnose, group_records
from dgt.models.inspect import attention_layers
from dgt.runs import LoadedRun, load_run
from dgt.tasks import TASKS
from dgt.tasks.base import Source
from dgt.tasks.classify import read_image
from dgt.utils.errors import UserError


@dataclass(frozen=True)
class View:
    """What `visualize` shows.

    Args:
        block: which block with dynamic group attention, from 0; None for the last one at each
            resolution, or the first block where there are several checkpoints.
        head: attention head, from 0.
        groups: how many groups to show.
        as_map: color all groups at once instead.
        all_blocks: so for this head in every block that has it.
    """

    block: int | None = None
    head: int = 0
    groups: int = 3
    as_map: bool = False
    all_blocks: bool = False


DEFAULT = View()


def visualize(
    checkpoints: Sequence[str | Path | LoadedRun],
    images: Sequence[str | Path],
    out: str | Path,
    view: View = DEFAULT,
) -> None:
    """Draw the query groups of trained models over images, and the keys selected for them.

    With one checkpoint: a row for each image and block, or with `all_blocks` a sheet of maps. With
    several, of one training in their order: a row for each, with the groups chosen in the last; as
    GIF a frame for each.

    Args:
        checkpoints: checkpoints, run folders or model folders, or runs already loaded.
        images: image files; one where there are several checkpoints or `all_blocks`.
        out: PNG, SVG or PDF to write, or GIF for several checkpoints.
        view: what is shown.

    Raises:
        UserError: a model without such blocks, a block or a head that it does not have, choices
            that exclude each other; and as `load_run`, `read_image` and `save_figure`.
    """
    animated = Path(out).suffix.lower() == ".gif"
    _check_choices(len(checkpoints), len(images), view, animated)
    runs = [path if isinstance(path, LoadedRun) else load_run(path) for path in checkpoints]
    if len(runs) > 1:
        _draw_training(runs, images[0], out, view, _titles(checkpoints))
    elif view.all_blocks:
        panels = _panels(runs[0], images[0], head=view.head, every=True)
        save_figure(figure_contact_sheet(panels), out)
    else:
        panels = []
        for image in images:
            panels += _panels(runs[0], image, head=view.head, block=view.block)
        save_figure(
            figure_group_map(panels) if view.as_map else figure_groups(panels, view.groups), out
        )


def _draw_training(
    runs: Sequence[LoadedRun], image: str | Path, out: str | Path, view: View, titles: Sequence[str]
) -> None:
    """One block in several checkpoints of a training: rows, or the frames of a GIF."""
    panels = []
    for run, title in zip(runs, titles, strict=True):
        panel = _panels(run, image, head=view.head, block=view.block or 0)[0]
        panels.append(replace(panel, title=title))
    # The groups worth showing in the last checkpoint: a group keeps its number through a training.
    last = panels[-1]
    lasting = choose_groups(last.group_ids.reshape(last.grid), last.key_ids, view.groups)
    if Path(out).suffix.lower() == ".gif":
        frames = [
            figure_group_map([panel]) if view.as_map else figure_groups([panel], lasting)
            for panel in panels
        ]
        save_animation(frames, out)
    else:
        save_figure(
            figure_contact_sheet(panels) if view.as_map else figure_groups(panels, lasting), out
        )


def diagnose_run(
    checkpoint: str | Path, images: Sequence[str | Path], out: str | Path
) -> list[BlockDiagnosis]:
    """Diagnose a trained classifier on image files, and draw what was found.

    Args:
        checkpoint: checkpoint, run folder or model folder.
        images: image files, at least one.
        out: PNG, SVG or PDF to write.

    Returns:
        What `dgt.diagnose` returns.

    Raises:
        UserError, OSError: as `load_run`, `read_image`, `dgt.diagnose` and `save_figure`.
    """
    check_path(out)  # which the diagnosis of many images takes a while to get to
    run = load_run(checkpoint)
    blocks = diagnose(run.network, torch.cat([read_image(run, image)[0] for image in images]))
    save_figure(figure_diagnosis(blocks), out)
    return blocks


def draw_training(run: LoadedRun, images: Sequence[Tensor]) -> dict[str, NDArray[np.uint8]]:
    """Draw what a model on the CPU finds in images, and its groups if it is a DGT.

    Args:
        run: the trained model.
        images: uint8 (3, H, W), as the model gets them.

    Returns:
        Images (H, W, 3) uint8 by name: "predictions/0" and so on, and "groups".
    """
    task = TASKS[run.recipe.task]
    drawn = {
        f"predictions/{i}": task.draw(run, task.predict(run, image, 1))
        for i, image in enumerate(images)
    }
    if isinstance(run.network, DynamicGroupTransformer) and images:
        drawn["groups"] = raster(figure_groups(_panels(run, images[0])), dpi=200)
    return {name: np.asarray(image) for name, image in drawn.items()}


def _check_choices(checkpoints: int, images: int, view: View, animated: bool) -> None:
    if checkpoints < 1 or images < 1:
        raise UserError(
            f"expected at least one checkpoint and one image, got {checkpoints} and {images}"
        )
    if images > 1 and (checkpoints > 1 or view.all_blocks):
        raise UserError(f"several checkpoints or all blocks need exactly one image, got {images}")
    if view.all_blocks and checkpoints > 1:
        raise UserError(f"all blocks need exactly one checkpoint, got {checkpoints}")
    if view.all_blocks and view.block is not None:
        raise UserError(f"block must not be given together with all blocks, got {view.block}")
    if animated and checkpoints == 1:
        raise UserError("a GIF shows how groups change over several checkpoints, got 1")


def _panels(run: LoadedRun, image: Source, **choice: Any) -> list[GroupPanel]:
    """Panels of an image as the model got it."""
    pixels, seen = read_image(run, image)
    try:
        attention_layers(run.network)
    except ValueError as error:
        raise UserError(
            f"model {run.recipe.model.name!r} has no dynamic group attention to draw"
        ) from error
    return panels_of(group_records(run.network, pixels), seen, **choice)


def _titles(checkpoints: Sequence[str | Path | LoadedRun]) -> list[str]:
    """The files' names without suffix, with their folders if some are equal."""
    paths = [Path(each.source if isinstance(each, LoadedRun) else each) for each in checkpoints]
    names = [path.stem for path in paths]
    return (
        names
        if len(set(names)) == len(names)
        else [f"{path.parent.name}/{path.stem}" for path in paths]
    )
