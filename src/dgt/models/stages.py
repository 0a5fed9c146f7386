"""The stages of a model and what they may be made of: kinds of attention, of blocks, and the skeletons around them.

Everything the paper compares is a row of these choices: the ablation of blocks changes ``attention``, ``cpe`` and
``ffn`` on DGT's own skeleton, the hybrids of the appendix change ``attention`` and ``cpe`` on Swin's and CSWin's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from timm.models import checkpoint
from torch import Tensor, nn

from dgt.layers import (
    Block,
    ConvStem,
    DGAttention,
    GlobalAttention,
    PatchConcatenation,
    PatchMerging,
    PatchStem,
    PositionTable,
    ReducedAttention,
    StripeAttention,
    WindowAttention,
    keep_real,
)

KINDS = ("group", "global", "window", "stripe", "reduced")
SKELETONS = ("dgt", "swin", "cswin")


class Stage(nn.Module):
    """Patch merging, then blocks.

    Args:
        merge: the merging of patches.
        blocks: the blocks.
        position: the table of positions that the blocks share (CMT's attention), or None.
    """

    def __init__(self, merge: nn.Module, blocks: list[Block], position: PositionTable | None = None) -> None:
        super().__init__()
        self.merge = merge
        self.blocks = nn.ModuleList(blocks)
        self.position = position
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim); ``mask`` is at the resolution of the result."""
        x = self.merge(x)
        position = self.positions(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, mask, position)
            else:
                x = block(x, mask, position)
        return keep_real(x, mask)

    def positions(self, x: Tensor) -> Tensor | None:
        """Return the (H, L, K) scores of positions for merged patches (B, H, W, C), or None where there are none."""
        if self.position is not None:
            return self.position(x)
        else:  # TorchScript compiles only one of two branches
            return None


@dataclass(frozen=True)
class Layout:
    """The arguments of a model that describe its stages, as in :class:`dgt.models.DynamicGroupTransformer`."""

    skeleton: str
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    attention: tuple[str, ...]
    extents: tuple[int, ...]
    table_side: int
    groups: dict[str, Any]
    block: dict[str, Any]
    drop_path_rate: float
    factory: dict[str, Any]

    def __post_init__(self) -> None:
        if self.skeleton not in SKELETONS:
            raise ValueError(f"skeleton must be one of {', '.join(SKELETONS)}, got {self.skeleton!r}")
        parts = (self.dims, self.depths, self.num_heads, self.attention, self.extents)
        if len({len(part) for part in parts}) != 1:
            came = ", ".join(map(str, parts))
            raise ValueError(f"dims, depths, num_heads, attention and extents must be equally long, got {came}")
        for kind in self.attention:
            if kind not in KINDS:
                raise ValueError(f"attention must be one of {', '.join(KINDS)} for every stage, got {kind!r}")

    def strides(self, stem_stride: int) -> list[int]:
        """Strides of the stem and of every stage; ``stem_stride`` is that of DGT's stem, half of the first stage's."""
        if stem_stride not in (1, 2):
            raise ValueError(f"stem_stride must be 1 or 2, got {stem_stride}")
        stages = [2 * stem_stride * 2**i for i in range(len(self.dims))]
        return [stem_stride if self.skeleton == "dgt" else stages[0], *stages]

    def stem(self, in_chans: int, width: int, stride: int) -> nn.Module:
        """The stem; ``width`` is that of DGT's, ``stride`` the whole stem's."""
        if self.skeleton == "dgt":
            return ConvStem(in_chans, width, stride, **self.factory)
        return PatchStem(in_chans, self.dims[0], stride, overlap=self.skeleton == "cswin", **self.factory)

    def stages(self, stem_width: int) -> list[Stage]:
        """All stages; ``stem_width`` is the number of channels that DGT's stem gives."""
        rates = torch.linspace(0, self.drop_path_rate, sum(self.depths), device="cpu").split(list(self.depths))
        return [
            Stage(
                self._merge(i, (stem_width, *self.dims)[i]),
                [self._block(i, j, rate) for j, rate in enumerate(rates[i].tolist())],
                self._table(i),
            )
            for i in range(len(self.dims))
        ]

    def _merge(self, i: int, in_dim: int) -> nn.Module:
        if self.skeleton != "dgt" and i == 0:
            return nn.Identity()
        merge = PatchConcatenation if self.skeleton == "swin" else PatchMerging
        return merge(in_dim, self.dims[i], **self.factory)

    def _block(self, i: int, j: int, drop_path: float) -> Block:
        return Block(self.dims[i], self._attention(i, j), drop_path=drop_path, **self.block, **self.factory)

    def _attention(self, i: int, j: int) -> nn.Module:
        """The attention of block j of stage i."""
        kind, extent = self.attention[i], self.extents[i]
        options: dict[str, Any] = {
            "dim": self.dims[i],
            "num_heads": self.num_heads[i],
            "cosine": self.block["post_norm"],
            **self.factory,
        }
        if kind == "group":
            return DGAttention(**self.groups, **options)
        if kind == "window":
            return WindowAttention(window=extent, shift=extent // 2 if j % 2 else 0, **options)
        if kind == "stripe":
            return StripeAttention(width=extent, **options)
        if kind == "reduced":
            return ReducedAttention(ratio=extent, **options)
        return GlobalAttention(**options)

    def _table(self, i: int) -> PositionTable | None:
        if self.attention[i] != "reduced":
            return None
        side = -(-self.table_side // 2**i)
        return PositionTable(self.num_heads[i], side, self.extents[i], **self.factory)
