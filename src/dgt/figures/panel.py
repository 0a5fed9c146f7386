"""What is drawn: an image with the groups of its tokens and the keys they chose, and which groups are worth showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dgt.models import GroupRecord
from dgt.utils.errors import UserError

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class GroupPanel:
    """One image with the groups of its tokens: a row of a figure.

    Tensors are taken too and kept as arrays.

    Attributes:
        image: (H, W, 3) uint8.
        grid: (h, w), the tokens' rows and columns, laid over the whole image.
        group_ids: (h*w,) integers, the group of every token, -1 for padding.
        key_ids: (G, k) integers, the tokens that every group chose, -1 for an empty slot.
        title: a short label of the row.
        key_weights: (G, k), not negative; the key with the largest weight is drawn brightest.
        residual_share: (L,), the share of every token's attention that goes to residual keys,
            from 0 to 1; None where there are none.

    Raises:
        UserError, TypeError: naming the field.

    Example:
        >>> panel = GroupPanel(image, (14, 14), group_ids, key_ids, title="last stage")
    """

    image: Any
    grid: tuple[int, int]
    group_ids: Any
    key_ids: Any
    title: str = ""
    key_weights: Any = None
    residual_share: Any = None

    def __post_init__(self) -> None:
        for name in ("image", "group_ids", "key_ids", "key_weights", "residual_share"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, to_array(getattr(self, name)))
        check_image(self.image)
        if len(self.grid) != 2 or min(self.grid) < 1:
            raise UserError(f"grid must be (rows, columns), both at least 1, got {self.grid}")
        _check_ids(self.group_ids, self.key_ids)
        (rows, columns), shape = self.grid, self.group_ids.shape
        if shape != (rows * columns,):
            raise UserError(
                f"group_ids must be ({rows * columns},) for a grid of {rows} x {columns}, got {shape}"
            )
        weights, wanted = self.key_weights, self.key_ids.shape
        if weights is not None and (
            weights.shape != wanted or not ((weights >= 0) & (weights < np.inf)).all()
        ):
            raise UserError(
                f"key_weights must be finite, not negative and {wanted} like key_ids, got {weights.shape}"
            )
        share = self.residual_share
        if share is not None and (share.shape != shape or not ((share >= 0) & (share <= 1)).all()):
            raise UserError(
                f"residual_share must be {shape} like group_ids, from 0 to 1, got {share.shape}"
            )


def panels_of(
    records: Sequence[GroupRecord],
    image: Array,
    head: int = 0,
    block: int | None = None,
    every: bool = False,
) -> list[GroupPanel]:
    """Make panels of the groups and keys in a model's layers, for the first image of a batch.

    Args:
        records: from `dgt.group_records`, one for each block.
        image: (H, W, 3) uint8, as the model got it.
        head: attention head, from 0.
        block: from 0; None for the last one at each resolution.
        every: make a panel for every block that has the head instead.

    Returns:
        One panel per requested block.

    Raises:
        UserError: there is no such block or head.

    Example:
        >>> records = dgt.group_records(model, images)
        >>> figure_groups(panels_of(records, image))
    """
    heads = [record.attention.group_ids.shape[1] for record in records]
    if block is not None and not 0 <= block < len(records):
        raise UserError(f"block must lie in 0 to {len(records) - 1}, got {block}")
    chosen = (
        list({record.grid: place for place, record in enumerate(records)}.values())
        if block is None
        else [block]
    )
    if every:
        chosen = [place for place in range(len(records)) if head < heads[place]] or [
            heads.index(max(heads))
        ]
    panels = []
    for place in chosen:
        name, grid, seen, residual = records[place]
        if not 0 <= head < heads[place]:
            raise UserError(
                f"head must lie in 0 to {heads[place] - 1} at block {name!r}, got {head}"
            )
        title = f"block {place}" if every else name
        ids = (seen.group_ids[0, head], seen.key_ids[0, head])
        share = None if residual is None else residual[0, head]
        panels.append(GroupPanel(image, grid, *ids, title, residual_share=share))
    return panels


def choose_groups(
    group_ids: Array | torch.Tensor, key_ids: Array | torch.Tensor, count: int
) -> list[int]:
    """Pick groups worth showing: large ones that differ from each other in place and in keys.

    Starts with the largest group, then repeatedly takes the one with the best product of size,
    distance to the groups taken and share of keys that those lack; ties go to the lowest index.

    Args:
        group_ids: (L,) integers, or (h, w) to give place by row and column; -1 for padding.
        key_ids: (G, k) integers; -1 for an empty slot.
        count: how many to pick.

    Returns:
        At most `count` indices, fewer where fewer groups have a query and a key.

    Raises:
        UserError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> choose_groups(np.array([0, 0, 0, 1, 1, 2]), np.array([[0, 1], [2, 3], [4, 5]]), 2)
        [0, 1]
    """
    group_ids, key_ids = to_array(group_ids), to_array(key_ids)
    _check_ids(group_ids, key_ids)
    if not 1 <= count <= len(key_ids):
        raise UserError(
            f"count must be between 1 and the number of groups, {len(key_ids)}, got {count}"
        )
    sizes = np.bincount(group_ids[group_ids >= 0], minlength=len(key_ids))
    places = np.zeros((len(key_ids), group_ids.ndim))
    for group in np.flatnonzero(sizes):
        places[group] = (np.argwhere(group_ids == group).mean(axis=0) + 0.5) / group_ids.shape
    key_sets = [set(row[row >= 0].tolist()) for row in key_ids]
    # The square root keeps a huge background from deciding everything.
    worth = np.sqrt(sizes) * np.array([len(keys) > 0 for keys in key_sets])
    novelty = np.ones(len(key_ids))
    chosen: list[int] = []
    while len(chosen) < count and worth.max() > 0:
        best = int((worth * novelty).argmax())
        chosen.append(best)
        worth[best] = 0
        apart = np.linalg.norm(places - places[best], axis=1)
        shared = np.array(
            [len(keys & key_sets[best]) / max(len(keys | key_sets[best]), 1) for keys in key_sets]
        )
        # Never quite zero, so that groups which agree with a chosen one still follow where nothing
        # else is left.
        novelty = np.minimum(
            novelty, np.maximum((1 - shared) * np.minimum(apart + 0.25, 1.0), 1e-3)
        )
    return chosen


def to_array(value: Any) -> Array:
    """A tensor or sequence as an array."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def check_image(image: Array) -> None:
    """Raise UserError for anything but (H, W, 3) uint8."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise UserError(f"image must be (H, W, 3) uint8, got {image.shape} {image.dtype}")


def _check_ids(groups: Array, keys: Array) -> None:
    """Both must hold integers, every index in range."""
    for name, ids in (("group_ids", groups), ("key_ids", keys)):
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"{name} must hold integers, got {ids.dtype}")
    if groups.ndim not in (1, 2) or groups.size == 0:
        raise UserError(
            f"group_ids must be (tokens,) or (rows, columns) with at least one token, got {groups.shape}"
        )
    if keys.ndim != 2 or 0 in keys.shape:
        raise UserError(
            f"key_ids must be (groups, keys) with at least one of each, got {keys.shape}"
        )
    for name, ids, limit in (("group_ids", groups, len(keys)), ("key_ids", keys, groups.size)):
        if ids.min() < -1 or ids.max() >= limit:
            raise UserError(
                f"{name} must lie between -1 and {limit - 1}, got {ids.min()} to {ids.max()}"
            )
