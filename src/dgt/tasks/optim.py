"""The optimizer and the course of its learning rates, of timm; the paper's are AdamW, a linear
warm-up, then half a cosine.

A schedule is a function of the step number alone, so that a run which is continued at step `n`
meets exactly the learning rates that it would have met without the pause.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from timm.optim import (
    create_optimizer_v2,
    get_optimizer_info,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from dgt.models.heads.backbone import NOT_BUILT, FeatureBackbone
from dgt.tasks.parts import BACKBONE, find_parts, flat_names
from dgt.utils.errors import UserError

NOT_REPEATABLE = ("kron", "kronc", "kronw")
"""Optimizers of timm with random choices that no checkpoint holds."""


def _check(section: str, settings: Any, *rules: tuple[str, bool, str]) -> None:
    """Raise UserError for the first rule (key of the recipe's section, whether it holds, what is
    expected) broken.
    """
    for key, holds, expected in rules:
        if not holds:
            raise UserError(f"{section}.{key} must be {expected}, got {getattr(settings, key)!r}")


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer as a recipe states it.

    Args:
        name: an optimizer that timm knows: adamw, sgd, muon, lamb, ...
        lr: highest learning rate, reached at the end of the warm-up.
        lr_batch: batch size that `lr` is stated at: all learning rates are multiplied by the true
            global batch divided by this; null takes them as they are.
        weight_decay: decoupled weight decay; biases, norms and what a model names in
            `no_weight_decay` go without.
        betas: the two decay rates of the moments, of optimizers that have them.
        momentum: of optimizers that have one.
        args: further keyword arguments of the optimizer.
        layer_decay: factor on the learning rate from each layer to the one below; the head has the
            whole rate. null for one rate.
        lr_scale: factor on the learning rate of parts of the model, by name: {stem: 0.1, stages.0:
            0.5}; the longest name that fits a weight counts.
        clip_grad: largest norm of the gradient; null for no clipping.

    Raises UserError for a value out of its range, naming the recipe's key.
    """

    name: str = "adamw"
    lr: float = 1e-3
    lr_batch: int | None = 1024
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    args: dict[str, Any] = field(default_factory=dict)
    layer_decay: float | None = None
    lr_scale: dict[str, Any] = field(default_factory=dict)
    clip_grad: float | None = None

    def __post_init__(self) -> None:
        scales = flat_names(self.lr_scale).values()
        numbers = all(isinstance(each, int | float) and each > 0 for each in scales)
        decay = self.layer_decay
        _check(
            "optimizer",
            self,
            ("lr", self.lr > 0, "a number above 0"),
            ("lr_batch", self.lr_batch is None or self.lr_batch > 0, "null or at least 1"),
            ("weight_decay", self.weight_decay >= 0, "a number of at least 0"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            ("momentum", 0 <= self.momentum < 1, "a number in [0, 1)"),
            ("layer_decay", decay is None or 0 < decay <= 1, "null, or above 0 and at most 1"),
            (
                "lr_scale",
                numbers,
                "numbers above 0 by name of a part; model.freeze holds parts still",
            ),
            ("clip_grad", self.clip_grad is None or self.clip_grad > 0, "null or above 0"),
        )
        _check_optimizer(self.name)


def _check_optimizer(name: str) -> None:
    """UserError for a name that timm does not know, or whose steps cannot be repeated to the bit."""
    known = [str(each) for each in list_optimizers()]
    if name not in known:
        near: list[str] = difflib.get_close_matches(name, known, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "timm.optim.list_optimizers() lists all"
        )
        raise UserError(f"optimizer.name must be an optimizer of timm, got {name!r}; {hint}")
    if name in NOT_REPEATABLE or get_optimizer_info(name).second_order:
        raise UserError(
            f"optimizer.name must not be {name!r}: its steps depend on random choices that no "
            "checkpoint holds"
        )


def unused_settings(settings: OptimizerSettings) -> list[str]:
    """Which of `betas` and `momentum` the optimizer does not take."""
    info = get_optimizer_info(settings.name)
    taken = {
        "betas": info.has_betas and info.num_betas == len(settings.betas),
        "momentum": info.has_momentum,
    }
    return [name for name in taken if not taken[name]]


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
        warmup = (
            f"at least 0 and less than schedule.epochs ({self.epochs}; fewer epochs need a shorter "
            f"warm-up, such as {self.epochs / 10:g})"
        )
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
            (
                "warmup_epochs",
                not in_epochs or not self.milestones or self.warmup_epochs < self.milestones[0],
                "less than the first of schedule.milestones",
            ),
        )


