"""The parts that a Dynamic Group Transformer is made of, and the stage that they make up."""

from typing import Any

import torch
from timm.models import checkpoint
from torch import Tensor, nn

from dgt.layers import (
    Block,
    ConvStem,
    DGAttention,
    GlobalAttention,
    PatchMerging,
    mask_padding,
)


class Stage(nn.Module):
    """Patch merging, then blocks.

    Args:
        merge: maps (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim).
        blocks: map (B, H, W, dim) and a mask to (B, H, W, dim).
    """

    def __init__(self, merge: nn.Module, blocks: list[Block]) -> None:
        super().__init__()
        self.merge = merge
        self.blocks = nn.ModuleList(blocks)
        self.position: nn.Module | None = None  # a table of positions that CMT's blocks share
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Merge patches and run the blocks.

        Args:
            x: (B, H, W, in_dim).
            mask: bool, of the resolution of the result, True where a token is real, or None.

        Returns:
            (B, ceil(H / 2), ceil(W / 2), dim), zero where a token is padding.
        """
        x = self.merge(x)
        if self.grad_checkpointing and torch.is_grad_enabled():
            x = self.run_checkpointed(x, mask)
        elif self.position is None:
            for block in self.blocks:
                x = block(x, mask)
        else:
            position = self.position(x)
            for block in self.blocks:
                x = block(x, mask, position)
        return mask_padding(x, mask)

    def run_checkpointed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Run the blocks on (B, H, W, C), keeping only their inputs for the backward pass."""
        extra = () if self.position is None else (self.position(x),)
        for block in self.blocks:
            x = checkpoint(block, x, mask, *extra)
        return x


class Parts:
    """The kinds of parts that a model is made of: the paper's.

    :mod:`dgt.models.compared` has the others.
    """

    patches = False  # whether the stem alone makes the tokens of stage one, as in Swin and CSWin

    def check(self, stages: int) -> None:
        """Check that these are the parts of a model with that many stages.

        Raises:
            ValueError: they are not.
        """

    def make_stem(
        self, in_chans: int, width: int, dim: int, stride: int, **factory: Any
    ) -> nn.Module:
        """Make the stem: to ``width`` channels, or if it makes patches, to ``dim`` of stage one."""
        return ConvStem(in_chans, width, stride, **factory)

    def make_merge(self, in_dim: int, dim: int, **factory: Any) -> nn.Module:
        """Make what halves the map before the blocks of a stage."""
        return PatchMerging(in_dim, dim, **factory)

    def make_block(
        self,
        place: tuple[int, int],
        last: bool,
        groups: dict[str, Any],
        attention: dict[str, Any],
        **options: Any,
    ) -> Block:
        """Make a block: its attention is in groups, but global in the last stage.

        Args:
            place: numbers of the stage, and of the block in it.
            last: whether it is the last stage.
            groups: arguments of DG-Attention alone.
            attention: arguments of any attention.
            options: of the block.
        """
        if last:
            return Block(attention=GlobalAttention(**attention), **options)
        return Block(attention=DGAttention(**groups, **attention), **options)

    def make_stage(
        self,
        index: int,
        last: bool,
        dims: tuple[int, int],
        num_heads: int,
        rates: list[float],
        groups: dict[str, Any],
        block: dict[str, Any],
        **factory: Any,
    ) -> Stage:
        """Put a stage together.

        Args:
            index: its number.
            last: whether it is the last one.
            dims: channels before and in it.
            num_heads: H.
            rates: stochastic depth rate of each block.
            groups: arguments of DG-Attention alone.
            block: arguments of the blocks.
            factory: ``device`` and ``dtype``.
        """
        first_of_patches = self.patches and index == 0
        merge = nn.Identity() if first_of_patches else self.make_merge(*dims, **factory)
        options = {"dim": dims[1], **block, **factory}
        attention = {
            "dim": dims[1],
            "num_heads": num_heads,
            "cosine": block["post_norm"],
            **factory,
        }
        blocks = []
        for j, rate in enumerate(rates):
            place = (index, j)
            made = self.make_block(place, last, groups, attention, drop_path=rate, **options)
            blocks.append(made)
        return Stage(merge, blocks)
