"""Prefix tokens, class and register tokens: they are no patches, belong to no group, and attend to
and are attended by all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

PREFIX_PARAMETERS = frozenset(  # names of those that become tokens before the patches
    {
        "cls_token",  # timm, DINO
        "class_token",  # torchvision
        "class_embedding",  # Hugging Face's CLIP
        "dist_token",
        "distillation_token",
        "reg_token",
        "register_tokens",
        "storage_tokens",  # DINOv3's own code
    }
)


@dataclass(frozen=True)
class FrameTokens:
    """prefix tokens in every frame of a video, or of a set of views.

    Attributes:
        count: how many of a frame's tokens, its first ones, are prefix tokens.
        period: tokens of a frame.

    Example:
        >>> dgt.accelerate(model, frames, num_prefix_tokens=dgt.FrameTokens(5, 1041))
    """

    count: int
    period: int


PrefixTokens: TypeAlias = int | Sequence[int] | FrameTokens
"""How many, at the start; or at which positions; or how many in each frame."""


def count_prefix_tokens(model: nn.Module, name: str) -> int | None:
    """Class and register tokens before the patches of a module; None where nothing tells.

    The innermost part around the module that tells counts: by ``num_prefix_tokens``, as timm's
    models have it, or by parameters of its own or of its embeddings that become tokens.
    """
    while name:
        name = name.rpartition(".")[0]
        part = model.get_submodule(name)
        count = getattr(part, "num_prefix_tokens", None)
        if isinstance(count, int):
            return count
        embeddings = [child for child_name, child in part.named_children() if "embed" in child_name]
        tokens = [
            parameter
            for module in (part, *embeddings)
            for parameter_name, parameter in module.named_parameters(recurse=False)
            if parameter_name in PREFIX_PARAMETERS
        ]
        if tokens:
            return sum(tensor.shape[-2] if tensor.dim() > 1 else 1 for tensor in tokens)
    return None


def prefix_positions(prefix: PrefixTokens, tokens: int) -> list[int]:
    """The positions of the prefix tokens in a sequence of so many; those outside of it are left
    out.
    """
    if isinstance(prefix, int):
        return list(range(min(prefix, tokens)))
    if isinstance(prefix, FrameTokens):
        return [at for at in range(tokens) if at % prefix.period < prefix.count]
    return [at for at in prefix if at < tokens]


def as_count(positions: Sequence[int]) -> PrefixTokens:
    """How many these positions are where they are at the start, else the positions."""
    return len(positions) if list(positions) == list(range(len(positions))) else list(positions)


def front_order(positions: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """(L,) int64: the prefix tokens, then all others in their order."""
    is_prefix = torch.zeros(tokens, dtype=torch.bool, device=device)
    is_prefix[list(positions)] = True
    return torch.argsort(~is_prefix, stable=True)
