"""Dense attention: every query attends to every key.

PyTorch's own, or, on CPUs, the native kernel, which is faster.

It is the kernel of attention inside groups (Eq. 2) with one list that holds all keys: exact, no
approximation.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import has_torch_function

from dgt.ops import flops
from dgt.ops.checks import (
    check_device,
    describe,
    has_tangent,
    is_exporting,
    is_transformed,
    kernels_with_derivatives,
    needs_gradients,
)
from dgt.ops.cpu import dense as native
from dgt.ops.cpu.interface import new_tokens
from dgt.ops.gradients import new_dense_gradients, split_gradients
from dgt.ops.native_loader import can_run_native
from dgt.ops.registry import differentiate, gradients_by_autograd, operator


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias_rows: Tensor | None = None,
    bias_columns: Tensor | None = None,
) -> Tensor:
    """Compute ``softmax(scale query key^T + mask) value``, as PyTorch's own function does.

    It takes the arguments of ``F.scaled_dot_product_attention``, and tables of a decomposed bias, as the
    relative positions of MViTv2, ViTDet and SAM are one. There keys are a grid of tokens, row by row, and

        score(q, k) = scale query_q . key_k + bias_rows[q, row(k)] + bias_columns[q, column(k)]

    so that a bias of all L S pairs need not be made.

    On CPUs the native kernel computes it if it was built and supports the call: float32, bfloat16
    or float16 (sums in float32), at most 256 channels a head, values as wide as keys, no dropout,
    not causal, no gradient in the mask, and outside of files and forward-mode differentiation. With
    gradients, or a mask beside them, tables are joined to a mask of all pairs.
    Everything else is PyTorch's: also what autocast casts, tensors of subclasses, such as the causal biases of
    ``torch.nn.attention.bias``, transforms of ``torch.func`` (in plain operations), and calls inside of
    ``torch.nn.attention.sdpa_kernel`` where it leaves out flash attention.

    Args:
        query: (..., H, L, D) float tensor; any number of dimensions before L.
        key: (..., H, S, D), of query's type; with ``enable_gqa`` the heads may be a divisor of H.
        value: (..., H, S, D).
        attn_mask: bool, True where a query sees a key, or float, added to the scores; broadcasts to
            (..., H, L, S). Float masks of half precision are added in float32.
        dropout_p: probability that a weight is dropped.
        is_causal: query i sees keys 0 to i only.
        scale: factor on the scores, a number or a 0-dimensional tensor that needs no gradient; default
            1 / sqrt(D).
        enable_gqa: every head of keys and values serves several heads of queries.
        bias_rows: (..., H, L, rows), query's leading sizes, of query's type or float32: what a query adds
            to its scores with the keys of each row; only with ``bias_columns``.
        bias_columns: (..., H, L, columns), the same for columns; rows times columns must be S.

    Returns:
        (..., H, L, D) of query's type; zero where a query sees no key.

    Raises:
        RuntimeError, TypeError, ValueError: those of ``F.scaled_dot_product_attention``.
        TypeError, ValueError: a table of another type, or that does not fit query or the grid of keys.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 196, 32)
        >>> dense_attention(query, key, value).shape
        torch.Size([1, 2, 196, 32])
    """
    flags = (dropout_p, is_causal, scale, enable_gqa)
    if bias_rows is not None or bias_columns is not None:
        tables = _check_tables(query, key, bias_rows, bias_columns)
        if is_causal:
            raise ValueError("is_causal must be False with bias_rows and bias_columns, got True")
        stays_apart = attn_mask is None and not needs_gradients(query, key, value, *tables)
        if stays_apart and is_native(query, key, value, None, *flags, *tables):
            return _attend_on_grid(query, key, value, *tables, scale)
        attn_mask = join_tables(*tables, attn_mask)
    if not is_native(query, key, value, attn_mask, *flags):
        with kernels_with_derivatives(query, key, value, attn_mask):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    shape = query.shape
    query, key, value = (_as_four_dimensions(tensor) for tensor in (query, key, value))
    mask = None if attn_mask is None else _broadcast_mask(attn_mask, query, key, shape)
    output: Tensor = dense(query, key, value, mask, _as_factor(scale, query))[0]
    return output.reshape(shape)


def is_native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *tables: Tensor,
) -> bool:
    """Whether the native kernel computes a call of :func:`dense_attention`, rather than PyTorch's.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as there.
        tables: of a decomposed bias, where the kernel is to take them as they are.
    """
    return (
        dropout_p == 0.0
        and not is_causal
        and _is_number(scale)
        and _can_run_native(query, key, value, attn_mask, enable_gqa, *tables)
    )


def _as_factor(scale: float | None, query: Tensor) -> float:
    return float(scale) if scale is not None else float(query.shape[-1] ** -0.5)


def _check_tables(
    query: Tensor, key: Tensor, bias_rows: Tensor | None, bias_columns: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The tables of a decomposed bias, checked against the queries and against each other."""
    rows = _check_table("bias_rows", bias_rows, query)
    columns = _check_table("bias_columns", bias_columns, query)
    count = rows.shape[-1] * columns.shape[-1]
    if count != key.shape[-2]:
        raise ValueError(
            f"bias_rows and bias_columns must be of a grid of key's {key.shape[-2]} tokens, "
            f"got {rows.shape[-1]} rows and {columns.shape[-1]} columns"
        )
    return rows, columns


