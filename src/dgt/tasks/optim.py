"""The optimizer and learning-rate schedules of the paper's experiments: AdamW, a linear warm-up,
then a decay.

Both are plain functions of their settings and of the step number. The schedule keeps no state of
its own, so that a run which is continued at step `n` meets exactly the learning rate that it would
have met without the pause.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from timm.optim import param_groups_weight_decay
from torch import nn
from torch.optim import AdamW

from dgt.utils.errors import UserError


def _check(section: str, settings: Any, *rules: tuple[str, bool, str]) -> None:
    """Raise UserError for the first rule (key of the recipe's section, whether it holds, what is
    expected) broken.
    """
    for key, holds, expected in rules:
        if not holds:
            raise UserError(f"{section}.{key} must be {expected}, got {getattr(settings, key)!r}")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW as a recipe states it.

    Args:
        lr: highest learning rate, reached at the end of the warm-up.
        lr_batch: batch size that `lr` is stated at: all learning rates are multiplied by the true
            global batch divided by this; null takes them as they are.
        weight_decay: decoupled weight decay; biases, norms and what a model names in
            `no_weight_decay` go without.
        betas: the two decay rates of AdamW's moments.
        clip_grad: largest norm of the gradient; null for no clipping.

    Raises UserError for a value out of its range, naming the recipe's key.
    """

    lr: float = 1e-3
    lr_batch: int | None = 1024
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float | None = None

    def __post_init__(self) -> None:
        _check(
            "optimizer",
            self,
            ("lr", self.lr > 0, "a number above 0"),
            ("lr_batch", self.lr_batch is None or self.lr_batch > 0, "null or at least 1"),
            ("weight_decay", self.weight_decay >= 0, "a number of at least 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            ("clip_grad", self.clip_grad is None or self.clip_grad > 0, "null or above 0"),
        )


@dataclass(frozen=True)
class ScheduleSettings:
    """Length of the training and course of its learning rate, stepped once per optimizer step.

    Args:
        epochs: passes over the training images; unused where `steps` is given.
        warmup_epochs: length of the linear warm-up; fractions of an epoch are fine.
        warmup_lr: learning rate of the first step.
        min_lr: learning rate that a cosine or linear decay ends at.
        decay: after the warm-up half a cosine, a straight line, or a tenth at each of the
            `milestones`.
        milestones: epochs after which a "step" decay takes a tenth of the learning rate.
        steps: length in optimizer steps, in place of `epochs`.
        warmup_steps: length of the warm-up in optimizer steps, in place of `warmup_epochs`.

    Raises UserError for a value out of its range, naming the recipe's key.
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
        in_epochs, warmup_steps = self.warmup_steps is None, self.warmup_steps or 0
        by_epoch = self.decay == "step" and self.steps is None
        rising = all(0 < a < b for a, b in pairwise((*self.milestones, self.epochs)))
        milestones = "epochs in ascending order if schedule.decay is 'step' (and schedule.steps null), else empty"
        warmup = f"at least 0 and less than schedule.epochs ({self.epochs})"
        _check(
            "schedule",
            self,
            ("epochs", self.epochs >= 1, "at least 1"),
            ("warmup_lr", self.warmup_lr >= 0, "a number of at least 0"),
            ("min_lr", self.min_lr >= 0, "a number of at least 0"),
            ("warmup_steps", warmup_steps >= 0, "null or at least 0"),
            ("warmup_steps", self.steps is None or not in_epochs, "given if schedule.steps is"),
            ("warmup_epochs", not in_epochs or 0 <= self.warmup_epochs < self.epochs, warmup),
            (
                "steps",
                self.steps is None or self.steps > warmup_steps,
                "null or above schedule.warmup_steps",
            ),
            ("milestones", bool(self.milestones) == by_epoch and rising, milestones),
            ("decay", self.decay != "step" or by_epoch, "cosine or linear with schedule.steps"),
        )


def learning_rate(
    step: int, total_steps: int, optimizer: OptimizerSettings, schedule: ScheduleSettings
) -> float:
    """Compute the learning rate of a step, at the batch size that the recipe states.

    With W warm-up steps of T in all: linear from `warmup_lr` at step 0 to `lr` at step W, then half
    a cosine or a line from `lr` to `min_lr` at step T, where it stays; or `lr`, a tenth of it after
    the first milestone, and so on.

    Args:
        step: optimizer steps taken before.
        total_steps: T.
        optimizer: has `lr`.
        schedule: has the rest.
    """
    warmup_steps = schedule.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(total_steps * schedule.warmup_epochs / schedule.epochs)
    if step < warmup_steps:
        return schedule.warmup_lr + (optimizer.lr - schedule.warmup_lr) * step / warmup_steps
    if schedule.decay == "step":
        passed = sum(
            step >= round(total_steps * epoch / schedule.epochs) for epoch in schedule.milestones
        )
        return optimizer.lr * 0.1**passed
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = (
        0.5 * (1 + math.cos(math.pi * progress)) if schedule.decay == "cosine" else 1 - progress
    )
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * remaining


def batch_scale(settings: OptimizerSettings, global_batch: int) -> float:
    """Factor on all learning rates for a number of images per step, over all devices and
    accumulated batches.
    """
    return 1.0 if settings.lr_batch is None else global_batch / settings.lr_batch


def build_optimizer(model: nn.Module, settings: OptimizerSettings, global_batch: int) -> AdamW:
    """Build AdamW over a module's parameters, in a group with weight decay and one without.

    Without decay: biases, parameters of one dimension, and those that `no_weight_decay()` names, in
    the model or in one of its modules, as in timm.

    Args:
        model: its parameters are optimized.
        settings: rates and decay, stated at `lr_batch` images a step.
        global_batch: images of a step, over all devices and accumulated batches.
    """
    exempt = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for name in names()
    ]
    groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=exempt)
    return AdamW(groups, lr=settings.lr * batch_scale(settings, global_batch), betas=settings.betas)
