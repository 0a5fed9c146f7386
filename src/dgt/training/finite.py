"""Steps that are not finite are skipped, without a trace; too many in a row stop the training.

What must be finite is the loss, the gradient, and what BatchNorm keeps of the batch. A skipped step leaves everything
as it was before its first batch: weights, optimizer, averages, the centroids and their statistics, the running
statistics of batch norms. Its images are not seen again in that epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from dgt.layers.centroids import CentroidState
from dgt.training.blame import first_not_finite, write_report

REFUSALS = ("query must be free of NaN", "key must be free of NaN")  # what the attention says to NaN on a CPU


def is_refusal(error: ValueError) -> bool:
    """Whether an error is the attention's refusal of NaN, which in a training comes of the numbers, not of a caller."""
    return str(error).startswith(REFUSALS)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number of the tensors (of a sharded one, its share here) is finite; waits for the device once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    local = [tensor for tensor in local if tensor.numel()]
    if not local:
        return True
    largest = torch._foreach_norm(local, torch.inf)  # NaN and infinity pass through; no sum that could overflow
    return bool(torch.stack([value.float().to(local[0].device) for value in largest]).isfinite().all())


class FiniteSteps(Callback):
    """Skip what is not finite; stop with a report where that happens too often.

    Args:
        folder: the run's folder, for the report.
        max_skipped: steps in a row that may be skipped; None to look at nothing, which saves the device a wait in every
            step. Under float16 a step skipped while the loss scale can still be lowered does not count.
    """

    def __init__(self, folder: Path, max_skipped: int | None) -> None:
        self.folder, self.max_skipped = folder, max_skipped
        self.skipped, self.in_a_row = 0, 0
        self.skips_this_step = False
        self.in_optimizer = False
        self._losses: list[Tensor] = []
        self._batches: list[tuple[Any, int]] = []
        self._buffers: list[Tensor] = []
        self._before: list[Tensor] = []
        self._statistics: list[Tensor] = []  # buffers that are finite, and so must stay

    def state_dict(self) -> dict[str, int]:
        """How many steps were skipped, and how many of them just now, one after the other."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on counting."""
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the losses of the task's steps."""
        if stage == "fit" and self.max_skipped is not None:
            step: Any = pl_module.training_step
            pl_module.training_step = self._watched(pl_module, step)  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the buffers before the first batch of a step, and the batch itself until the step is over."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._remember(pl_module)
            self._losses, self._batches, self.skips_this_step = [], [], False
        if self.max_skipped is not None:
            self._batches.append((batch, batch_idx))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Empty the gradients of a step that is not finite: the optimizer then leaves everything as it is."""
        self.in_optimizer = True
        if self.max_skipped is None:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        numbers = [*self._losses, *gradients, *self._statistics]
        if trainer.strategy.reduce_boolean_decision(all_finite(numbers), all=True):
            self.in_a_row = 0
            return
        self.skips_this_step = True
        self.skipped += 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None or scaler.get_scale() <= 1 or not all_finite(self._losses):
            self.in_a_row += 1
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = None
        forget_statistics(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Undo what the forward of a skipped step changed, and tell of it.

        Raises:
            FloatingPointError: too many in a row.
        """
        self.in_optimizer = False
        if trainer.fit_loop._should_accumulate():
            return
        losses = [float(loss) for loss in self._losses] if self.skips_this_step else []
        if self.skips_this_step:
            self.rewind(pl_module)
            self._tell(trainer, batch_idx, losses)
        if self.skips_this_step and self.in_a_row > self._limit(trainer):
            self._give_up(trainer, pl_module, losses)
        self._losses, self._batches = [], []

    def _limit(self, trainer: Trainer) -> int:
        """Steps in a row that may be skipped: as many as the user allows, but not a whole epoch's."""
        steps = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        return min(self.max_skipped or 0, max(1, steps - 1))

    def _tell(self, trainer: Trainer, batch_idx: int, losses: Sequence[float]) -> None:
        if trainer.is_global_zero:
            kind = "loss" if not all(map(_is_finite, losses)) else "gradient, or a running statistic,"
            place = f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1}"
            print(
                f"dgt: warning: step {trainer.global_step} ({place}) was skipped, its {kind} is not finite",
                file=sys.stderr,
                flush=True,
            )

    def rewind(self, pl_module: LightningModule) -> None:
        """Put buffers back to what they were before the current step, and drop the centroids' statistics of it."""
        forget_statistics(pl_module)
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=True):
                buffer.copy_(before)
        for layer in _centroid_layers(pl_module):
            layer.seeded = bool(layer.num_updates > 0)

    def _remember(self, pl_module: LightningModule) -> None:
        buffers = list(pl_module.buffers())
        if [id(buffer) for buffer in buffers] != [id(buffer) for buffer in self._buffers]:
            self._buffers, self._before = buffers, [buffer.clone() for buffer in buffers]
            self._statistics = [each for each in buffers if each.is_floating_point() and bool(each.isfinite().all())]
            return
        if buffers:
            torch._foreach_copy_(self._before, buffers)

    def _watched(self, pl_module: LightningModule, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The task's training step, whose loss is kept; the attention's refusal of NaN is a loss of NaN."""

        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            try:
                loss = step(*args, **kwargs)
            except ValueError as error:
                if not is_refusal(error):
                    raise
                weights = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
                loss = torch.stack([weight.flatten()[:1].sum() * 0.0 for weight in weights]).sum() + torch.nan
            self._losses.append(loss.detach())
            return loss

        return watched

    def _give_up(self, trainer: Trainer, pl_module: LightningModule, losses: Sequence[float]) -> None:
        """Find where it begins, write the report, and stop.

        Raises:
            FloatingPointError: always.
        """
        blamed = "nothing in the last batch, run again"
        for batch, batch_idx in self._batches:
            found = first_not_finite(trainer, pl_module, batch, batch_idx)
            if found is not None:
                blamed = found
                break
        self.rewind(pl_module)
        where = {"epoch": trainer.current_epoch, "step": trainer.global_step, "losses": list(losses), "first": blamed}
        written = write_report(self.folder, trainer, where, [batch for batch, _ in self._batches])
        raise FloatingPointError(
            f"{self.in_a_row} steps in a row had a loss or gradient that is not finite, the training diverged: lower "
            f"optimizer.lr or set optimizer.clip_grad. The first not finite: {blamed}. The batch is in {written}"
        )


def forget_statistics(module: nn.Module) -> None:
    """Drop the statistics that the layers' centroids have gathered since the last step."""
    for layer in _centroid_layers(module):
        layer.group_sums.zero_()
        layer.group_counts.zero_()


def _centroid_layers(module: nn.Module) -> list[CentroidState]:
    return [layer for layer in module.modules() if isinstance(layer, CentroidState)]


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")