def _check_table(name: str, table: Tensor | None, query: Tensor) -> Tensor:
    if not isinstance(table, Tensor):
        raise TypeError(
            f"{name} must be a tensor, as is the other of bias_rows and bias_columns, "
            f"got {describe(table)}"
        )
    if table.dtype not in (torch.float32, query.dtype):
        raise TypeError(
            f"{name} must be of query's type {query.dtype} or float32, got {table.dtype}"
        )
    check_device("query", query, **{name: table})
    if table.shape[:-1] != query.shape[:-1]:
        sizes = ", ".join(map(str, query.shape[:-1]))
        raise ValueError(
            f"{name} must have shape ({sizes}, {name.removeprefix('bias_')}) to match query, "
            f"got {tuple(table.shape)}"
        )
    return table


def _attend_on_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_rows: Tensor,
    bias_columns: Tensor,
    scale: float | None,
) -> Tensor:
    output: Tensor = dense_on_grid(
        query=_as_four_dimensions(query),
        key=_as_four_dimensions(key),
        value=_as_four_dimensions(value),
        bias_rows=_as_four_dimensions(bias_rows.float()),
        bias_columns=_as_four_dimensions(bias_columns.float()),
        scale=_as_factor(scale, query),
    )
    return output.reshape(query.shape)


def join_tables(bias_rows: Tensor, bias_columns: Tensor, mask: Tensor | None = None) -> Tensor:
    """A decomposed bias as a (..., H, L, S) float mask, with what another mask adds or hides."""
    bias = (bias_rows.unsqueeze(-1) + bias_columns.unsqueeze(-2)).flatten(-2)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


@torch.compiler.assume_constant_result
def _allows_flash_attention() -> bool:
    """Tell whether ``sdpa_kernel`` leaves flash attention in, which on CPUs the native kernel is a kind of."""
    return bool(torch.backends.cuda.flash_sdp_enabled())


def _is_number(scale: object) -> bool:
    """Tell whether PyTorch reads a scale as a number, gradients aside."""
    if isinstance(scale, Tensor):
        return scale.dim() == 0 and not scale.requires_grad
    return scale is None or isinstance(scale, int | float)


def _can_run_native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    enable_gqa: bool,
    *tables: Tensor,
) -> bool:
    """Tell whether the native kernel is available and supports the call; PyTorch rejects invalid calls."""
    tensors = [tensor for tensor in (query, key, value, mask, *tables) if tensor is not None]
    if torch.jit.is_tracing() or is_exporting() or has_tangent(*tensors):
        return False
    if has_torch_function(tensors) or is_transformed():
        return False
    if not _allows_flash_attention():
        return False
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.get_autocast_dtype("cpu"):
        return False
    if any(
        tensor.device.type != "cpu" or tensor.is_nested or 0 in tensor.shape for tensor in tensors
    ):
        return False
    if not _types_fit(query, key, value, mask):
        return False
    return _shapes_fit(query, key, value, mask, enable_gqa) and can_run_native(query)


