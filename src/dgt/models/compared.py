"""The parts of the models that the paper compares itself with, in the place of DGT's.

The ablation of blocks (Table 4 (c)) changes ``attention``, ``cpe`` and ``ffn`` in DGT's own
skeleton; the hybrids of the appendix change ``attention`` and ``cpe`` in Swin's and CSWin's; CMT,
ViL and CrossFormer are rebuilt as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from timm.models import checkpoint
from torch import Tensor, nn

from dgt.layers import Block, DGAttention, GlobalAttention, PatchMerging, mask_padding
from dgt.layers.baselines.cmt import PositionTable, ReducedAttention
from dgt.layers.baselines.crossformer import (
    CrossScaleMerging,
    CrossScaleStem,
    LongShortDistanceAttention,
)
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.longformer import (
    GlobalTokensAndPositions,
    LongformerAttention,
    LongformerBlock,
)
from dgt.layers.baselines.random_keys import RandomKeyAttention
from dgt.layers.baselines.swin import PatchConcatenation, PatchStem, WindowAttention
from dgt.models.parts import Parts, Stage
from dgt.utils.errors import UserError

Factory = Callable[..., nn.Module]


class PatchConvolution(nn.Module):
    """The patch merging of CMT and ViL: a convolution of 2 x 2 tokens, then LayerNorm."""

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.merge = PatchStem(in_dim, dim, 2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        return self.merge(x.permute(0, 3, 1, 2))


class AttentionKind(NamedTuple):
    """A kind of attention.

    Attributes:
        attention: makes the layer.
        extent: name of the argument that a stage's extent is; "" for none.
        block: the block around it.
    """

    attention: Factory
    extent: str = ""
    block: type[Block] = Block


class Skeleton(NamedTuple):
    """What is around the blocks.

    Attributes:
        merge: patch merging.
        stem: makes the tokens of stage one by itself; None for DGT's, with a merging after it.
    """

    merge: Factory = PatchMerging
    stem: Factory | None = None


KINDS = {
    "group": AttentionKind(DGAttention),
    "global": AttentionKind(GlobalAttention),
    "window": AttentionKind(WindowAttention, "window"),
    "plain window": AttentionKind(partial(WindowAttention, table=False), "window"),
    "random": AttentionKind(RandomKeyAttention, "top_k"),
    "stripe": AttentionKind(StripeAttention, "width"),
    "reduced": AttentionKind(ReducedAttention, "ratio"),
    "sliding window": AttentionKind(LongformerAttention, "window", LongformerBlock),
    "long-short": AttentionKind(LongShortDistanceAttention, "group"),
}
SKELETONS = {
    "dgt": Skeleton(),
    "swin": Skeleton(PatchConcatenation, PatchStem),
    "cswin": Skeleton(PatchMerging, partial(PatchStem, overlap=True)),
    "cmt": Skeleton(PatchConvolution),
    "vil": Skeleton(PatchConvolution, PatchStem),
    "crossformer": Skeleton(CrossScaleMerging, CrossScaleStem),
}


class LongformerStage(Stage):
    """A stage of ViL: patch merging, positions and global tokens, blocks.

    Args:
        merge: as in :class:`dgt.models.parts.Stage`.
        blocks: map global tokens and those of a map, (B, T, C), to the same shape.
        tokens: adds positions and global tokens, which end with the stage.
    """

    def __init__(self, merge: nn.Module, blocks: list[Block], tokens: nn.Module) -> None:
        super().__init__(merge, blocks)
        self.tokens = tokens

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Merge patches and run the blocks, as :meth:`dgt.models.parts.Stage.forward`."""
        x = self.merge(x)
        rows, columns = x.shape[1], x.shape[2]
        tokens = self.tokens(x)
        real = None if mask is None else mask.flatten(1)
        if self.grad_checkpointing and torch.is_grad_enabled():
            tokens = self.run_tokens_checkpointed(tokens, rows, columns, real)
        else:
            for block in self.blocks:
                tokens = block(tokens, rows, columns, real)
        x = tokens[:, tokens.shape[1] - rows * columns :].unflatten(1, [rows, columns])
        return mask_padding(x, mask)

    def run_tokens_checkpointed(
        self, tokens: Tensor, rows: int, columns: int, real: Tensor | None
    ) -> Tensor:
        """Run the blocks on (B, T, C), keeping only their inputs for the backward pass."""
        for block in self.blocks:
            tokens = checkpoint(block, tokens, rows, columns, real)
        return tokens


