"""What the selection of keys is worth in a model: how much of global attention it keeps, and how balanced groups are.

The paper argues that a group's few keys hold most of what global attention would look at, and more than a window near
the query does, or the same keys for all. :func:`diagnose` measures that, layer by layer, on any images.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.models.inspection import evaluation_mode
from dgt.ops.attention_mass import attention_mass_of_choices


class BlockDiagnosis(NamedTuple):
    """One DG-Attention layer. Masses are shares of global attention, means over images, heads and queries."""

    name: str
    """Name of the layer in the model, e.g. ``stages.0.blocks.0.attn``."""
    tokens: int
    """Tokens of an image, L."""
    groups: int
    """G."""
    top_k: int
    """k; where it reaches ``tokens``, every mass is 1."""
    selected: float
    """Mass on the keys that the query's group selected."""
    random: float
    """Mass that as many keys, drawn at random, hold in expectation."""
    window: float | None
    """Mass on as many keys in a square window around the query (clipped at the border and grown to the same number);
    None where the layer gets tokens without a grid."""
    best_for_all: float
    """Mass on the k keys that hold most for all queries of a head together: the most one group could reach."""
    best_for_group: float
    """Mass on the k keys that hold most for the queries of the group together: the most any choice for groups could."""
    best_for_query: float
    """Mass on every query's own k strongest keys: the most any choice could."""
    perplexity: float
    """exp(entropy) of the group sizes of all images together, mean over heads; G where all groups are of one size."""
    perplexity_per_image: float
    """The same, image by image."""
    groups_in_use: float
    """Groups with a query, of all images together, mean over heads."""


@torch.no_grad()
def diagnose(model: nn.Module, images: Tensor, mask: Tensor | None = None) -> list[BlockDiagnosis]:
    """Measure what every DG-Attention layer of a model grouped and selected for a batch of images.

    The model runs once, in evaluation mode, and is left as it was. Memory grows with the square of the tokens, in
    slices of queries.

    Args:
        model: any module that contains :class:`dgt.DGAttention` layers.
        images: (B, C, H, W), as the model takes them.
        mask: optional bool (B, H, W), True where a pixel is real; for models whose ``forward_features`` takes one.

    Returns:
        One :class:`BlockDiagnosis` a layer, in the order in which they ran.

    Raises:
        TypeError: if ``model`` is no module.
        ValueError: for a model without such layers, and what the model itself raises for the images.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DGAttention)}
    if not layers:
        raise ValueError(f"model must contain DGAttention layers, got a {type(model).__name__} without any")
    found: list[BlockDiagnosis] = []

    def look(name: str) -> Callable[..., None]:
        def hook(layer: DGAttention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            found.append(_diagnose_layer(name, layer, *args, **options))

        return hook

    hooks = [layer.register_forward_pre_hook(look(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with evaluation_mode(model):
            if mask is None:
                model(images)
            else:
                model.forward_features(images, mask)  # type: ignore[operator]
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _diagnose_layer(
    name: str, layer: DGAttention, x: Tensor, mask: Tensor | None = None, **others: Any
) -> BlockDiagnosis:  # what else timm's blocks tell an attention that took the place of theirs decides no group
    query, key, _ = layer.split_heads(x)
    seen = layer.inspect(x, mask)
    grid = (x.shape[1], x.shape[2]) if x.dim() == 4 else None
    masses = attention_mass_of_choices(query, key, seen.group_ids, seen.key_ids, layer.scale, grid)
    means = {choice: float(value[seen.group_ids >= 0].mean()) for choice, value in masses.items()}
    groups = layer.centroids.shape[1]
    counts = _group_sizes(seen.group_ids, groups)  # (B, H, G)
    together = counts.sum(0)
    return BlockDiagnosis(
        name,
        query.shape[2],
        groups,
        layer.top_k,
        window=means.pop("window", None),
        **means,
        perplexity=float(_perplexity(together).mean()),
        perplexity_per_image=float(_perplexity(counts).mean()),
        groups_in_use=float((together > 0).sum(-1).double().mean()),
    )


def _group_sizes(group_ids: Tensor, groups: int) -> Tensor:
    """(B, H, L) groups, -1 for padding, to (B, H, G) numbers of queries."""
    shifted = nn.functional.one_hot(group_ids + 1, groups + 1).sum(2)
    return shifted[..., 1:]


def _perplexity(counts: Tensor) -> Tensor:
    """exp(entropy) of sizes along the last axis."""
    share = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(-1).exp()
