"""Looking into trained models: `dgt visualize`, `dgt diagnose`, and what TensorBoard shows of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from dgt.models import BlockDiagnosis, DynamicGroupTransformer, diagnose, group_records
from dgt.models.inspect import attention_layers
from dgt.runs import LoadedRun, load_run
from dgt.tasks import TASKS
from dgt.tasks.base import Source
from dgt.tasks.classify import read_image
from dgt.utils.errors import UserError


def visualize(
    checkpoints: Sequence[str | Path | LoadedRun],
    images: Sequence[str | Path],
    out: str | Path,
    block: int | None = None,
    head: int = 0,
    groups: int = 3,
    as_map: bool = False,
    all_blocks: bool = False,
) -> None:
    """Draw the groups of trained models' queries over images, and the keys that the groups chose.

    With one checkpoint: a row for each image and block, or with `all_blocks` a sheet of maps. With several, of one
    training in their order: a row for each, with the groups chosen in the last; as GIF a frame for each.

    Args:
        checkpoints: checkpoints, run folders or model folders, or runs already loaded.
        images: image files; one where there are several checkpoints or `all_blocks`.
        out: PNG, SVG or PDF to write, or GIF for several checkpoints.
        block: which block with dynamic group attention, from 0; None for the last one at each resolution, or the first
            block where there are several checkpoints.
        head, groups: attention head, from 0; how many groups to show.
        as_map, all_blocks: colour all groups at once instead; so for this head in every block that has it.

    Raises UserError, besides what `load_run`, `read_image` and `save_figure` raise, for a model without such blocks, a
    block or a head that it does not have, and choices that exclude each other.
    """
    animated = Path(out).suffix.lower() == ".gif"
    _check_choices(len(checkpoints), len(images), block, all_blocks, animated)
    runs = [path if isinstance(path, LoadedRun) else load_run(path) for path in checkpoints]
    if len(runs) > 1:
        seen = [_panels(run, images[0], head=head, block=block or 0)[0] for run in runs]
        panels = [replace(panel, title=title) for panel, title in zip(seen, _titles(checkpoints), strict=True)]
        # The groups worth showing in the last checkpoint: a group keeps its number through a training.
        lasting = choose_groups(seen[-1].group_ids.reshape(seen[-1].grid), seen[-1].key_ids, groups)
        if animated:
            frames = [figure_group_map([panel]) if as_map else figure_groups([panel], lasting) for panel in panels]
            save_animation(frames, out)
        else:
            save_figure(figure_contact_sheet(panels) if as_map else figure_groups(panels, lasting), out)
    elif all_blocks:
        save_figure(figure_contact_sheet(_panels(runs[0], images[0], head=head, every=True)), out)
    else:
        panels = [panel for image in images for panel in _panels(runs[0], image, head=head, block=block)]
        save_figure(figure_group_map(panels) if as_map else figure_groups(panels, groups), out)


def diagnose_run(checkpoint: str | Path, images: Sequence[str | Path], out: str | Path) -> list[BlockDiagnosis]:
    """Diagnose a trained classifier on image files, at least one, and draw what was found as PNG, SVG or PDF.

    Returns what `dgt.diagnose` returns. Raises as `load_run`, `read_image`, `dgt.diagnose` and `save_figure` do.
    """
    run = load_run(checkpoint)
    blocks = diagnose(run.network, torch.cat([read_image(run, image)[0] for image in images]))
    save_figure(figure_diagnosis(blocks), out)
    return blocks


def draw_training(run: LoadedRun, images: Sequence[Tensor]) -> dict[str, NDArray[np.uint8]]:
    """Draw what a model on the CPU finds in images, uint8 (3, H, W) as it gets them, and its groups if it is a DGT.

    Returns images (H, W, 3) uint8: "predictions/0" and so on, and "groups".
    """
    task = TASKS[run.recipe.task]
    drawn = {f"predictions/{i}": task.draw(run, task.predict(run, image, 1)) for i, image in enumerate(images)}
    if isinstance(run.network, DynamicGroupTransformer) and images:
        drawn["groups"] = raster(figure_groups(_panels(run, images[0])), dpi=200)
    return {name: np.asarray(image) for name, image in drawn.items()}


def _check_choices(checkpoints: int, images: int, block: int | None, all_blocks: bool, animated: bool) -> None:
    if checkpoints < 1 or images < 1:
        raise UserError(f"expected at least one checkpoint and one image, got {checkpoints} and {images}")
    if images > 1 and (checkpoints > 1 or all_blocks):
        raise UserError(f"several checkpoints, or all blocks, are drawn over one image, got {images}")
    if all_blocks and checkpoints > 1:
        raise UserError(f"all blocks are drawn for one checkpoint, got {checkpoints}")
    if all_blocks and block is not None:
        raise UserError(f"block must not be given where all blocks are drawn, got {block}")
    if animated and checkpoints == 1:
        raise UserError("a GIF shows how groups move: it needs several checkpoints, got 1")


def _panels(run: LoadedRun, image: Source, **choice: Any) -> list[GroupPanel]:
    """Panels of an image as the model got it."""
    pixels, seen = read_image(run, image)
    try:
        attention_layers(run.network)
    except ValueError as error:
        raise UserError(f"model {run.recipe.model.name!r} has no dynamic group attention to draw") from error
    return panels_of(group_records(run.network, pixels), seen, **choice)


def _titles(checkpoints: Sequence[str | Path | LoadedRun]) -> list[str]:
    """The files' names without suffix, or where some are alike, their folders' too."""
    paths = [Path(each.source if isinstance(each, LoadedRun) else each) for each in checkpoints]
    names = [path.stem for path in paths]
    return names if len(set(names)) == len(names) else [f"{path.parent.name}/{path.stem}" for path in paths]
