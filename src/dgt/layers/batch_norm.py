"""BatchNorm around the convolutional parts: which statistics it uses, and what it saves for the backward pass."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Proxy


def are_evaluated(norms: Iterable[nn.Module]) -> bool:
    """Tell whether all of these are BatchNorm that uses its running statistics."""
    return all(
        type(norm) is nn.BatchNorm2d and not norm.training and norm.running_var is not None
        for norm in norms
    )


def take_batch_statistics(norms: Iterable[nn.Module]) -> bool:
    """Return whether all of these are BatchNorm, with weights and biases, that takes a batch's statistics."""
    return all(
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.weight is not None
        and norm.bias is not None
        for norm in norms
    )


@torch.no_grad()
def update_running_statistics(
    norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, count: int
) -> None:
    """Update the buffers of a BatchNorm in training as its own forward pass does.

    Args:
        norm: BatchNorm, whose buffers are changed in place if it tracks statistics.
        mean: (C,) of the batch.
        variance: (C,) of the batch, biased.
        count: numbers that each of them is of, at least 2.
    """
    if not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
        return
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # the average of all batches
            momentum = 1.0 / float(norm.num_batches_tracked)
    if momentum is None:
        momentum = 0.0
    norm.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    norm.running_var.mul_(1 - momentum).add_(variance, alpha=momentum * count / (count - 1))


class _Kept(torch.autograd.Function):
    """The identity, whose input can be had again until the backward pass has reached it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def unchanged(x: Tensor) -> Tensor:
    """Return a tensor as it is; torch.fx would look for a module among the model's."""
    return x


def activate_and_norm(
    x: Tensor,
    act: nn.Module,
    norm: Any,
    then: Callable[..., Tensor] = unchanged,
    *rest: Any,
) -> Tensor:
    """Return ``then(norm(act(x)), *rest)``, keeping less for the backward pass.

    A normalization keeps its input for the backward pass, and the convolution after it (``then``)
    its own. Each is as large as what the activation keeps, of which both are cheap functions: they
    are computed again. Outputs and gradients stay the same bit for bit.

    Args:
        x: the input of the activation.
        act, norm: activation and BatchNorm.
        then: what follows, with further arguments ``rest``.
    """
    if _is_traced(x) or not (torch.is_grad_enabled() and x.requires_grad):
        return then(norm(act(x)), *rest)
    try:
        kept = _Kept.apply(x)
    except RuntimeError:  # torch.func's transforms and forward mode take no such function either
        return then(norm(act(x)), *rest)
    activated = act(kept)
    node = kept.grad_fn
    ready: list[Tensor] = []  # the backward pass asks for what was normed, then what was activated

    def activate_again() -> Tensor:
        with torch.no_grad():
            return ready.pop() if ready else act(node.saved_tensors[0])

    def norm_again() -> Tensor:
        ready[:] = [activate_again()]
        with torch.no_grad():
            return F.batch_norm(ready[0], None, None, norm.weight, norm.bias, True, 0.0, norm.eps)

    with _in_place_of(activated, activate_again):
        normed: Tensor = norm(activated)
    del activated
    if type(norm) is not nn.BatchNorm2d or not norm.training:
        return then(normed, *rest)
    with _in_place_of(normed, norm_again):
        return then(normed, *rest)


def _is_traced(x: Tensor) -> bool:
    """Whether a compiler, which manages memory itself, or an export follows the computation."""
    return isinstance(x, Proxy) or torch.compiler.is_compiling() or torch.jit.is_tracing()


def _in_place_of(tensor: Tensor, again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """In this context, do not keep a tensor for the backward pass, but how to compute it again."""
    place = tensor.data_ptr()
    shape = tensor.shape

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == place and saved.shape == shape else saved

    return saved_tensors_hooks(pack, lambda saved: again() if saved is None else saved)
