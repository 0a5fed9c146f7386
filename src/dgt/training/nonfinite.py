"""Steps that are not finite are skipped without a trace; too many in a row stop the training, with the layer named.

What must be finite is the loss, the gradient, and what BatchNorm keeps of the batch. A skipped step leaves everything
as it was before its first batch: weights, optimizer, average, the centroids and their statistics, running statistics.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dgt.layers.centroids import CentroidState
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.distributed import rank
from dgt.utils.errors import NonFiniteInput


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number of the tensors (of a sharded one, its share here) is finite; waits for the device once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    local = [tensor for tensor in local if tensor.numel()]
    if not local:
        return True
    largest = torch._foreach_norm(local, torch.inf)  # NaN and infinity pass through; no sum that could overflow
    return bool(torch.stack([value.float().to(local[0].device) for value in largest]).isfinite().all())


class BufferGuard:
    """Remembers a network's buffers before a step, so that the step can leave no trace in them.

    Args:
        network: the network in training.
    """

    def __init__(self, network: nn.Module) -> None:
        self.buffers = list(network.buffers())
        self.layers = [layer for layer in network.modules() if isinstance(layer, CentroidState)]
        self.before = [buffer.clone() for buffer in self.buffers]
        self.statistics: list[Tensor] = []
        self.in_step = False

    def begin(self) -> None:
        """Remember the buffers; `statistics` are those that are finite, and so must stay."""
        if not self.in_step and not self.statistics:
            self.statistics = [each for each in self.buffers if each.is_floating_point() and all_finite([each])]
        if self.buffers:
            torch._foreach_copy_(self.before, self.buffers)
        self.in_step = True

    def end(self) -> None:
        """The step is over, its trace stays."""
        self.in_step = False

    def rewind(self) -> None:
        """Put the buffers back to before the step under way, if there is one, and drop its centroids' statistics."""
        if not self.in_step:
            return
        with torch.no_grad():
            for buffer, before in zip(self.buffers, self.before, strict=True):
                buffer.copy_(before)
        for layer in self.layers:
            layer.group_sums.zero_()
            layer.group_counts.zero_()
            layer.seeded = bool(layer.num_updates > 0)
        self.in_step = False


def first_not_finite(objective: nn.Module, network: nn.Module, batch: Any) -> str | None:
    """What is the first to be not finite in a training step: an input, a layer's output, the loss, or a gradient.

    Runs the step again, in the weights that it met; buffers that a forward changes change.

    Args:
        objective: batch -> losses.
        network: the network in it.
        batch: with `images` and `targets`.

    Returns:
        A phrase for a message; None where all is finite this time.
    """
    leaves = tree_leaves((batch.images, batch.targets))
    if not all_finite(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()):
        return "the batch itself"
    found: list[str] = []
    weights = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    with _watching(network, found):
        try:
            loss = objective(batch)["loss"]
        except NonFiniteInput as error:
            return found[0] if found else str(error)
        if not found and not loss.isfinite():
            return "the loss"
        for name, buffer in network.named_buffers():
            if not found and buffer.is_floating_point() and not buffer.isfinite().all():
                return f"the buffer network.{name}"
        gradients = [] if found else torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    for name, gradient in zip(weights, gradients, strict=False):
        if not found and gradient is not None and not gradient.isfinite().all():
            return f"the gradient of network.{name}"
    return found[0] if found else None


@contextmanager
def _watching(module: nn.Module, found: list[str]) -> Iterator[None]:
    """Note in `found`, in the order they appear, layers without children whose output or its gradient is not finite."""

    def watch(name: str, tensor: Tensor) -> None:
        if not tensor.isfinite().all():
            found.append(f"the output of network.{name}")
        elif tensor.requires_grad:
            where = f"the gradient at the output of network.{name}"
            tensor.register_hook(lambda grad: None if grad.isfinite().all() else found.append(where))

    def hook(name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    watch(name, leaf)

        return look

    leaf_layers = [(name, layer) for name, layer in module.named_modules() if not any(layer.children())]
    handles = [layer.register_forward_hook(hook(name)) for name, layer in leaf_layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def write_report(folder: Path, facts: dict[str, Any], batches: Sequence[Any]) -> Path:
    """Write `nonfinite.json` and, from each process, the batches of the step as `nonfinite.pt` (plain tensors).

    Args:
        folder: the run's folder.
        facts: plain values.
        batches: with `images` and `targets`.

    Returns:
        The file with this process's batches.
    """
    content = io.BytesIO()
    leaves = [tree_leaves((batch.images, batch.targets)) for batch in batches]
    torch.save([[leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in each] for each in leaves], content)
    path = folder / (f"nonfinite-{rank()}.pt" if rank() else "nonfinite.pt")
    atomic_write(path, content.getbuffer())
    if rank() == 0:
        write_json(folder / "nonfinite.json", facts)
    return path
