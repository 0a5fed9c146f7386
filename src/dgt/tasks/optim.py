"""The optimizer and learning-rate schedules of the paper's experiments: AdamW, a linear warm-up, then a decay.

Both are plain functions of their settings and of the step number. The schedule keeps no state of its own, so that a run
which is continued at step `n` meets exactly the learning rate that it would have met without the pause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from timm.optim import param_groups_weight_decay
from torch import nn
from torch.optim import AdamW

from dgt.utils.errors import UserError


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW as a recipe states it.

    Args:
        lr: highest learning rate, reached at the end of the warm-up.
        lr_batch: batch size that `lr` is stated at: all learning rates are multiplied by the true global batch divided
            by this; null takes them as they are.
        weight_decay: decoupled weight decay; biases, norms and what a model names in `no_weight_decay` go without.
        betas: the two decay rates of AdamW's moments.
        clip_grad: largest norm of the gradient; null for no clipping.
    """

    lr: float = 1e-3
    lr_batch: int | None = 1024
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        _require(self.lr > 0, "optimizer.lr", "a number above 0", self.lr)
        _require(self.lr_batch is None or self.lr_batch > 0, "optimizer.lr_batch", "null or at least 1", self.lr_batch)
        _require(self.weight_decay >= 0, "optimizer.weight_decay", "a number of at least 0", self.weight_decay)
        _require(all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", "two numbers in [0, 1)", self.betas)
        _require(self.clip_grad is None or self.clip_grad > 0, "optimizer.clip_grad", "null or above 0", self.clip_grad)


@dataclass(frozen=True)
class ScheduleSettings:
    """Length of the training and course of its learning rate, stepped once per optimizer step.

    Args:
        epochs: passes over the training images; of no account where `steps` is given.
        warmup_epochs: length of the linear warm-up; fractions of an epoch are fine.
        warmup_lr: learning rate of the first step.
        min_lr: learning rate that a cosine or linear decay ends at.
        decay: after the warm-up half a cosine, a straight line, or a tenth at each of the `milestones`.
        milestones: epochs after which a "step" decay takes a tenth of the learning rate.
        steps: length in optimizer steps, in place of `epochs`.
        warmup_steps: length of the warm-up in optimizer steps, in place of `warmup_epochs`.
    """

    epochs: int = 300
    warmup_epochs: float = 20.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    decay: Literal["cosine", "linear", "step"] = "cosine"
    milestones: tuple[int, ...] = ()
    steps: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        _require(self.epochs >= 1, "schedule.epochs", "at least 1", self.epochs)
        _require(self.warmup_lr >= 0, "schedule.warmup_lr", "a number of at least 0", self.warmup_lr)
        _require(self.min_lr >= 0, "schedule.min_lr", "a number of at least 0", self.min_lr)
        if self.warmup_steps is not None:
            _require(self.warmup_steps >= 0, "schedule.warmup_steps", "null or at least 0", self.warmup_steps)
        elif self.steps is not None:
            raise UserError("schedule.warmup_steps must be given where schedule.steps is, got none")
        else:
            expected = f"at least 0 and less than schedule.epochs ({self.epochs})"
            _require(0 <= self.warmup_epochs < self.epochs, "schedule.warmup_epochs", expected, self.warmup_epochs)
        if self.steps is not None:
            expected = f"null or above schedule.warmup_steps ({self.warmup_steps})"
            _require(self.steps > (self.warmup_steps or 0), "schedule.steps", expected, self.steps)
        by_epoch = self.decay == "step" and self.steps is None
        expected = "epochs in rising order where schedule.decay is 'step' (and schedule.steps null), and none elsewhere"
        rising = all(0 < a < b for a, b in pairwise((*self.milestones, self.epochs)))
        _require(bool(self.milestones) == by_epoch and rising, "schedule.milestones", expected, self.milestones)
        _require(self.decay != "step" or by_epoch, "schedule.decay", "cosine or linear with schedule.steps", self.decay)


def _require(holds: bool, key: str, expected: str, got: object) -> None:
    if not holds:
        raise UserError(f"{key} must be {expected}, got {got!r}")


def learning_rate(step: int, total_steps: int, optimizer: OptimizerSettings, schedule: ScheduleSettings) -> float:
    """Learning rate of one optimizer step, at the batch size the recipe states.

    With W warm-up steps of T in all: linear from `warmup_lr` at step 0 to `lr` at step W, then half a cosine or a line
    from `lr` to `min_lr` at step T, where it stays; or `lr`, a tenth of it after the first milestone, and so on.

    Args:
        step: number of optimizer steps already taken, 0 before the first.
        total_steps: optimizer steps of the whole training.
        optimizer: gives `lr`.
        schedule: gives the rest.

    Returns:
        The learning rate.
    """
    warmup_steps = schedule.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(total_steps * schedule.warmup_epochs / schedule.epochs)
    if step < warmup_steps:
        return schedule.warmup_lr + (optimizer.lr - schedule.warmup_lr) * step / warmup_steps
    if schedule.decay == "step":
        passed = sum(step >= round(total_steps * epoch / schedule.epochs) for epoch in schedule.milestones)
        return optimizer.lr * 0.1**passed
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.decay == "cosine" else 1 - progress
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * remaining


def batch_scale(settings: OptimizerSettings, global_batch: int) -> float:
    """Factor on all learning rates: `global_batch / lr_batch`, or 1 where `lr_batch` is null.

    Args:
        settings: gives `lr_batch`.
        global_batch: images per optimizer step, over all devices and accumulated batches.
    """
    return 1.0 if settings.lr_batch is None else global_batch / settings.lr_batch


def build_optimizer(model: nn.Module, settings: OptimizerSettings, global_batch: int) -> AdamW:
    """AdamW over the parameters of `model`, in a group with weight decay and one without.

    Without decay: biases, parameters of one dimension, and those that `no_weight_decay()` names, in the model or in one
    of its modules, as in timm.

    Args:
        model: a timm model, or any module.
        settings: learning rate (scaled by `batch_scale`), decay and betas.
        global_batch: images per optimizer step.
    """
    exempt = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for name in names()
    ]
    groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=exempt)
    return AdamW(groups, lr=settings.lr * batch_scale(settings, global_batch), betas=settings.betas)


def schedule_factor(
    total_steps: int, optimizer: OptimizerSettings, schedule: ScheduleSettings
) -> Callable[[int], float]:
    """The schedule as `torch.optim.lr_scheduler.LambdaLR` wants it: step -> `learning_rate(step) / lr`."""
    return lambda step: learning_rate(step, total_steps, optimizer, schedule) / optimizer.lr
