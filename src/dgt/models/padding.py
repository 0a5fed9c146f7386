"""Images of different sizes in one padded batch, each a rectangle in the upper left corner."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgt.utils.errors import UserError


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
