"""Class and register tokens: they are no patches, belong to no group, and see and are seen by
everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

TOKENS = frozenset(  # parameters that become tokens before the patches
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
    """Special tokens in every frame of a video, or of a set of views.

    Attributes:
        count: how many of a frame's tokens, its first ones, are special.
        period: tokens of a frame.

    Example:
        >>> dgt.accelerate(model, frames, special_tokens=dgt.FrameTokens(5, 1041))
    """

    count: int
    period: int


SpecialTokens: TypeAlias = int | Sequence[int] | FrameTokens
"""How many, at the start; or at which places; or how many in each frame."""


def count_special_tokens(model: nn.Module, name: str) -> int | None:
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
        found = [
            parameter
            for place in (part, *embeddings)
            for own, parameter in place.named_parameters(recurse=False)
            if own in TOKENS
        ]
        if found:
            return sum(tensor.shape[-2] if tensor.dim() > 1 else 1 for tensor in found)
    return None


def special_places(special: SpecialTokens, tokens: int) -> list[int]:
    """The places of the special tokens in a sequence of so many; those outside of it are left
    out.
    """
    if isinstance(special, int):
        return list(range(min(special, tokens)))
    if isinstance(special, FrameTokens):
        return [place for place in range(tokens) if place % special.period < special.count]
    return [place for place in special if place < tokens]


def as_count(places: Sequence[int]) -> SpecialTokens:
    """How many these places are where they are at the start, else the places."""
    return len(places) if list(places) == list(range(len(places))) else list(places)


def front_order(places: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """(L,) int64: the special tokens, then all others in their order."""
    is_special = torch.zeros(tokens, dtype=torch.bool)
    is_special[list(places)] = True
    return torch.argsort(~is_special, stable=True).to(device)
