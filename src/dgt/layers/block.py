"""The Dynamic Group Transformer block (Eqs. 8-10): position, attention, feed-forward network.

Each of the three has a residual. Swin's and CSWin's blocks, which the paper compares itself with,
are the same with parts left out: no position encoding in the block, and a plain feed-forward
network.
"""

from collections.abc import Callable
from typing import Any

from timm.layers import DropPath
from torch import Tensor, nn

from dgt.layers.convolution import (
    ConditionalPositionEncoding,
    InvertedResidualFFN,
    LayerNorm,
    add_position,
    mask_padding,
)
from dgt.layers.plain import can_be_skipped


class FeedForward(nn.Module):
    """The plain feed-forward network: linear, GELU, linear, with dropout.

    It works token by token, so a mask changes nothing.

    Args:
        dim: channels C.
        ratio: expansion R.
        drop: dropout rate.
        factory: ``device`` and ``dtype``.

    Example:
        >>> FeedForward(64)(torch.randn(2, 7, 7, 64)).shape
        torch.Size([2, 7, 7, 64])
    """

    def __init__(self, dim: int, ratio: float = 4.0, drop: float = 0.0, **factory: Any) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.fc1 = nn.Linear(dim, hidden, **factory)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim, **factory)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, ..., C) to the same shape."""
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "irffn": InvertedResidualFFN,
    "mlp": FeedForward,
}


@can_be_skipped
class Block(nn.Module):
    """One block around any attention that maps (B, H, W, C) and a mask to (B, H, W, C).

    Args:
        dim: channels C.
        attention: the attention module.
        mlp_ratio: expansion R of the feed-forward network.
        post_norm: normalize what attention and feed-forward network return (Swin v2; DGT-S and -B)
            instead of what they get.
        drop: dropout rate of the feed-forward network.
        drop_path: stochastic depth rate.
        cpe: whether the block begins with a conditional position encoding.
        ffn: the feed-forward network: ``"irffn"`` or ``"mlp"``.
        factory: ``device`` and ``dtype``.

    Raises:
        ValueError: for another ``ffn``.

    Example:
        >>> block = Block(64, attention=DGAttention(dim=64, num_heads=2))
        >>> block(torch.randn(2, 56, 56, 64)).shape
        torch.Size([2, 56, 56, 64])
    """

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
        self.cpe = ConditionalPositionEncoding(dim, **factory) if cpe else None
        self.norm1 = LayerNorm(dim, **factory)
        self.attn = attention
        self.norm2 = LayerNorm(dim, **factory)
        self.ffn = FEED_FORWARDS[ffn](dim, mlp_ratio, drop, **factory)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, *extra: Any) -> Tensor:
        """Apply Eqs. 8-10.

        Args:
            x: (B, H, W, C).
            mask: bool (B, H, W), True where a token is real, or None.
            extra: what the attention takes beside these.

        Returns:
            (B, H, W, C).
        """
        x = mask_padding(x, mask)
        if self.cpe is not None:
            x = add_position(x, self.cpe)
        if self.post_norm:
            x = x + self.drop_path1(self.norm1(self.attn(x, mask, *extra)))
            return x + self.drop_path2(self.norm2(self.ffn(x, mask)))
        x = x + self.drop_path1(self.attn(self.norm1(x), mask, *extra))
        return x + self.drop_path2(self.ffn(self.norm2(x), mask))
