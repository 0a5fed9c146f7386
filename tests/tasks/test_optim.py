"""The schedule's values at its key steps, and which parameters decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dgt.tasks.optim import (
    OptimizerSettings,
    ScheduleSettings,
    batch_scale,
    build_optimizer,
    learning_rate,
)

PAPER = OptimizerSettings()
COURSE = ScheduleSettings()


def test_the_papers_schedule_at_its_key_steps() -> None:
    steps_per_epoch = 1251
    total = 300 * steps_per_epoch
    assert learning_rate(0, total, PAPER, COURSE) == 1e-6
    assert learning_rate(10 * steps_per_epoch, total, PAPER, COURSE) == pytest.approx(
        (1e-3 + 1e-6) / 2
    )
    assert learning_rate(20 * steps_per_epoch, total, PAPER, COURSE) == pytest.approx(1e-3)
    assert learning_rate(160 * steps_per_epoch, total, PAPER, COURSE) == pytest.approx(
        (1e-3 + 1e-5) / 2
    )
    assert learning_rate(total, total, PAPER, COURSE) == pytest.approx(1e-5)
    assert learning_rate(total + 7, total, PAPER, COURSE) == pytest.approx(1e-5)


@given(total=st.integers(1, 5000), epochs=st.integers(2, 300), warmup=st.floats(0, 0.99))
def test_the_rate_rises_in_the_warmup_and_falls_after_it(
    total: int, epochs: int, warmup: float
) -> None:
    course = ScheduleSettings(epochs=epochs, warmup_epochs=warmup * epochs)
    rates = [learning_rate(step, total, PAPER, course) for step in range(total + 1)]
    peak = round(total * course.warmup_epochs / epochs)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(1e-6 <= rate <= 1e-3 for rate in rates)


@pytest.mark.parametrize(
    ("lr_batch", "batch", "scale"),
    [(1024, 1024, 1.0), (1024, 256, 0.25), (64, 96, 1.5), (None, 7, 1)],
)
def test_rates_scale_with_the_global_batch(lr_batch: int | None, batch: int, scale: float) -> None:
    settings = OptimizerSettings(lr_batch=lr_batch)
    assert batch_scale(settings, batch) == scale
    assert build_optimizer(nn.Linear(2, 2), settings, batch).param_groups[0]["lr"] == pytest.approx(
        1e-3 * scale
    )


def test_biases_norms_and_what_the_model_names_go_without_decay() -> None:
    model = timm.create_model("test_vit")
    optimizer = build_optimizer(model, OptimizerSettings(weight_decay=0.05), 1024)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_decay = {
        group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]}
        for group in optimizer.param_groups
    }
    assert set(by_decay) == {0.0, 0.05}
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= by_decay[0.0]
    assert "head.weight" in by_decay[0.05]
    assert by_decay[0.0] | by_decay[0.05] == set(names.values())
    assert all(model.get_parameter(name).ndim > 1 for name in by_decay[0.05])


@pytest.mark.parametrize(
    ("settings", "values", "key"),
    [
        (OptimizerSettings, {"lr": 0.0}, "optimizer.lr"),
        (OptimizerSettings, {"lr": math.nan}, "optimizer.lr"),
        (OptimizerSettings, {"lr_batch": 0}, "optimizer.lr_batch"),
        (OptimizerSettings, {"weight_decay": -1.0}, "optimizer.weight_decay"),
        (OptimizerSettings, {"betas": (0.9, 1.0)}, "optimizer.betas"),
        (OptimizerSettings, {"clip_grad": 0.0}, "optimizer.clip_grad"),
        (ScheduleSettings, {"epochs": 0}, "schedule.epochs"),
        (ScheduleSettings, {"epochs": 5}, "schedule.warmup_epochs"),
        (ScheduleSettings, {"min_lr": -1e-9}, "schedule.min_lr"),
    ],
)
def test_values_out_of_range_are_reported_by_their_key(
    settings: type, values: dict[str, object], key: str
) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be"):
        settings(**values)


def test_linear_decay_is_a_line_from_the_warmup_to_the_end() -> None:
    optimizer = OptimizerSettings(lr=6e-5, lr_batch=16)
    schedule = ScheduleSettings(
        steps=1000, warmup_steps=100, warmup_lr=0.0, min_lr=0.0, decay="linear"
    )
    rates = [
        learning_rate(step, 1000, optimizer, schedule) for step in (0, 50, 100, 550, 1000, 2000)
    ]
    assert rates == pytest.approx([0.0, 3e-5, 6e-5, 3e-5, 0.0, 0.0])


def test_step_decay_takes_a_tenth_at_each_milestone() -> None:
    optimizer = OptimizerSettings(lr=1e-4, lr_batch=16)
    schedule = ScheduleSettings(
        epochs=12, warmup_steps=5, warmup_lr=0.0, decay="step", milestones=(8, 11)
    )
    rates = [learning_rate(step, 120, optimizer, schedule) for step in (5, 79, 80, 109, 110, 119)]
    assert rates == pytest.approx([1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 100}, "schedule.warmup_steps must be given if schedule.steps is"),
        (
            {"steps": 100, "warmup_steps": 100},
            "schedule.steps must be null or above schedule.warmup_steps",
        ),
        ({"warmup_steps": -1}, "schedule.warmup_steps must be null or at least 0, got -1"),
        ({"decay": "step"}, "schedule.milestones must be epochs in ascending order"),
        (
            {"decay": "step", "milestones": (11, 8)},
            "schedule.milestones must be epochs in ascending order",
        ),
        (
            {"decay": "step", "milestones": (8, 400)},
            "schedule.milestones must be epochs in ascending order",
        ),
        ({"milestones": (8,)}, "schedule.milestones must be epochs in ascending order"),
        (
            {"decay": "step", "steps": 9, "warmup_steps": 0},
            "schedule.decay must be cosine or linear with",
        ),
    ],
)
def test_schedules_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleSettings(**values)


def test_models_inside_a_network_name_what_does_not_decay() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.free = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

        def no_weight_decay(self) -> set[str]:
            return {"free"}

    network = nn.Sequential(nn.Linear(2, 2), Inner())
    groups = build_optimizer(
        network, OptimizerSettings(lr_batch=None, weight_decay=0.1), 1
    ).param_groups
    free = [p for group in groups if group["weight_decay"] == 0 for p in group["params"]]
    assert any(p is network[1].free for p in free)
    assert not any(p is network[1].kept or p is network[0].weight for p in free)