@dataclass(frozen=True)
class ComparedParts(Parts):
    """Parts of the models that the paper compares itself with.

    Args:
        attention: kind of attention of each stage: ``"group"``, ``"global"``, ``"window"``
            (Swin's), ``"plain window"`` (without its table of positions), ``"stripe"`` (CSWin's),
            ``"reduced"`` (CMT's), ``"random"`` keys, ``"sliding window"`` (ViL's) or
            ``"long-short"`` distance (CrossFormer's).
        extents: of each stage, in tokens: the side of a window or group, the width of a stripe (0:
            the whole map), the ratio of reduction, or the number of random keys; the other kinds
            need none.
        intervals: of each stage, the interval of CrossFormer's long distance attention, in tokens.
        global_tokens: of each stage, the number of ViL's global tokens.
        table_side: side of the first stage's map, in tokens, that CMT's and ViL's positions are
            made for.
        cpe, ffn: the position encoding and feed-forward network of the blocks, as in
            :class:`dgt.layers.Block`.
        skeleton: stem, patch merging and head around the blocks: ``"dgt"``, ``"cmt"`` with its own
            merging, or ``"swin"``, ``"cswin"``, ``"vil"`` or ``"crossformer"``; the last four have
            patches of 2 ``stem_stride`` pixels, no ``stem_width`` and no ``head_width``.

    Raises:
        UserError: for another skeleton or kind of attention.
    """

    attention: tuple[str, ...] = ("group", "group", "group", "global")
    extents: tuple[int, ...] = (0, 0, 0, 0)
    intervals: tuple[int, ...] = (8, 4, 2, 1)
    global_tokens: tuple[int, ...] = (1, 1, 1, 0)
    table_side: int = 56
    cpe: bool = True
    ffn: str = "irffn"
    skeleton: str = "dgt"

    def __post_init__(self) -> None:
        if self.skeleton not in SKELETONS:
            known = ", ".join(SKELETONS)
            raise UserError(f"skeleton must be one of {known}, got {self.skeleton!r}")
        for kind in self.attention:
            if kind not in KINDS:
                known = ", ".join(KINDS)
                raise UserError(f"attention must be one of {known} for every stage, got {kind!r}")

    @property
    def patches(self) -> bool:  # type: ignore[override]
        """Whether the stem alone makes the tokens of stage one."""
        return SKELETONS[self.skeleton].stem is not None

    def check(self, stages: int) -> None:
        """Check that every stage has an attention and its settings.

        Raises:
            UserError: the number of ``stages`` is another.
        """
        if not len(self.attention) == len(self.extents) == stages:
            came = f"{self.attention} and {self.extents} for {stages} stages"
            raise UserError(
                "dims, depths, num_heads, attention and extents must be equally long, got " + came
            )
        if "long-short" in self.attention:
            self._check_length("intervals", self.intervals, stages)
        if "sliding window" in self.attention:
            self._check_length("global_tokens", self.global_tokens, stages)

    def _check_length(self, name: str, values: tuple[int, ...], stages: int) -> None:
        """Raise UserError unless there is a value for each stage."""
        if len(values) != stages:
            raise UserError(
                f"{name} must have one number for each of {stages} stages, got {values}"
            )

    def make_stem(
        self, in_chans: int, width: int, dim: int, stride: int, **factory: Any
    ) -> nn.Module:
        """Make DGT's stem, or one of patches."""
        stem = SKELETONS[self.skeleton].stem
        if stem is None:
            return super().make_stem(in_chans, width, dim, stride, **factory)
        return stem(in_chans, dim, stride, **factory)

    def make_merge(self, in_dim: int, dim: int, **factory: Any) -> nn.Module:
        """Make the skeleton's patch merging."""
        return SKELETONS[self.skeleton].merge(in_dim, dim, **factory)

    def make_block(
        self,
        place: tuple[int, int],
        last: bool,
        groups: dict[str, Any],
        attention: dict[str, Any],
        **options: Any,
    ) -> Block:
        """Make a block with the stage's kind of attention; as :meth:`Parts.make_block`.

        In every second block, Swin's windows are shifted and CrossFormer's attention is distant.
        """
        stage, index = place
        kind = KINDS[self.attention[stage]]
        second = index % 2 == 1
        settings = dict(groups) if self.attention[stage] == "group" else {}
        if kind.extent:
            settings[kind.extent] = self.extents[stage]
        if self.attention[stage] in ("window", "plain window") and second:
            settings["shift"] = self.extents[stage] // 2
        if self.attention[stage] == "long-short" and second:
            settings["interval"] = self.intervals[stage]
        layer = kind.attention(**settings, **attention)
        return kind.block(attention=layer, cpe=self.cpe, ffn=self.ffn, **options)

    def make_stage(
        self,
        index: int,
        last: bool,
        dims: tuple[int, int],
        num_heads: int,
        *arguments: Any,
        **factory: Any,
    ) -> Stage:
        """Make the stage, with CMT's table of positions, or ViL's positions and global tokens.

        Arguments as in :meth:`Parts.make_stage`.
        """
        stage = super().make_stage(index, last, dims, num_heads, *arguments, **factory)
        side = -(-self.table_side // 2**index)
        if self.attention[index] == "reduced":
            stage.position = PositionTable(num_heads, side, self.extents[index], **factory)
        if self.attention[index] == "sliding window":
            count = self.global_tokens[index]
            tokens = GlobalTokensAndPositions(dims[1], side, count, **factory)
            return LongformerStage(stage.merge, cast(list[Block], list(stage.blocks)), tokens)
        return stage
