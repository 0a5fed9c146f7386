"""The attention of a whole model: settings of all its layers, and what each of them grouped and selected."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dgt.layers import Block, DGAttention, keep_real_pixels
from dgt.layers.centroids import check_tau, check_tau_weighs
from dgt.models.dgt import DynamicGroupTransformer, check_images
from dgt.models.stages import Stage
from dgt.ops import DynamicGroupAttentionOutput
from dgt.ops.backends import resolve_backend
from dgt.ops.checks import check_count

SETTINGS = ("top_k", "backend", "tau", "tau_weighs")


def set_attention(model: nn.Module, **settings: Any) -> int:
    """Set attributes of every DG-Attention layer of a model, e.g. ``set_attention(model, top_k=500, backend="eager")``.

    Args:
        model: any module that contains :class:`dgt.DGAttention` layers.
        settings: ``top_k`` (int >= 1), ``backend``, ``tau`` (None, or from 0 to 1), ``tau_weighs`` ("old" or "new").

    Returns:
        The number of layers set.

    Raises:
        TypeError: for an unknown setting, or a value of a wrong type.
        ValueError: for a value out of range, or a model without such a layer; nothing is set then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    layers = [module for module in model.modules() if isinstance(module, DGAttention)]
    if not layers:
        raise ValueError(f"model must contain DGAttention layers, got a {type(model).__name__} without any")
    for name, value in settings.items():
        _check_setting(name, value)
    for layer in layers:
        for name, value in settings.items():
            setattr(layer, name, value)
    return len(layers)


def _check_setting(name: str, value: Any) -> None:
    if name not in SETTINGS:
        raise TypeError(f"settings must be among {', '.join(SETTINGS)}, got {name!r}")
    if name == "top_k":
        check_count("top_k", value)
    elif name == "backend":
        resolve_backend(value)
    elif name == "tau":
        check_tau(value)
    else:
        check_tau_weighs(value)


class GroupRecord(NamedTuple):
    """Groups and keys of one DG-Attention layer for a batch of images."""

    name: str
    """Name of the layer in the model, e.g. ``stages.0.blocks.0.attn``."""
    grid: tuple[int, int]
    """Height and width in tokens."""
    attention: DynamicGroupAttentionOutput
    """``group_ids`` (B, H, L), ``key_ids`` (B, H, G, K), and the output before projection."""


class BlockVisit(NamedTuple):
    """One block and what it is about to get, on the way of images through a model."""

    name: str
    """Name of the block in the model, e.g. ``stages.0.blocks.0``."""
    block: Block
    """The block itself."""
    x: Tensor
    """(B, H, W, C): its input."""
    mask: Tensor | None
    """bool (B, H, W), True where a token is real."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module back into its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def visit_blocks(model: DynamicGroupTransformer, images: Tensor, mask: Tensor | None = None) -> Iterator[BlockVisit]:
    """Run images through a model in evaluation mode and stop before every block, to look at it.

    Args:
        model: the model; its mode and state are as they were when the iteration ends.
        images: (B, in_chans, H, W).
        mask: optional bool (B, H, W), True where a pixel is real.

    Raises:
        TypeError: if the model is none of ours.
        ValueError: for images as in :meth:`DynamicGroupTransformer.forward_features`.
    """
    if not isinstance(model, DynamicGroupTransformer):
        raise TypeError(f"model must be a DynamicGroupTransformer, got {type(model).__name__}")
    with evaluation_mode(model):
        images = check_images(images, model.in_chans, mask)
        masks = model.masks(mask)
        x = model.stem(keep_real_pixels(images, mask), masks[0])
        for i, stage in enumerate(cast(list[Stage], model.stages)):
            x = stage.merge(x)
            position = stage.positions(x)
            for j, block in enumerate(cast(list[Block], stage.blocks)):
                yield BlockVisit(f"stages.{i}.blocks.{j}", block, x, masks[i + 1])
                x = block(x, masks[i + 1], position)


@torch.no_grad()
def group_records(model: DynamicGroupTransformer, images: Tensor, mask: Tensor | None = None) -> list[GroupRecord]:
    """Run images through a model and return what every DG-Attention layer grouped and selected, in order.

    Arguments and errors as in :func:`visit_blocks`.
    """
    return [
        GroupRecord(
            f"{visit.name}.attn",
            (visit.x.shape[1], visit.x.shape[2]),
            visit.block.attn.inspect(visit.block.attention_input(visit.x, visit.mask), visit.mask),
        )
        for visit in visit_blocks(model, images, mask)
        if isinstance(visit.block.attn, DGAttention)
    ]