def _types_fit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    if mask is None:
        return True
    return not mask.requires_grad and mask.dtype in (torch.bool, torch.float32, query.dtype)


def _shapes_fit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> bool:
    if not query.dim() == key.dim() == value.dim() >= 2 or key.shape != value.shape:
        return False
    if query.shape[-1] != key.shape[-1]:
        return False
    same_heads = query.shape[:-2] == key.shape[:-2]
    if enable_gqa and query.dim() == 4:
        same_heads = query.shape[0] == key.shape[0] and query.shape[1] % key.shape[1] == 0
    if mask is None or not same_heads:
        return same_heads
    wanted = (*query.shape[:-1], key.shape[-2])
    padded = (*[1] * (len(wanted) - mask.dim()), *mask.shape)
    return len(padded) == len(wanted) and all(
        size in (1, want) for size, want in zip(padded, wanted, strict=True)
    )


def _as_four_dimensions(tensor: Tensor) -> Tensor:
    """(L, D) and (H, L, D) as one image, more dimensions before the heads as many images."""
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _broadcast_mask(mask: Tensor, query: Tensor, key: Tensor, shape: torch.Size) -> Tensor:
    """The mask as (B, H, L, S), bool or float32.

    Dimensions that it is broadcast along have a stride of zero.
    """
    mask = mask if mask.dtype == torch.bool else mask.float()
    full = mask.expand(*shape[:-1], key.shape[2])
    if full.dim() < 4:
        return full[(None,) * (4 - full.dim())]
    return full.flatten(0, -4) if full.dim() > 4 else full


def _fake_dense(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    query = call.query
    return new_tokens(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_dense_on_grid(call: SimpleNamespace) -> Tensor:
    return new_tokens(call.query)


def _fake_dense_backward(call: SimpleNamespace) -> Tensor:
    grads, _ = new_dense_gradients(call.query, call.key)
    return grads


dense = operator(fake=_fake_dense, flops=flops.dense)(native.dense)
dense_on_grid = operator(fake=_fake_dense_on_grid, flops=flops.dense)(native.dense_on_grid)
dense_backward = operator(fake=_fake_dense_backward, flops=flops.dense_backward)(
    native.dense_backward
)


def _save_dense(ctx: Any, call: SimpleNamespace, results: tuple[Tensor, Tensor]) -> None:
    output, logsumexp = results
    ctx.scale = call.scale
    ctx.mark_non_differentiable(logsumexp)
    ctx.save_for_backward(call.query, call.key, call.value, call.mask, output, logsumexp)


def _dense_gradients(ctx: Any, grad: Tensor, _: Any) -> dict[str, Tensor | None]:
    query, key, value, mask, output, logsumexp = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients
        with sdpa_kernel(SDPBackend.MATH):
            query, key, value = (tensor.view_as(tensor) for tensor in (query, key, value))
            of = {"query": query, "key": key, "value": value}
            shared = key.shape[1] != query.shape[1]
            again = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=ctx.scale, enable_gqa=shared
            )
            return gradients_by_autograd(again, of, grad)
    grads = dense_backward(
        grad,
        query,
        key,
        value,
        mask=mask,
        output=output,
        logsumexp=logsumexp,
        scale=ctx.scale,
    )
    of_keys = torch.Size((*query.shape[:2], *key.shape[2:]))
    in_query, in_key, in_value = split_gradients(grads, query.shape, of_keys)
    in_key = _sum_over_sharing_heads(in_key, key)
    in_value = _sum_over_sharing_heads(in_value, value)
    return {"query": in_query.to(query.dtype), "key": in_key, "value": in_value}


def _sum_over_sharing_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of keys that several heads of queries share are the sums of those heads'."""
    if grad.shape != like.shape:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return grad.to(like.dtype)


differentiate(dense, _dense_gradients, _save_dense)
