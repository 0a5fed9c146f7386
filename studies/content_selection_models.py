"""DGT-Nano whose first two stages attend by one of six kinds, for `content_selection.py`."""

from __future__ import annotations

from typing import Any

import torch
from timm.models import register_model
from torch import Tensor, nn

import dgt
from dgt.layers import Block, DGAttention, GlobalAttention
from dgt.layers.baselines.cmt import ReducedAttention
from dgt.layers.baselines.random_keys import RandomKeyAttention
from dgt.layers.baselines.swin import WindowAttention
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.parts import Parts
from dgt.models.variants import create_variant
from dgt.utils.errors import UserError

KINDS = ("groups", "all keys", "random keys", "windows", "reduced keys", "nothing")
WITH_RESIDUAL_KEY = "groups with a residual key"  # in training, too
RESIDUAL_KEYS = {  # kind -> number of residual keys of each group, None: attention to all keys
    "all keys": None,
    "groups": 0,
    "groups, 1 residual key": 1,
    "groups, 16 residual keys": 16,
}
COMPARED_STAGES = 2  # number of stages that use the given kind; the others attend globally
TOP_K = 32
WINDOW = 6
REDUCTION = (4, 2)  # tokens along a side that one reduced key stands for, in stages one and two
SKELETON: dict[str, Any] = {
    "stem_width": 16,
    "dims": (32, 64, 128, 256),
    "num_heads": (1, 2, 4, 8),
    "depths": (1, 1, 4, 1),
    "num_groups": 16,
    "top_k": TOP_K,
    "head_width": 512,
}


class NoAttention(nn.Module):
    """Attends to nothing: adds zero to the block's residual stream."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to zeros of the same shape."""
        return torch.zeros_like(x)


class GroupAttention(DGAttention):
    """DG-Attention that can also attend to residual keys of its groups.

    Args:
        residual_keys: of each group; 0 for none.
        options: as in :class:`dgt.DGAttention`.
    """

    def __init__(self, residual_keys: int = 0, **options: Any) -> None:
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
        kind: one of `KINDS` or `RESIDUAL_KEYS`, or `WITH_RESIDUAL_KEY`.

    Raises:
        UserError: If `kind` is none of these.
    """

    def __init__(self, kind: str) -> None:
        known = (*KINDS, WITH_RESIDUAL_KEY, *RESIDUAL_KEYS)
        if kind not in known:
            raise UserError(f"kind must be one of {', '.join(known)}, got {kind!r}")
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
        stage = place[0]
        if stage >= COMPARED_STAGES:
            return Block(attention=GlobalAttention(**attention), **options)
        return Block(attention=self.make_attention(stage, groups, attention), **options)

    def make_attention(
        self, stage: int, groups: dict[str, Any], attention: dict[str, Any]
    ) -> nn.Module:
        """The attention of one of the compared stages."""
        if self.kind == "all keys":
            return GlobalAttention(**attention)
        if self.kind == WITH_RESIDUAL_KEY:
            return GroupAttention(1, **groups, **attention)
        if self.kind in RESIDUAL_KEYS:
            return GroupAttention(RESIDUAL_KEYS[self.kind] or 0, **groups, **attention)
        if self.kind == "random keys":
            return RandomKeyAttention(top_k=groups["top_k"], **attention)
        if self.kind == "windows":
            return WindowAttention(window=WINDOW, table=False, **attention)
        if self.kind == "reduced keys":
            return ReducedAttention(ratio=REDUCTION[stage], **attention)
        return NoAttention()


@register_model
def content_selection_nano(kind: str = "groups", **options: Any) -> DynamicGroupTransformer:
    """DGT-Nano whose stages one and two attend by `kind`; `options` are the model's own, and timm's."""
    options["pretrained_cfg"] = options.get("pretrained_cfg") or {
        "url": ""
    }  # timm warns without one
    return create_variant("content_selection_nano", parts=StudyParts(kind), **(SKELETON | options))


def compared_layers(network: nn.Module) -> list[Any]:
    """The attention modules of the compared stages, each of which has one block."""
    return [
        network.get_submodule(f"stages.{stage}.blocks.0.attn") for stage in range(COMPARED_STAGES)
    ]
