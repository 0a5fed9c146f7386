"""What all layers that only predict share: what they refuse, and the block that holds them."""

from typing import Any

import torch
from torch import Tensor, nn

from dgt.layers import Block, mask_padding
from dgt.ops.checks import has_tangent, is_exporting

ORIGINAL = "a model optimized for inference only predicts"


class Frozen(nn.Module):
    """A layer that only predicts: it refuses gradients, training, exports and state dicts."""

    def check_prediction(self, x: Tensor) -> None:
        """Raise RuntimeError where more than a prediction is asked of an input.

        That is gradients, or a record of the calls for another process.
        """
        if (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x):
            raise RuntimeError(f"{ORIGINAL}: take gradients of the original model")
        if torch.jit.is_tracing() or is_exporting():
            raise RuntimeError(f"{ORIGINAL}: export or trace the original model")

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode; RuntimeError when asked to train."""
        if mode:
            raise RuntimeError(f"{ORIGINAL}: train the original model")
        return super().train(False)

    def _save_to_state_dict(self, *_: Any) -> None:
        raise RuntimeError(f"{ORIGINAL} and has no state dict: save the original, or pickle it")

    def _load_from_state_dict(self, *_: Any) -> None:
        raise RuntimeError(f"{ORIGINAL} and takes no state dict: load it into the original")


class FrozenBlock(nn.Module):
    """A :class:`dgt.layers.Block` with its position encoding and that one's residual in one.

    Args:
        block: its other parts become those of this one.
        position: maps (B, H, W, C) to ``x + cpe(x)`` (Eq. 8).
    """

    def __init__(self, block: Block, position: nn.Module) -> None:
        super().__init__()
        self.post_norm = block.post_norm
        self.position = position
        self.norm1 = block.norm1
        self.attn = block.attn
        self.norm2 = block.norm2
        self.ffn = block.ffn
        self.drop_path1 = block.drop_path1
        self.drop_path2 = block.drop_path2
        self.training = False

    def forward(self, x: Tensor, mask: Tensor | None = None, *extra: Any) -> Tensor:
        """As :meth:`dgt.layers.Block.forward`."""
        x = self.position(mask_padding(x, mask))
        if self.post_norm:
            x = x + self.drop_path1(self.norm1(self.attn(x, mask, *extra)))
            return x + self.drop_path2(self.norm2(self.ffn(x, mask)))
        x = x + self.drop_path1(self.attn(self.norm1(x), mask, *extra))
        return x + self.drop_path2(self.ffn(self.norm2(x), mask))
