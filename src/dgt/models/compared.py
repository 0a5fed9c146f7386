"""What the paper compares its model with, as parts in its place: Table 4 (c) and the hybrids of the appendix.

The ablation of blocks changes ``attention``, ``cpe`` and ``ffn`` in DGT's own skeleton; the hybrids change
``attention`` and ``cpe`` in Swin's and CSWin's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from dgt.layers import Block, DGAttention, GlobalAttention, PatchMerging
from dgt.layers.baselines.cmt import CMTBlock, PositionTable, ReducedAttention
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.random_keys import RandomKeyAttention
from dgt.layers.baselines.swin import PatchConcatenation, PatchStem, WindowAttention
from dgt.models.dgt import Parts, Stage
from dgt.utils.errors import UserError

KINDS: dict[str, tuple[Callable[..., nn.Module], str]] = {  # with the name of what `extents` gives
    "group": (DGAttention, ""),
    "global": (GlobalAttention, ""),
    "window": (WindowAttention, "window"),
    "plain window": (partial(WindowAttention, table=False), "window"),
    "random": (RandomKeyAttention, "top_k"),
    "stripe": (StripeAttention, "width"),
    "reduced": (ReducedAttention, "ratio"),
}
SKELETONS = ("dgt", "swin", "cswin", "cmt")


class PatchConvolution(nn.Module):
    """CMT's patch merging: a convolution of 2 x 2 tokens to ``dim`` channels, then LayerNorm."""

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.merge = PatchStem(in_dim, dim, 2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        return self.merge(x.permute(0, 3, 1, 2))


@dataclass(frozen=True)
class ComparedParts(Parts):
    """Parts of the models that the paper compares itself with.

    Args:
        attention: kind of attention of each stage: ``"group"``, ``"global"``, ``"window"`` (Swin's), ``"plain window"``
            (without its table of positions), ``"stripe"`` (CSWin's), ``"reduced"`` (CMT's) or ``"random"`` keys.
        extents: of each stage, the side of a window, the width of a stripe (0: the whole map), the ratio of reduction,
            in tokens, or the number of random keys; the other kinds need none.
        table_side: side of the first stage's map, in tokens, that CMT's position tables are made for.
        cpe, ffn: the position encoding and feed-forward network of the blocks, as in :class:`dgt.layers.Block`.
        skeleton: stem, patch merging and head around the blocks: ``"dgt"``, ``"cmt"`` with its own merging, ``"swin"``
            or ``"cswin"``; the last two have patches of 2 ``stem_stride`` pixels, no ``stem_width``, no ``head_width``.

    Raises:
        UserError: for another skeleton or kind of attention.
    """

    attention: tuple[str, ...] = ("group", "group", "group", "global")
    extents: tuple[int, ...] = (0, 0, 0, 0)
    table_side: int = 56
    cpe: bool = True
    ffn: str = "irffn"
    skeleton: str = "dgt"

    def __post_init__(self) -> None:
        if self.skeleton not in SKELETONS:
            raise UserError(f"skeleton must be one of {', '.join(SKELETONS)}, got {self.skeleton!r}")
        for kind in self.attention:
            if kind not in KINDS:
                raise UserError(f"attention must be one of {', '.join(KINDS)} for every stage, got {kind!r}")

    @property
    def patches(self) -> bool:  # type: ignore[override]
        """Whether the stem alone makes the tokens of stage one."""
        return self.skeleton in ("swin", "cswin")

    def check(self, stages: int) -> None:
        """Raise UserError unless there are an attention and an extent for each of so many stages."""
        if not len(self.attention) == len(self.extents) == stages:
            came = f"{self.attention} and {self.extents} for {stages} stages"
            raise UserError(f"dims, depths, num_heads, attention and extents must be equally long, got {came}")

    def make_stem(self, in_chans: int, width: int, dim: int, stride: int, **factory: Any) -> nn.Module:
        """DGT's stem, or a convolution of patches."""
        if not self.patches:
            return super().make_stem(in_chans, width, dim, stride, **factory)
        return PatchStem(in_chans, dim, stride, overlap=self.skeleton == "cswin", **factory)

    def make_merge(self, in_dim: int, dim: int, **factory: Any) -> nn.Module:
        """A strided convolution, CMT's smaller one, or Swin's concatenation."""
        merges: dict[str, Callable[..., nn.Module]] = {"swin": PatchConcatenation, "cmt": PatchConvolution}
        return merges.get(self.skeleton, PatchMerging)(in_dim, dim, **factory)

    def make_block(
        self, place: tuple[int, int], last: bool, groups: dict[str, Any], attention: dict[str, Any], **options: Any
    ) -> Block:
        """A block with the stage's kind of attention; windows are shifted in every second block."""
        kind, extent = self.attention[place[0]], self.extents[place[0]]
        cls, name = KINDS[kind]
        own: dict[str, Any] = {name: extent} if name else groups if kind == "group" else {}
        if name == "window" and place[1] % 2:
            own["shift"] = extent // 2
        block = CMTBlock if kind == "reduced" else Block
        return block(attention=cls(**own, **attention), cpe=self.cpe, ffn=self.ffn, **options)

    def make_stage(self, index: int, last: bool, dims: tuple[int, int], num_heads: int, *args: Any, **kw: Any) -> Stage:
        """The stage, with a table of positions where CMT has one."""
        stage = super().make_stage(index, last, dims, num_heads, *args, **kw)
        if self.attention[index] == "reduced":
            stage.position = PositionTable(num_heads, -(-self.table_side // 2**index), self.extents[index], **kw)
        return stage
