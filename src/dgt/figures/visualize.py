"""`dgt visualize`: the figures of trained models: one block, all blocks, or one block through a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from dgt.figures.files import save_animation, save_figure
from dgt.figures.groups import figure_contact_sheet, figure_group_map, figure_groups
from dgt.figures.panel import Array, GroupPanel, choose_groups, denormalize
from dgt.models import GroupRecord, group_records
from dgt.models.inspect import attention_layers
from dgt.training import LoadedRun, load_run
from dgt.training.evaluate import read_image


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
        head: attention head, from 0.
        groups: how many groups to show.
        as_map: colour all groups at once instead.
        all_blocks: the map of this head in every block that has it.

    Raises:
        FileNotFoundError, ValueError: as `load_run`, `read_image` and `save_figure` do; a model without such blocks, a
            block or a head that it does not have; choices that exclude each other.
    """
    animated = Path(out).suffix.lower() == ".gif"
    _check_choices(len(checkpoints), len(images), block, all_blocks, animated)
    runs = [path if isinstance(path, LoadedRun) else load_run(path) for path in checkpoints]
    if len(runs) > 1:
        seen = [_panels(run, images[0], block or 0, head)[0] for run in runs]
        panels = [replace(panel, title=title) for panel, title in zip(seen, _titles(checkpoints), strict=True)]
        if animated:
            save_animation(_frames(panels, groups, as_map), out)
        else:
            save_figure(_through_training(panels, groups, as_map), out)
    elif all_blocks:
        save_figure(figure_contact_sheet(_all_panels(runs[0], images[0], head)), out)
    else:
        panels = [panel for image in images for panel in _panels(runs[0], image, block, head)]
        save_figure(figure_group_map(panels) if as_map else figure_groups(panels, groups), out)


def _check_choices(checkpoints: int, images: int, block: int | None, all_blocks: bool, animated: bool) -> None:
    if checkpoints < 1 or images < 1:
        raise ValueError(f"expected at least one checkpoint and one image, got {checkpoints} and {images}")
    if images > 1 and (checkpoints > 1 or all_blocks):
        raise ValueError(f"several checkpoints, or all blocks, are drawn over one image, got {images}")
    if all_blocks and checkpoints > 1:
        raise ValueError(f"all blocks are drawn for one checkpoint, got {checkpoints}")
    if all_blocks and block is not None:
        raise ValueError(f"block must not be given where all blocks are drawn, got {block}")
    if animated and checkpoints == 1:
        raise ValueError("a GIF shows how groups move: it needs several checkpoints, got 1")


def _panels(run: LoadedRun, image: str | Path, block: int | None, head: int) -> list[GroupPanel]:
    """A panel for the block, or for the last one at each resolution."""
    picture, records = _look(run, image)
    if block is not None and not 0 <= block < len(records):
        raise ValueError(f"block must lie in 0 to {len(records) - 1} for {run.recipe.model.name!r}, got {block}")
    chosen = list({record.grid: record for record in records}.values()) if block is None else [records[block]]
    for record in chosen:
        heads = record.attention.group_ids.shape[1]
        if not 0 <= head < heads:
            raise ValueError(f"head must lie in 0 to {heads - 1} at block {record.name!r}, got {head}")
    return [_panel(record, picture, head, record.name) for record in chosen]


def _all_panels(run: LoadedRun, image: str | Path, head: int) -> list[GroupPanel]:
    """A panel for every block that has the head."""
    picture, records = _look(run, image)
    most = max(record.attention.group_ids.shape[1] for record in records)
    if not 0 <= head < most:
        raise ValueError(f"head must lie in 0 to {most - 1} for {run.recipe.model.name!r}, got {head}")
    named = [(record, f"block {place}") for place, record in enumerate(records)]
    return [_panel(record, picture, head, name) for record, name in named if head < record.attention.group_ids.shape[1]]


def _look(run: LoadedRun, image: str | Path) -> tuple[Array, list[GroupRecord]]:
    """The picture as the model got it, and what its layers grouped and chose."""
    pixels = read_image(run, image)
    try:
        attention_layers(run.network)
    except ValueError as error:
        raise ValueError(f"model {run.recipe.model.name!r} has no dynamic group attention to draw") from error
    records = group_records(run.network, pixels)
    return denormalize(pixels[0], run.recipe.data["mean"], run.recipe.data["std"]), records


def _panel(record: GroupRecord, picture: Array, head: int, title: str) -> GroupPanel:
    group_ids, key_ids = (ids[0, head].cpu().numpy() for ids in record.attention[1:])
    return GroupPanel(picture, record.grid, group_ids, key_ids, title=title)


def _titles(checkpoints: Sequence[str | Path | LoadedRun]) -> list[str]:
    """The files' names without suffix, or where some are alike, their folders' too."""
    paths = [Path(each.source if isinstance(each, LoadedRun) else each) for each in checkpoints]
    names = [path.stem for path in paths]
    return names if len(set(names)) == len(names) else [f"{path.parent.name}/{path.stem}" for path in paths]


def _through_training(panels: Sequence[GroupPanel], groups: int, as_map: bool) -> Figure:
    return figure_contact_sheet(panels) if as_map else figure_groups(panels, _lasting(panels[-1], groups))


def _frames(panels: Sequence[GroupPanel], groups: int, as_map: bool) -> list[Figure]:
    if as_map:
        return [figure_group_map([panel]) for panel in panels]
    return [figure_groups([panel], _lasting(panels[-1], groups)) for panel in panels]


def _lasting(panel: GroupPanel, groups: int) -> list[int]:
    """The groups worth showing in the last checkpoint: a group keeps its number through a training."""
    return choose_groups(panel.group_ids.reshape(panel.grid), panel.key_ids, groups)