def check_rates(settings: OptimizerSettings, schedule: ScheduleSettings) -> None:
    """UserError where the learning rate would rise in its decay, or fall in the warm-up."""
    warmup = schedule.warmup_epochs if schedule.warmup_steps is None else schedule.warmup_steps
    rates = {}
    if warmup > 0:
        rates["warmup_lr"] = schedule.warmup_lr
    if schedule.decay != "step":
        rates["min_lr"] = schedule.min_lr
    for key, rate in rates.items():
        if rate > settings.lr:
            raise UserError(
                f"schedule.{key} must be at most optimizer.lr ({settings.lr:g}), got {rate:g}"
            )


def build_schedule(
    optimizer: Optimizer,
    total_steps: int,
    settings: OptimizerSettings,
    schedule: ScheduleSettings,
    scale: float = 1.0,
) -> Scheduler:
    """Build the course of the learning rates; `step_update(step)` sets those of the step after
    `step` others, each times its group's `lr_scale`.

    With W warm-up steps of T in all: linear from `warmup_lr` at step 0 to `lr` at step W, then half
    a cosine or a line from `lr` to `min_lr` at step T, where it stays; or `lr`, a tenth of it after
    the first milestone, and so on.

    Args:
        optimizer: whose groups get the rates.
        total_steps: T.
        settings: has `lr`.
        schedule: has the rest.
        scale: factor on all rates, as of `batch_scale`.

    Raises UserError for a warm-up in steps that does not end before the decay, or the training.
    """
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * scale  # whatever a checkpoint has left in the group
    built = _course(optimizer, total_steps, schedule, scale)
    for group in optimizer.param_groups:
        del group["initial_lr"]  # which the schedule keeps itself, and checkpoints need not
    return built


def _course(
    optimizer: Optimizer, total_steps: int, schedule: ScheduleSettings, scale: float
) -> Scheduler:
    """The schedule of `build_schedule` over the groups' rates."""
    per_epoch = total_steps / schedule.epochs
    milestones = [round(per_epoch * epoch) for epoch in schedule.milestones]
    warmup_steps = schedule.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(total_steps * schedule.warmup_epochs / schedule.epochs)
    elif warmup_steps >= (first := min([total_steps, *milestones])):
        raise UserError(
            f"schedule.warmup_steps must be less than {first}, the steps before the first of "
            f"schedule.milestones or the end of the training, got {warmup_steps}"
        )
    common: dict[str, Any] = {
        "t_in_epochs": False,
        "warmup_t": warmup_steps,
        "warmup_lr_init": schedule.warmup_lr * scale,
    }
    if schedule.decay == "step":
        # timm takes the milestone m at step m - 1
        milestones = [step + 1 for step in milestones]
        return MultiStepLRScheduler(
            optimizer, milestones, decay_rate=0.1, warmup_prefix=False, **common
        )
    course: Any = CosineLRScheduler
    if schedule.decay == "linear":
        course = partial(PolyLRScheduler, power=1.0)
    after: Scheduler = course(
        optimizer,
        t_initial=max(1, total_steps - warmup_steps),
        lr_min=schedule.min_lr * scale,
        warmup_prefix=True,
        **common,
    )
    return after


def batch_scale(settings: OptimizerSettings, global_batch: int) -> float:
    """Factor on all learning rates for a number of images per step, over all devices and
    accumulated batches.
    """
    return 1.0 if settings.lr_batch is None else global_batch / settings.lr_batch


