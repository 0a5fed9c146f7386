"""When the centroids of a model move: after each optimizer step, alone or joined with other processes.

PyTorch's global optimizer hook finds the layers whose weights the optimizer holds, and moves their
centroids with tau by the learning rate of that very step, as in the paper. For a step that the hook
cannot see there is :func:`step_centroids`.

A process observes its own batches, as BatchNorm does; :func:`convert_sync_centroids` joins those of
several processes.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from dgt.layers.centroids import CentroidState, steps_around
from dgt.layers.joint import Joint
from dgt.ops.checks import describe

_enlisted: "weakref.WeakValueDictionary[int, CentroidState]" = weakref.WeakValueDictionary()
_serials = itertools.count()


def enlist(layer: CentroidState) -> None:
    """Let the steps of optimizers move the centroids of a layer.

    The first layer of a process registers the hook: where there is none, steps are as ever.
    """
    serial = next(_serials)
    _enlisted[serial] = layer
    if serial == 0:
        register_optimizer_step_post_hook(_after_step)


def _learning_layers() -> list[CentroidState]:
    """Return the layers that learn, in the order of their making: the same on every rank."""
    references = list(_enlisted.valuerefs())  # at once: another thread may be building layers
    layers = [layer for each in references if (layer := each()) is not None]
    return [layer for layer in layers if layer.learns()]


def _move(rates: dict[CentroidState, Any]) -> None:
    """Move layers, each with its learning rate; those of one joint share one collective."""
    for joint in dict.fromkeys(layer.joint for layer in rates):
        if joint is not None:
            joined = [layer.observed for layer in rates if layer.joint is joint]
            joint.sum_over_processes(joined)
    for layer, rate in rates.items():
        layer.move(rate)


@torch.compiler.disable
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Move the centroids of every learning layer whose weights the optimizer holds.

    Joined layers wait for the outermost step: inside of that of a ZeroRedundancyOptimizer, every
    process steps other weights.
    """
    CentroidState.steps_ended += 1
    layers = _learning_layers()
    if not layers:
        return
    rates = {
        id(weight): group.get("lr")  # some optimizers find their own
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    is_inner = steps_around() > 1
    held: dict[CentroidState, Any] = {}
    for layer in layers:
        of_layer = [rates[id(weight)] for weight in layer.parameters() if id(weight) in rates]
        waits = is_inner and layer.joint is not None
        if of_layer and not waits:
            held[layer] = of_layer[0]
    _move(held)


def step_centroids(model: nn.Module, learning_rate: float | Tensor) -> None:
    """Move the centroids of a model after a step that PyTorch's optimizer hook cannot see.

    For weights that no :class:`torch.optim.Optimizer` holds itself: flat parameters (FSDP), float32
    master weights, updates by hand. After a step that was seen this does nothing.

    Args:
        model: any module; the :class:`dgt.DGAttention` layers of it that are training move theirs.
        learning_rate: of the step; tau is 0.1 times this where a layer has none of its own.

    Raises:
        TypeError: ``model`` is no module, or ``learning_rate`` no number.

    Example:
        >>> layer = DGAttention(64, num_heads=2)
        >>> layer(torch.randn(1, 14, 14, 64)).sum().backward()
        >>> with torch.no_grad():
        ...     for weight in layer.parameters():
        ...         weight -= 0.1 * weight.grad
        >>> step_centroids(layer, learning_rate=0.1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    if not isinstance(learning_rate, int | float | Tensor):
        raise TypeError(f"learning_rate must be a number, got {describe(learning_rate)}")
    found = [layer for layer in model.modules() if isinstance(layer, CentroidState)]
    _move({layer: learning_rate for layer in found if layer.learns()})


def convert_sync_centroids(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Join the centroids of a model with those of other processes, as SyncBatchNorm joins BatchNorm.

    Without this every process seeds and moves centroids by its own batches, and DDP copies those of
    its first rank before each forward, as it does with the statistics of BatchNorm. With it the
    first batches of all processes seed them, and each step sums the statistics of all in one
    collective, so that all have the centroids of one process with the joint batch. All processes
    of the group must then train the same layers and make the same steps.

    Args:
        module: its :class:`dgt.DGAttention` layers are joined, in place.
        process_group: of :mod:`torch.distributed`; None for all processes.

    Returns:
        The module, as :meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm` does.

    Example:
        >>> model = DistributedDataParallel(dgt.convert_sync_centroids(model))
    """
    joint = Joint(process_group)
    for layer in module.modules():
        if isinstance(layer, CentroidState):
            layer.joint = joint
            layer.forget()
    return module


def renormalize_centroids(model: nn.Module) -> None:
    """Bring all centroids of a model to unit norm in place, for example after averaging weights.

    Args:
        model: any module; its :class:`dgt.DGAttention` layers are changed, nothing else.

    Example:
        >>> layer = dgt.DGAttention(64, num_heads=2)
        >>> _ = layer.centroids.mul_(3)
        >>> renormalize_centroids(layer)
        >>> torch.allclose(layer.centroids.norm(dim=-1), torch.ones(2, 48))
        True
    """
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, CentroidState):
                layer.centroids.copy_(layer.unit_centroids())
