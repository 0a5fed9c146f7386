"""Less memory in training: what is cheap to compute again is not kept for the backward pass.

The hidden maps of a feed-forward network are as large as all else in a block. PyTorch keeps six of
them: what GELU, BatchNorm and a convolution get, twice. Activation and normalization are cheap
functions of the first, from which the backward pass computes the other two again. Outputs and
gradients stay the same bit for bit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dgt.layers.plain import is_unchanged
from dgt.ops.maps import can_run_on_map, gelu_norm, gelu_norm_again


def activate_and_norm(
    x: Tensor, act: nn.Module, norm: Any, then: Callable[..., Tensor], *rest: Any
) -> Tensor:
    """Return ``then(norm(act(x)), *rest)``, keeping of the three inputs only ``x``.

    On CPUs, GELU and BatchNorm are one operator in training (:mod:`dgt.ops.maps`) where the modules
    do just what their classes do; they are not called then.

    Args:
        x: what is activated, (B, C, H, W).
        act, norm: activation and BatchNorm.
        then: what follows, with further arguments ``rest``.

    Returns:
        What ``then`` returns.
    """
    if not _can_be_repeated(x, act, norm):
        return then(norm(act(x)), *rest)
    if _is_gelu_norm(x, cast(nn.GELU, act), norm):
        normed, normed_again = _gelu_norm(x, norm)
        with _instead_of(normed, normed_again):
            return then(normed, *rest)
    again = _Again(x.detach(), act, norm)
    activated = act(x)
    with _instead_of(activated, again.activated):
        normed = norm(activated)
    del activated
    with _instead_of(normed, again.normed):
        return then(normed, *rest)


def _can_be_repeated(x: Tensor, act: nn.Module, norm: nn.Module) -> bool:
    """Tell whether a backward pass follows, and both modules do just what their classes do."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # no backward pass of ours
        return False
    if type(x) is not Tensor or not (torch.is_grad_enabled() and x.requires_grad):
        return False
    if not (is_unchanged(act, nn.GELU) and is_unchanged(norm, nn.BatchNorm2d) and norm.training):
        return False
    return not torch._C._are_functorch_transforms_active()  # they know no hooks of saved tensors


def _is_gelu_norm(x: Tensor, act: nn.GELU, norm: nn.BatchNorm2d) -> bool:
    """Tell whether both modules are what the operator of both computes, for this map."""
    if act.approximate != "none":
        return False
    if not (norm.track_running_stats and isinstance(norm.momentum, int | float)):
        return False
    parts = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    fits = x.dim() == 4 and x.shape[1] == norm.num_features
    more_than_one = x.numel() > norm.num_features  # PyTorch refuses a deviation of one number
    return fits and more_than_one and can_run_on_map(x, *parts)


def _gelu_norm(x: Tensor, norm: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    """The normalized map, and how to compute it again; updates the running statistics."""
    weight, bias = norm.weight, norm.bias
    normed, statistics = gelu_norm(x, weight, bias, norm.eps)
    again = functools.partial(
        gelu_norm_again, x.detach(), weight.detach(), bias.detach(), statistics, norm.eps
    )
    with torch.no_grad():
        count = x.numel() // norm.num_features
        mean, variance = statistics
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean.float(), norm.momentum)
        norm.running_var.lerp_((variance * (count / (count - 1))).float(), norm.momentum)
    return normed, again


class _View(NamedTuple):
    """How a tensor lies in memory that it covers whole."""

    shape: torch.Size
    stride: tuple[int, ...]


class _Again:
    """What an activation and a BatchNorm have returned, computed once more."""

    def __init__(self, x: Tensor, act: nn.Module, norm: nn.BatchNorm2d) -> None:
        self.x = x
        self.act = act
        self.norm = norm
        self.ready: list[Tensor] = []  # the backward pass asks for ``normed``, then ``activated``

    @torch.no_grad()
    def activated(self) -> Tensor:
        return self.ready.pop() if self.ready else self.act(self.x)

    @torch.no_grad()
    def normed(self) -> Tensor:
        self.ready = [self.act(self.x)]
        norm = self.norm
        return F.batch_norm(self.ready[0], None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def _instead_of(tensor: Tensor, again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """In this context, keep for the backward pass not a tensor, but how to compute it again.

    A linear keeps a view of another shape, which is recognized by its memory.
    """
    place = tensor.data_ptr()
    count = tensor.numel()

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.data_ptr() == place and saved.numel() == count:
            return _View(saved.shape, saved.stride())
        return saved

    def unpack(saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return again().as_strided(*saved)

    return saved_tensors_hooks(pack, unpack)
