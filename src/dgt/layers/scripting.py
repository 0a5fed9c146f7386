"""TorchScript in one place: what its compiler cannot read, and what a scripted layer does instead.

Scripted layers skip the checks of arguments and call the operators of DG-Attention themselves,
which are eager: named results and the choice of a backend are not TorchScript. They predict;
learning centroids is left to Python.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops import dynamic_group_attention
from dgt.ops.checks import describe
from dgt.ops.dense import dense_attention

# For branches over modules, which TorchScript does not take as arguments of a function.
scripting = torch.jit.is_scripting


def check_layer_input(
    x: Tensor, dim: int, mask: Tensor | None = None, is_map: bool = False
) -> None:
    """Check the input of a layer; silent in TorchScript.

    Args:
        x: a floating point (B, H, W, C) or (B, L, C) tensor of ``dim`` channels.
        dim: C.
        mask: bool, of the shape of ``x`` without its channels (rows and columns may be flattened),
            or None.
        is_map: accept (B, H, W, C) alone: windows need rows.

    Raises:
        TypeError: for another type of tensor or mask.
        ValueError: for another number of dimensions or channels, or a mask of another shape.
    """
    if not torch.jit.is_scripting():
        _check_tokens(x, dim, is_map)
        if mask is not None:
            _check_mask(mask, x)


def _check_tokens(x: Tensor, dim: int, is_map: bool) -> None:
    """Raise TypeError or ValueError for a tensor that is no input of ``dim`` channels."""
    expected = f"x must be a (B, H, W, {dim}) or (B, L, {dim}) floating point tensor"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{expected}, got {describe(x)}")
    if x.dim() not in (3, 4) or x.shape[-1] != dim:
        raise ValueError(f"{expected}, got {describe(x)}")
    if 0 in x.shape:
        raise ValueError(f"x must not be empty, got {describe(x)}")
    if is_map and x.dim() != 4:
        raise ValueError(f"x must be a (B, H, W, {dim}) map, got {describe(x)}")


def _check_mask(mask: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError for a mask that does not fit the tokens ``x``."""
    shape = tuple(x.shape[:-1])
    expected = f"mask must be a bool tensor of shape {shape}, True where a token is real"
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{expected}, got {describe(mask)}")
    if mask.shape != x.shape[:-1] and mask.shape != (x.shape[0], x.shape[1:-1].numel()):
        raise ValueError(f"{expected}, got {describe(mask)}")


def attend_in_groups(
    heads: tuple[Tensor, Tensor, Tensor],
    centroids: Tensor,
    top_k: int,
    scale: float,
    real: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Call :func:`dgt.dynamic_group_attention`, also in TorchScript.

    Args:
        heads: query, key and value, each (B, H, L, D).
        centroids: (H, G, D), of unit norm.
        top_k: k.
        scale: factor of the products of queries and keys.
        real: bool (B, L), True where a token is real, or None.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        Output (B, H, L, D) and groups (B, H, L).
    """
    query, key, value = heads
    if torch.jit.is_scripting():
        groups = torch.ops.dgt.group_queries(query, centroids, real)
        keys = torch.ops.dgt.select_keys(centroids, key, top_k, real)
        return torch.ops.dgt.attend(query, key, value, groups, keys, scale), groups
    attention = dynamic_group_attention(query, key, value, centroids, top_k, scale, real, backend)
    return attention.output, attention.group_ids


def attend_without_ids(
    heads: tuple[Tensor, Tensor, Tensor],
    centroids: Tensor,
    top_k: int,
    scale: float,
    real: Tensor | None,
    backend: str,
) -> Tensor:
    """Return the output alone, (B, H, L, D)."""
    if torch.jit.is_scripting():
        return attend_in_groups(heads, centroids, top_k, scale, real, backend)[0]
    query, key, value = heads
    return dynamic_group_attention(
        query, key, value, centroids, top_k, scale, real, backend, return_ids=False
    ).output


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return :func:`dgt.dense_attention`'s output, (B, H, L, D); in TorchScript PyTorch's own."""
    if torch.jit.is_scripting():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return dense_attention(query, key, value, mask, scale=scale)
