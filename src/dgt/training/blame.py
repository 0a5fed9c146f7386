"""Where a number that is not finite comes from: the batch once more, with a look at every output and gradient."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dgt.training.files import write_json, write_whole


def first_not_finite(trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> str | None:
    """What is the first to be not finite in a training step: an input, a layer's output, the loss, or a gradient.

    Runs the step again; buffers that a forward changes change.

    Args:
        trainer, pl_module: those of the training, the weights as they were at the step.
        batch: what the step got.
        batch_idx: its number in the epoch.

    Returns:
        A phrase for people; None where all is finite this time.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
            return "the batch itself"
    found: list[str] = []
    watched: Any = pl_module.training_step
    step: Callable[..., Tensor] = getattr(watched, "__wrapped__", watched)
    with _watching(pl_module, found), trainer.precision_plugin.train_step_context(), torch.enable_grad():
        try:
            loss = step(batch, batch_idx)
        except ValueError as error:  # the attention's refusal of NaN
            return found[0] if found else str(error)
        if not found and not loss.isfinite():
            return "the loss"
        for name, buffer in pl_module.named_buffers():
            if not found and buffer.is_floating_point() and not buffer.isfinite().all():
                return f"the buffer {name}"
        parameters = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        gradients = [] if found else torch.autograd.grad(loss, parameters, allow_unused=True)
    if found:
        return found[0]
    names = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and not gradient.isfinite().all():
            return f"the gradient of {name}"
    return None


def write_report(folder: Path, trainer: Trainer, facts: dict[str, Any], batches: list[Any]) -> Path:
    """Write `nonfinite.json` and, from each process, the batches of the step as `nonfinite.pt` (plain tensors).

    Args:
        folder: the run's folder.
        trainer: tells which process this is.
        facts: plain values.
        batches: the batches of the step.

    Returns:
        The file with this process's batches.
    """
    content = io.BytesIO()
    leaves = [[leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(batch)] for batch in batches]
    torch.save(leaves, content)
    path = folder / ("nonfinite.pt" if trainer.is_global_zero else f"nonfinite-{trainer.global_rank}.pt")
    write_whole(path, content.getbuffer())
    if trainer.is_global_zero:
        write_json(folder / "nonfinite.json", facts)
    return path


@contextmanager
def _watching(module: nn.Module, found: list[str]) -> Iterator[None]:
    """Note in `found`, in the order they appear, layers without children whose output or its gradient is not finite."""

    def look(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    if not leaf.isfinite().all():
                        found.append(f"the output of {name}")
                    elif leaf.requires_grad:
                        leaf.register_hook(lambda gradient: note(name, gradient))

        return hook

    def note(name: str, gradient: Tensor) -> None:
        if not gradient.isfinite().all():
            found.append(f"the gradient at the output of {name}")

    layers = [(name, layer) for name, layer in module.named_modules() if not any(layer.children())]
    handles = [layer.register_forward_hook(look(name)) for name, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
