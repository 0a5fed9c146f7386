"""Images of different sizes in one padded batch: each is a rectangle of real pixels in the upper left corner."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgt.utils.errors import UserError


def real_pixels(
    sizes: Tensor | Sequence[tuple[int, int]], padded: tuple[int, int], device: torch.device | None = None
) -> Tensor | None:
    """The mask of a padded batch: bool (B, H, W), True where a pixel is real; None where nothing is padded.

    From the height and width of each image, (B, 2), and of the batch; on that of ``sizes`` where no device is given.
    """
    sizes = torch.as_tensor(sizes)
    if bool((sizes == sizes.new_tensor(padded)).all()):
        return None
    sizes = sizes.to(device)
    rows, columns = (torch.arange(side, device=sizes.device) for side in padded)
    return (rows[:, None] < sizes[:, 0, None, None]) & (columns < sizes[:, 1, None, None])


def real_sizes(mask: Tensor) -> list[tuple[int, int]]:
    """Height and width of each image of a (B, H, W) mask: what :func:`real_pixels` was made of.

    Raises:
        UserError: a real part that is no rectangle in the upper left corner.
    """
    sizes = torch.stack([mask.any(dim=2).sum(dim=1), mask.any(dim=1).sum(dim=1)], dim=1)
    expected = real_pixels(sizes, (mask.shape[1], mask.shape[2]))
    if not sizes.all() or not (mask.all() if expected is None else torch.equal(mask, expected)):
        raise UserError("mask must be a rectangle of real pixels in the upper left corner of each image")
    return [(int(height), int(width)) for height, width in sizes.tolist()]
