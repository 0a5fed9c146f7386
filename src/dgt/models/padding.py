"""Batches of images and their padding: each image is a rectangle in the upper left corner."""

from collections.abc import Sequence

import torch
from timm.models import register_notrace_function
from torch import Tensor

from dgt.ops.checks import describe
from dgt.utils.errors import UserError


@register_notrace_function
def check_images(x: Tensor, in_chans: int, mask: Tensor | None = None) -> Tensor:
    """Return ``x`` unchanged if it is a batch of images, and the mask fits it.

    Args:
        x: (B, in_chans, H, W), of at least 32 x 32 pixels.
        in_chans: channels of the images.
        mask: bool (B, H, W), True where a pixel is real, or None.

    Raises:
        TypeError: images that are not floating point, or a mask that is not bool.
        ValueError: another shape, smaller images, or a mask of another shape.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"images must be a floating point tensor, got {describe(x)}")
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise UserError(f"images must be a (B, {in_chans}, H, W) tensor, got shape {x.shape}")
    if x.shape[2] < 32 or x.shape[3] < 32:
        raise UserError(f"images must be at least 32 x 32 pixels, got {x.shape[2]} x {x.shape[3]}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask must be bool (B, H, W), True where a pixel is real, got {mask.dtype}"
            )
        if mask.dim() != 3 or mask.shape[0] != x.shape[0] or mask.shape[1:] != x.shape[2:]:
            raise UserError(
                f"mask must have the images' shape (B, H, W), got {mask.shape} for {x.shape}"
            )
    return x


@register_notrace_function
def check_tokens(x: Tensor, stage: int, stride: int, residual_keys: int) -> None:
    """Raise UserError where (B, C, H, W) images have fewer tokens in a stage than residual keys.

    Args:
        x: the images.
        stage: number of the stage, from 1.
        stride: of its tokens, in pixels.
        residual_keys: M of one of its layers.
    """
    height, width = x.shape[-2:]
    tokens = -(-height // stride) * -(-width // stride)
    if residual_keys > tokens:
        raise UserError(
            f"residual_keys must be at most {tokens}, the tokens of stage {stage} for images of "
            f"{height} x {width} pixels, got {residual_keys}"
        )


def real_pixels(
    sizes: Tensor | Sequence[tuple[int, int]],
    padded: tuple[int, int],
    device: torch.device | None = None,
) -> Tensor | None:
    """Make the mask of a padded batch.

    Args:
        sizes: height and width of each image, (B, 2).
        padded: height and width of the batch.
        device: of the mask; None for that of ``sizes``.

    Returns:
        Bool (B, H, W), True where a pixel is real; None where nothing is padded.

    Example:
        >>> real_pixels([(2, 3), (1, 2)], (2, 3)).int()
        tensor([[[1, 1, 1],
                 [1, 1, 1]],
        <BLANKLINE>
                [[1, 1, 0],
                 [0, 0, 0]]], dtype=torch.int32)
    """
    sizes = torch.as_tensor(sizes)
    if bool((sizes == sizes.new_tensor(padded)).all()):
        return None
    sizes = sizes.to(device)
    row = torch.arange(padded[0], device=sizes.device)
    column = torch.arange(padded[1], device=sizes.device)
    inside_rows = row[:, None] < sizes[:, 0, None, None]
    inside_columns = column < sizes[:, 1, None, None]
    return inside_rows & inside_columns


def real_sizes(mask: Tensor) -> list[tuple[int, int]]:
    """Return the height and width of each image of a (B, H, W) mask, as for :func:`real_pixels`.

    Raises:
        UserError: a real part that is no rectangle in the upper left corner.
    """
    sizes = torch.stack([mask.any(dim=2).sum(dim=1), mask.any(dim=1).sum(dim=1)], dim=1)
    expected = real_pixels(sizes, (mask.shape[1], mask.shape[2]))
    rectangles = mask.all() if expected is None else torch.equal(mask, expected)
    if not sizes.all() or not rectangles:
        raise UserError(
            "mask must be a rectangle of real pixels in the upper left corner of each image"
        )
    return [(int(height), int(width)) for height, width in sizes.tolist()]
