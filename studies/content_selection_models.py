"""DGT-Nano whose first two stages attend by one of several kinds, for `residual_training.py`."""

from __future__ import annotations

from typing import Any

from timm.models import register_model
from torch import Tensor, nn

import dgt
from dgt.layers import Block, DGAttention, GlobalAttention
from dgt.layers.baselines.random_keys import RandomKeyAttention
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.parts import Parts
from dgt.models.variants import create_variant
from dgt.utils.errors import UserError

RESIDUAL_KEYS = {  # kind -> number of residual keys of each group
    "groups": 0,
    "groups, 1 residual key": 1,
    "groups, 16 residual keys": 16,
}
ALL_KEYS = "all keys"
RANDOM_KEYS = "random keys"
KINDS = (ALL_KEYS, *RESIDUAL_KEYS, RANDOM_KEYS)
COMPARED_STAGES = 2  # number of stages that use the given kind; the others attend globally
SKELETON: dict[str, Any] = {
    "stem_width": 16,
    "dims": (32, 64, 128, 256),
    "num_heads": (1, 2, 4, 8),
    "depths": (1, 1, 4, 1),
    "num_groups": 16,
    "top_k": 32,
    "head_width": 512,
}


class GroupAttention(DGAttention):
    """DG-Attention that also attends to residual keys of its groups, in training and in evaluation.

    Args:
        residual_keys: of each group; 0 for none.
        options: as in :class:`dgt.DGAttention`.
    """

    def __init__(self, residual_keys: int, **options: Any) -> None:
        super().__init__(**options)
        self.residual_keys = residual_keys

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape, like :class:`dgt.DGAttention`."""
        if not self.residual_keys:
            return super().forward(x, mask)
        query, key, value = self.split_heads(x)
        real = None if mask is None else mask.flatten(1)
        if self.training and not self.seeded:
            self.seed(query, real, False)
        attention = dgt.dynamic_group_attention(
            query,
            key,
            value,
            self.unit_centroids(),
            self.top_k,
            self.scale,
            real,
            residual_keys=self.residual_keys,
        )
        if self.training:
            self.observe(query, attention.group_ids, self.backend)
        return self.merge_heads(attention.output, x)


class StudyParts(Parts):
    """DGT with another attention in the first stages.

    Args:
        kind: one of `KINDS`.

    Raises:
        UserError: If `kind` is none of these.
    """

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise UserError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind = kind

    def make_block(
        self,
        place: tuple[int, int],
        last: bool,
        groups: dict[str, Any],
        attention: dict[str, Any],
        **options: Any,
    ) -> Block:
        """The block at `place` (stage, block): the given kind in the first stages, else global."""
        if place[0] >= COMPARED_STAGES:
            return Block(attention=GlobalAttention(**attention), **options)
        return Block(attention=self.make_attention(groups, attention), **options)

    def make_attention(self, groups: dict[str, Any], attention: dict[str, Any]) -> nn.Module:
        """The attention of one of the compared stages."""
        if self.kind == ALL_KEYS:
            return GlobalAttention(**attention)
        if self.kind == RANDOM_KEYS:
            return RandomKeyAttention(top_k=groups["top_k"], **attention)
        return GroupAttention(RESIDUAL_KEYS[self.kind], **groups, **attention)


@register_model
def content_selection_nano(kind: str = "groups", **options: Any) -> DynamicGroupTransformer:
    """DGT-Nano whose stages one and two attend by `kind`; `options` are the model's own, and timm's."""
    options["pretrained_cfg"] = options.get("pretrained_cfg") or {
        "url": ""
    }  # timm warns without one
    return create_variant("content_selection_nano", parts=StudyParts(kind), **(SKELETON | options))
