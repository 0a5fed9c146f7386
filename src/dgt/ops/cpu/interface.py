"""How tensors become the structures that the native kernels take, and how a kernel is called."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from dgt.ops.checks import nan_in
from dgt.ops.cpu import library
from dgt.ops.cpu.structures import Problem

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_MASK, BOOL_MASK, FLOAT_MASK, GRID_MASK = range(4)
GOOD, NAN_IN_QUERY, NAN_IN_KEY, NO_MEMORY = range(4)


def tokens(tensor: Tensor) -> tuple[int, ...]:
    """The fields of ``dgt_tokens`` for a (B, H, N, D) tensor whose last stride is 1; any others."""
    return tensor.data_ptr(), *tensor.stride()[:3]


def with_channels_together(tensor: Tensor) -> Tensor:
    """Return a (B, H, N, D) tensor that the kernels can read: itself, but for a last stride other than 1."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def new_tokens(like: Tensor) -> Tensor:
    """Return an empty (B, H, L, D) tensor that lies in memory as (B, L, H, D), which a projection can read as it is."""
    batch, heads, count, channels = like.shape
    return like.new_empty((batch, count, heads, channels)).transpose(1, 2)


def new_residual(like: Tensor, groups: int, count: int) -> Tensor:
    """Return room for what gradients need of M residual keys of G groups of (B, H, L, D) tokens, float32.

    First (B, H, G, M, 2, D) residual keys with their values, then (B, H, G, M) biases; empty for M = 0.
    """
    batch, heads, _, channels = like.shape
    elements = batch * heads * groups * count * (2 * channels + 1)
    return like.new_empty(elements, dtype=torch.float32)


def as_centroids(centroids: Tensor) -> Tensor:
    """Return (H, G, D) centroids as the kernels read them: float32, contiguous."""
    return centroids.to(torch.float32).contiguous()


def as_mask(mask: Tensor | None) -> Tensor | None:
    """Return a bool mask as the kernels read it: contiguous."""
    return None if mask is None else mask.contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's data; None, a null pointer, for None."""
    return None if tensor is None else tensor.data_ptr()


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    scale: float = 1.0,
    output: Tensor | None = None,
) -> Problem:
    """Describe a call by its (B, H, L, D) queries and (B, heads, S, D) keys and values; the rest is to be set.

    Operands whose channels are apart in memory are copied; the description holds the copies.
    """
    problem = Problem()
    problem.images, problem.heads, problem.queries, problem.channels = query.shape
    problem.key_heads, problem.keys = key.shape[1:3]
    problem.type = TYPES[query.dtype]
    problem.operands = []
    for name, tensor in (("query", query), ("key", key), ("value", value), ("output", output)):
        if tensor is None:
            continue
        if tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
            problem.operands.append(tensor)
        setattr(problem, name, (tensor.data_ptr(), *tensor.stride()[:3]))
    problem.scale = scale
    problem.threads = torch.get_num_threads()
    problem.parallel_for = library.parallel_for()
    return problem


def set_gradients(problem: Problem, in_query: Tensor, in_key: Tensor, in_value: Tensor) -> None:
    """Let the kernel write the gradients of (B, H, L, D) queries and (B, H, S, D) keys and values there."""
    problem.grad_type = TYPES[in_query.dtype]
    problem.grad_query = tokens(in_query)
    problem.grad_key = tokens(in_key)
    problem.grad_value = tokens(in_value)


def run(name: str, problem: Problem) -> None:
    """Call a kernel.

    Raises:
        NonFiniteInput: a ValueError, where a score was NaN.
        MemoryError: where there is no room for what the kernel keeps.
    """
    loaded: Any = library.load()
    status = getattr(loaded, name)(ctypes.byref(problem))
    if status == NAN_IN_QUERY:
        raise nan_in("query")
    if status == NAN_IN_KEY:
        raise nan_in("key")
    if status == NO_MEMORY:
        raise MemoryError(
            f"out of memory for attention with {problem.queries} queries and {problem.keys} keys"
        )
