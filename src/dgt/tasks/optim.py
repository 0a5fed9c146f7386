"""The optimizer and learning-rate schedule of the paper's experiments: AdamW, a linear warm-up, then half a cosine.

Both are plain functions of their settings and of the step number. The schedule keeps no state of its own, so that a run
which is continued at step `n` meets exactly the learning rate that it would have met without the pause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from timm.optim import param_groups_weight_decay
from torch import nn
from torch.optim import AdamW


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
        epochs: passes over the training images.
        warmup_epochs: length of the linear warm-up; fractions of an epoch are fine.
        warmup_lr: learning rate of the first step.
        min_lr: learning rate that the cosine ends at.
    """

    epochs: int = 300
    warmup_epochs: float = 20.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5

    def __post_init__(self) -> None:
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        _require(self.epochs >= 1, "schedule.epochs", "at least 1", self.epochs)
        _require(self.warmup_lr >= 0, "schedule.warmup_lr", "a number of at least 0", self.warmup_lr)
        _require(self.min_lr >= 0, "schedule.min_lr", "a number of at least 0", self.min_lr)
        expected = f"at least 0 and less than schedule.epochs ({self.epochs})"
        _require(0 <= self.warmup_epochs < self.epochs, "schedule.warmup_epochs", expected, self.warmup_epochs)


def _require(holds: bool, key: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{key} must be {expected}, got {got!r}")


def learning_rate(step: int, total_steps: int, optimizer: OptimizerSettings, schedule: ScheduleSettings) -> float:
    """Learning rate of one optimizer step, at the batch size the recipe states.

    With W warm-up steps of T in all: linear from `warmup_lr` at step 0 to `lr` at step W, then half a cosine from `lr`
    to `min_lr` at step T. Steps past T stay at `min_lr`.

    Args:
        step: number of optimizer steps already taken, 0 before the first.
        total_steps: optimizer steps of the whole training.
        optimizer: gives `lr`.
        schedule: gives the rest.

    Returns:
        The learning rate.
    """
    warmup_steps = round(total_steps * schedule.warmup_epochs / schedule.epochs)
    if step < warmup_steps:
        return schedule.warmup_lr + (optimizer.lr - schedule.warmup_lr) * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return schedule.min_lr + 0.5 * (optimizer.lr - schedule.min_lr) * (1 + math.cos(math.pi * progress))


def batch_scale(settings: OptimizerSettings, global_batch: int) -> float:
    """Factor on all learning rates: `global_batch / lr_batch`, or 1 where `lr_batch` is null.

    Args:
        settings: gives `lr_batch`.
        global_batch: images per optimizer step, over all devices and accumulated batches.
    """
    return 1.0 if settings.lr_batch is None else global_batch / settings.lr_batch


def build_optimizer(model: nn.Module, settings: OptimizerSettings, global_batch: int) -> AdamW:
    """AdamW over the parameters of `model`, in a group with weight decay and one without.

    Without decay: biases, parameters of one dimension, and those that `model.no_weight_decay()` names, as in timm.

    Args:
        model: a timm model, or any module.
        settings: learning rate (scaled by `batch_scale`), decay and betas.
        global_batch: images per optimizer step.
    """
    names = getattr(model, "no_weight_decay", None)
    exempt = tuple(names()) if callable(names) else ()
    groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=exempt)
    return AdamW(groups, lr=settings.lr * batch_scale(settings, global_batch), betas=settings.betas)


def schedule_factor(
    total_steps: int, optimizer: OptimizerSettings, schedule: ScheduleSettings
) -> Callable[[int], float]:
    """The schedule as `torch.optim.lr_scheduler.LambdaLR` wants it: step -> `learning_rate(step) / lr`."""
    return lambda step: learning_rate(step, total_steps, optimizer, schedule) / optimizer.lr
