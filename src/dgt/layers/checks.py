"""What the layers accept: tokens and their mask."""

import torch
from torch import Tensor

from dgt.ops.checks import describe


def check_layer_input(
    x: Tensor,
    dim: int,
    mask: Tensor | None = None,
    is_map: bool = False,
    name: str = "x",
    mask_name: str = "mask",
    may_be_empty: bool = False,
) -> None:
    """Check the input of a layer.

    Args:
        x: a floating point (B, H, W, C) or (B, L, C) tensor of ``dim`` channels; B may be 0.
        dim: C.
        mask: bool, of the shape of ``x`` without its channels (rows and columns may be flattened),
            or None.
        is_map: accept (B, H, W, C) alone: windows need rows.
        name, mask_name: of the arguments, in errors.
        may_be_empty: accept images without tokens, too.

    Raises:
        TypeError: for another type of tensor or mask.
        ValueError: for another number of dimensions or channels, or a mask of another shape.
    """
    expected = f"{name} must be a (B, H, W, {dim}) or (B, L, {dim}) floating point tensor"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{expected}, got {describe(x)}")
    if x.dim() not in (3, 4) or x.shape[-1] != dim:
        raise ValueError(f"{expected}, got {describe(x)}")
    if 0 in x.shape[1:] and not may_be_empty:
        raise ValueError(f"{name} must not be empty, got {describe(x)}")
    if is_map and x.dim() != 4:
        raise ValueError(f"{name} must be a (B, H, W, {dim}) map, got {describe(x)}")
    if mask is not None:
        _check_mask(mask_name, mask, x)


def _check_mask(name: str, mask: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError for a mask that does not fit the tokens ``x``."""
    shape = tuple(x.shape[:-1])
    expected = f"{name} must be a bool tensor of shape {shape}, True where a token is real"
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{expected}, got {describe(mask)}")
    if mask.shape != x.shape[:-1] and mask.shape != (x.shape[0], x.shape[1:-1].numel()):
        raise ValueError(f"{expected}, got {describe(mask)}")
