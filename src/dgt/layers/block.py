"""The Dynamic Group Transformer block (Eqs. 8-10): position encoding, attention, feed-forward, each with a residual.

The blocks that the paper compares itself with are the same with parts left out: Swin's and CSWin's have no position
encoding in the block and a plain feed-forward network; CMT's has both, and gives its attention a table of positions.
"""

from collections.abc import Callable
from typing import Any, Final

from timm.layers import DropPath, LayerNorm
from torch import Tensor, nn

from dgt.layers.convolution import ConditionalPositionEncoding, InvertedResidualFFN, keep_real
from dgt.layers.reduced import ReducedAttention


class FeedForward(nn.Module):
    """The plain feed-forward network: linear, GELU, linear; token by token, so a mask changes nothing.

    Args:
        dim: channels in and out.
        ratio: expansion R.
        drop: dropout rate after both linears.
    """

    def __init__(self, dim: int, ratio: float = 4.0, drop: float = 0.0, **factory: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, int(dim * ratio), **factory)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(int(dim * ratio), dim, **factory)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


FEED_FORWARDS = ("irffn", "mlp")


class Block(nn.Module):
    """One block around any attention that maps (B, H, W, C) and a mask to (B, H, W, C).

    Args:
        dim: channels C.
        attention: the attention module.
        mlp_ratio: expansion R of the feed-forward network.
        post_norm: normalise what attention and feed-forward return (Swin v2; DGT-S and -B) and not what they get.
        drop: dropout rate of the feed-forward network.
        drop_path: stochastic depth rate.
        cpe: whether the block begins with a conditional position encoding.
        ffn: the feed-forward network: ``"irffn"`` or ``"mlp"``.

    Raises:
        ValueError: for another ``ffn``.
    """

    takes_position: Final[bool]

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        mlp_ratio: float = 4.0,
        post_norm: bool = False,
        drop: float = 0.0,
        drop_path: float = 0.0,
        cpe: bool = True,
        ffn: str = "irffn",
        **factory: Any,
    ) -> None:
        super().__init__()
        if ffn not in FEED_FORWARDS:
            raise ValueError(f"ffn must be 'irffn' or 'mlp', got {ffn!r}")
        self.post_norm = post_norm
        self.takes_position = isinstance(attention, ReducedAttention)
        self.cpe = ConditionalPositionEncoding(dim, **factory) if cpe else None
        self.norm1 = LayerNorm(dim, **factory)
        self.attn = attention
        self.norm2 = LayerNorm(dim, **factory)
        feed_forward: Callable[..., nn.Module] = InvertedResidualFFN if ffn == "irffn" else FeedForward
        self.ffn = feed_forward(dim, mlp_ratio, drop, **factory)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, position: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C).

        Args:
            x: the map.
            mask: optional bool (B, H, W), True where a token is real.
            position: optional (H, L, K) scores of positions, for CMT's attention.
        """
        x = self.positioned(x, mask)
        if self.post_norm:
            x = x + self.drop_path1(self.norm1(self.attend(x, mask, position)))
            return x + self.drop_path2(self.norm2(self.ffn(x, mask)))
        x = x + self.drop_path1(self.attend(self.norm1(x), mask, position))
        return x + self.drop_path2(self.ffn(self.norm2(x), mask))

    def positioned(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Apply the position encoding, if there is one (Eq. 8)."""
        x = keep_real(x, mask)
        if self.cpe is not None:
            x = x + self.cpe(x)
        return x

    def attend(self, x: Tensor, mask: Tensor | None, position: Tensor | None) -> Tensor:
        """Apply the attention; only CMT's takes positions from outside."""
        if self.takes_position:
            return self.attn(x, mask, position)
        else:  # TorchScript compiles the branch of a constant only if there are two
            return self.attn(x, mask)

    def attention_input(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what the attention gets for the block's input ``x``: for figures and measures."""
        x = self.positioned(x, mask)
        return x if self.post_norm else self.norm1(x)