def build_optimizer(model: nn.Module, settings: OptimizerSettings, global_batch: int) -> Optimizer:
    """Build the optimizer over a module's parameters that are trained, in groups with weight decay
    and without, and of one factor on the rate each, `lr_scale`.

    Without decay: biases, parameters of one dimension, and those that `no_weight_decay()` names, in
    the model or in one of its modules, as in timm. With layer decay: a model's layers are those of
    its `group_matcher`; of a network with a backbone, those of the backbone, and the rest is the
    head.

    Args:
        model: its parameters are optimized.
        settings: rates and decay, stated at `lr_batch` images a step.
        global_batch: images of a step, over all devices and accumulated batches.

    Raises:
        UserError: nothing is trained, the optimizer does not take the arguments or lacks its
            package, a part with a rate of its own is not there, or the model has no layers.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "model.freeze must leave something to train, but all of the model is frozen"
        )
    options = dict(settings.args)
    if "betas" not in unused_settings(settings):
        options.setdefault("betas", settings.betas)
    try:
        return create_optimizer_v2(
            model,
            settings.name,
            lr=settings.lr * batch_scale(settings, global_batch),
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            param_group_fn=partial(_parameter_groups, settings),
            **options,
        )
    except UserError:
        raise
    except (*NOT_BUILT, ImportError) as error:
        raise UserError(
            f"optimizer {settings.name!r} cannot be built with optimizer.args {settings.args}: {error}"
        ) from error


def _parameter_groups(settings: OptimizerSettings, model: nn.Module) -> list[dict[str, Any]]:
    """The groups of `build_optimizer`."""
    exempt = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for name in names()
    ]
    decay = settings.weight_decay
    if settings.layer_decay is None:
        groups = param_groups_weight_decay(model, decay, no_weight_decay_list=exempt)
    else:
        groups = _layer_groups(model, decay, settings.layer_decay, exempt)
    scales = flat_names(settings.lr_scale)
    return _scaled(groups, model, scales) if scales else groups


def _layer_groups(
    model: nn.Module, weight_decay: float, layer_decay: float, exempt: list[str]
) -> list[dict[str, Any]]:
    """Groups whose rates fall from the head to the first layer."""
    layered, prefix = model, ""
    backbone = getattr(model, "backbone", None)
    if isinstance(backbone, FeatureBackbone):
        layered, prefix = backbone.model, BACKBONE
    if not hasattr(layered, "group_matcher"):
        raise UserError(
            "optimizer.layer_decay must be null for this model: it does not say which layers it has "
            "(timm's group_matcher)"
        )
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        layered,
        weight_decay,
        no_weight_decay_list=[name.removeprefix(prefix) for name in exempt],
        layer_decay=layer_decay,
    )
    if not prefix:
        return groups
    for group in groups:
        group["lr_scale"] *= layer_decay  # the head is one layer more
    taken = {id(weight) for group in groups for weight in group["params"]}
    of_head = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt)
    for group in of_head:
        rest = [weight for weight in group["params"] if id(weight) not in taken]
        groups.append({**group, "params": rest, "lr_scale": 1.0})
    return [group for group in groups if group["params"]]


def _scaled(
    groups: Iterable[dict[str, Any]], model: nn.Module, scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Groups divided by the factors on the rates of parts."""
    factors: dict[int, float] = {}
    parts = find_parts(model, list(scales), "optimizer.lr_scale")
    for (_, part), factor in sorted(
        zip(parts, scales.values(), strict=True), key=lambda each: each[0][0].count(".")
    ):
        weights = part.parameters() if isinstance(part, nn.Module) else [part]
        factors.update((id(weight), factor) for weight in weights)
    divided = []
    for group in groups:
        by_factor: dict[float, list[Any]] = {}
        for weight in group["params"]:
            by_factor.setdefault(factors.get(id(weight), 1.0), []).append(weight)
        divided += [
            {**group, "params": weights, "lr_scale": group.get("lr_scale", 1.0) * factor}
            for factor, weights in by_factor.items()
        ]
    return divided
