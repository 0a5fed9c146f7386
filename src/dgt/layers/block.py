"""The Dynamic Group Transformer block (Eqs. 8-10): position encoding, attention, feed-forward, each with a residual."""

from typing import Any

from timm.layers import DropPath, LayerNorm
from torch import Tensor, nn

from dgt.layers.convolution import ConditionalPositionEncoding, InvertedResidualFFN, keep_real


class Block(nn.Module):
    """One block around any attention that maps (B, H, W, C) and a mask to (B, H, W, C).

    Args:
        dim: channels C.
        attention: the attention module.
        mlp_ratio: expansion R of the feed-forward network.
        post_norm: normalise what attention and feed-forward return (Swin v2; DGT-S and -B) and not what they get.
        drop: dropout rate of the feed-forward network.
        drop_path: stochastic depth rate.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        mlp_ratio: float = 4.0,
        post_norm: bool = False,
        drop: float = 0.0,
        drop_path: float = 0.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.cpe = ConditionalPositionEncoding(dim, **factory)
        self.norm1 = LayerNorm(dim, **factory)
        self.attn = attention
        self.norm2 = LayerNorm(dim, **factory)
        self.ffn = InvertedResidualFFN(dim, mlp_ratio, drop, **factory)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C); ``mask`` is bool (B, H, W), True where a token is real."""
        x = keep_real(x, mask)
        x = x + self.cpe(x)
        if self.post_norm:
            x = x + self.drop_path1(self.norm1(self.attn(x, mask)))
            return x + self.drop_path2(self.norm2(self.ffn(x, mask)))
        x = x + self.drop_path1(self.attn(self.norm1(x), mask))
        return x + self.drop_path2(self.ffn(self.norm2(x), mask))

    def attention_input(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what the attention gets for the block's input ``x``: for figures and measures."""
        x = keep_real(x, mask)
        x = x + self.cpe(x)
        return x if self.post_norm else self.norm1(x)
