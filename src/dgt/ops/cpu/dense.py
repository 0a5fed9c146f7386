"""Dense attention on the native kernels: every query attends to every key, under a mask; forward and backward."""

import torch
from torch import Tensor

from dgt.ops.cpu.interface import (
    BOOL_MASK,
    FLOAT_MASK,
    GRID_MASK,
    describe,
    new_tokens,
    run,
    set_gradients,
    tokens,
    with_channels_together,
)
from dgt.ops.cpu.structures import Problem
from dgt.ops.gradients import new_dense_gradients, split_gradients


def dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and (B, H, L) log-sum-exp of attention to (B, heads, S, D) keys, heads a divisor of H.

    The mask is (B, H, L, S), bool (True where a query sees a key) or float32 (added to the scores); broadcast
    dimensions may have a stride of zero.
    """
    output = new_tokens(query)
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    problem = describe(query, key, value, scale, output)
    _set_mask(problem, mask)
    problem.logsumexp = logsumexp.data_ptr()
    run("dgt_dense", problem)
    return output, logsumexp


def dense_on_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_rows: Tensor,
    bias_columns: Tensor,
    scale: float,
) -> Tensor:
    """Output of attention to (B, heads, S, D) keys that are a grid, row by row, heads a divisor of H.

    Added to scores are (B, H, L, rows) and (B, H, L, columns) tables, float32, of what each query adds for the
    row and the column of a key. There are no gradients.
    """
    output = new_tokens(query)
    problem = describe(query, key, value, scale, output)
    tables = (with_channels_together(bias_rows), with_channels_together(bias_columns))
    problem.operands.extend(tables)
    problem.bias_rows, problem.bias_columns = map(tokens, tables)
    problem.grid_columns = bias_columns.shape[-1]
    problem.mask_type = GRID_MASK
    run("dgt_dense", problem)
    return output


def dense_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> Tensor:
    """Gradients in query, key and value (:mod:`dgt.ops.gradients`); those of keys for every head of queries.

    They are float32 where heads of queries share keys.
    """
    grad = with_channels_together(grad.to(query.dtype))
    grads, of_keys = new_dense_gradients(query, key)
    grad_query, grad_key, grad_value = split_gradients(grads, query.shape, of_keys)
    problem = describe(query, key, value, scale, output)
    _set_mask(problem, mask)
    problem.logsumexp = logsumexp.data_ptr()
    problem.grad_output = tokens(grad)
    set_gradients(problem, grad_query, grad_key, grad_value)
    run("dgt_dense_backward", problem)
    return grads


def _set_mask(problem: Problem, mask: Tensor | None) -> None:
    if mask is None:
        return
    problem.mask = mask.data_ptr()
    problem.mask_type = BOOL_MASK if mask.dtype == torch.bool else FLOAT_MASK
    problem.mask_strides = mask.stride()
