"""Non-finite steps: detect them, undo them, and trace them to their origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dgt.layers.centroids import CentroidState


def all_finite(tensors: Iterable[Any]) -> bool:
    """Whether every number of the floating tensors (of a sharded one, its share here) is finite."""
    local = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in tensors
        if isinstance(each, Tensor)
    ]
    numbers = [each.detach() for each in local if each.is_floating_point() and each.numel()]
    # The largest number lets NaN and infinity through; a sum could overflow.
    return bool(nn.utils.get_total_norm(numbers, torch.inf).isfinite())


def snapshot_state(network: nn.Module) -> Callable[[], None]:
    """Remember buffers and centroids.

    Returns a function that restores them, undoing a step's forward.
    """
    before = [buffer.clone() for buffer in network.buffers()]

    def undo() -> None:
        with torch.no_grad():
            for buffer, kept in zip(network.buffers(), before, strict=True):
                buffer.copy_(kept)
        for layer in network.modules():
            if isinstance(layer, CentroidState):
                layer.forget()

    return undo


def nan_debug(objective: nn.Module, network: nn.Module, batch: Any) -> str | None:
    """Find the first non-finite tensor of a step whose gradients are still available; repeats its forward pass.

    Args:
        objective: the network with its losses.
        network: the network in it.
        batch: of the step.

    Returns:
        The batch, a layer's output, the loss, a buffer, or the gradient of a weight, in words; None
        where all is finite.
    """
    places: list[str] = []

    def look(what: str, values: Any) -> None:
        if not all_finite(tree_leaves(values)):
            places.append(what)

    look("the batch itself", [batch.images, batch.targets])
    layers = [(f"the output of network.{name}", layer) for name, layer in network.named_modules()]
    handles = [
        layer.register_forward_hook(lambda _, arguments, output, name=name: look(name, output))
        for name, layer in layers
        if not any(layer.children())
    ]
    look("the loss", objective(batch)["loss"])
    for handle in handles:
        handle.remove()
    for name, buffer in network.named_buffers():
        look(f"the buffer network.{name}", buffer)
    # about in the order that a backward takes
    for name, weight in reversed(list(network.named_parameters())):
        look(f"the gradient of network.{name}", weight.grad)
    return next(iter(places), None)
