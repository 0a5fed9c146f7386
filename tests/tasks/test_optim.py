"""The schedule's values at its key steps, which parameters decay, and the rates of parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dgt.models.heads.upernet import build_upernet
from dgt.tasks.optim import (
    OptimizerSettings,
    ScheduleSettings,
    batch_scale,
    build_optimizer,
    build_schedule,
    check_rates,
)
from dgt.tasks.parts import BACKBONE, flat_names, freeze

PAPER = OptimizerSettings()
COURSE = ScheduleSettings()


def rates(
    steps: Iterable[int],
    total: int,
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
    scale: float = 1.0,
) -> list[float]:
    """The learning rates of some steps, in any order."""
    built = build_optimizer(nn.Linear(1, 1, bias=False), optimizer, 1)
    course = build_schedule(built, total, optimizer, schedule, scale)
    found = []
    for step in steps:
        course.step_update(step)
        found.append(built.param_groups[0]["lr"])
    return found


def test_the_papers_schedule_at_its_key_steps() -> None:
    per_epoch = 1251
    total = 300 * per_epoch
    steps = [0, 10 * per_epoch, 20 * per_epoch, 160 * per_epoch, total, total + 7]
    expected = [1e-6, (1e-3 + 1e-6) / 2, 1e-3, (1e-3 + 1e-5) / 2, 1e-5, 1e-5]
    assert rates(steps, total, PAPER, COURSE) == pytest.approx(expected)
    eighth = [rate / 8 for rate in expected]
    assert rates(steps, total, PAPER, COURSE, scale=1 / 8) == pytest.approx(eighth)


@given(total=st.integers(1, 2000), epochs=st.integers(2, 300), warmup=st.floats(0, 0.99))
def test_the_rate_rises_in_the_warmup_and_falls_after_it(
    total: int, epochs: int, warmup: float
) -> None:
    course = ScheduleSettings(epochs=epochs, warmup_epochs=warmup * epochs)
    found = rates(range(total + 1), total, PAPER, course)
    peak = round(total * course.warmup_epochs / epochs)
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert all(1e-6 <= rate <= 1e-3 * (1 + 1e-12) for rate in found)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_a_rate_depends_on_its_step_alone(steps: list[int]) -> None:
    """Whatever steps came before, and whatever rates a checkpoint had left in the groups."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    settings = OptimizerSettings(lr_scale={"0": 0.5})
    optimizer = build_optimizer(model, settings, 1024)
    course = build_schedule(optimizer, 60, settings, COURSE)
    for step in steps:
        course.step_update(step)
    resumed = build_optimizer(model, settings, 1024)
    resumed.load_state_dict(optimizer.state_dict())
    again = build_schedule(resumed, 60, settings, COURSE)
    again.step_update(steps[-1])
    found = [group["lr"] for group in optimizer.param_groups]
    assert found == [group["lr"] for group in resumed.param_groups]


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
        (OptimizerSettings, {"momentum": 1.0}, "optimizer.momentum"),
        (OptimizerSettings, {"layer_decay": 0.0}, "optimizer.layer_decay"),
        (OptimizerSettings, {"lr_scale": {"stem": 0}}, "optimizer.lr_scale"),
        (OptimizerSettings, {"lr_scale": {"stem": {"a": "fast"}}}, "optimizer.lr_scale"),
        (OptimizerSettings, {"name": "adamv"}, "optimizer.name"),
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
    found = rates((0, 50, 100, 550, 1000, 2000), 1000, optimizer, schedule)
    assert found == pytest.approx([0.0, 3e-5, 6e-5, 3e-5, 0.0, 0.0])


def test_step_decay_takes_a_tenth_at_each_milestone() -> None:
    optimizer = OptimizerSettings(lr=1e-4, lr_batch=16)
    schedule = ScheduleSettings(
        epochs=12, warmup_steps=5, warmup_lr=0.0, decay="step", milestones=(8, 11)
    )
    found = rates((5, 79, 80, 109, 110, 119), 120, optimizer, schedule)
    assert found == pytest.approx([1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6])


@pytest.mark.parametrize(
    ("total", "values"),
    [(500, {"warmup_steps": 500}), (750, {"decay": "step", "milestones": (200,)})],
)
def test_a_warmup_that_does_not_end_before_the_decay_is_refused(
    total: int, values: dict[str, Any]
) -> None:
    schedule = ScheduleSettings(**{"warmup_steps": 500, **values})
    with pytest.raises(ValueError, match=r"^schedule\.warmup_steps must be less than 500, .* 500$"):
        rates([0], total, PAPER, schedule)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 100}, "warmup_steps must be given if schedule.steps is"),
        ({"steps": 100, "warmup_steps": 100}, "steps must be null or above schedule.warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps must be null or at least 0, got -1"),
        ({"decay": "step"}, "milestones must be epochs in ascending order"),
        ({"decay": "step", "milestones": (11, 8)}, "milestones must be epochs in ascending order"),
        ({"decay": "step", "milestones": (8, 400)}, "milestones must be epochs in ascending order"),
        ({"milestones": (8,)}, "milestones must be epochs in ascending order"),
        ({"decay": "step", "steps": 9, "warmup_steps": 0}, "decay must be cosine or linear with"),
        ({"decay": "step", "milestones": (20, 40)}, "warmup_epochs must be less than the first of"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^schedule\.{message}"):
        ScheduleSettings(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "warmup_lr must be at most optimizer.lr"),
        ({"warmup_epochs": 0.0}, "min_lr must be at most optimizer.lr"),
        ({"warmup_epochs": 0.0, "min_lr": 0.0}, None),
        ({"warmup_epochs": 0.0, "decay": "step", "milestones": (8,)}, None),
    ],
)
def test_rates_above_the_highest_are_refused(values: dict[str, Any], message: str | None) -> None:
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused:
        check_rates(OptimizerSettings(lr=1e-7), ScheduleSettings(**values))


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


def scales_of(model: nn.Module, settings: OptimizerSettings) -> dict[str, float]:
    """The factor on the rate of every parameter that is trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, settings, 1024).param_groups
    return {names[id(p)]: group.get("lr_scale", 1.0) for group in groups for p in group["params"]}


def test_layer_decay_multiplies_from_the_head_down() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    found = scales_of(model, OptimizerSettings(layer_decay=0.5))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert found["head.weight"] == 1
    depth = len(model.blocks)
    for index in range(depth):
        assert found[f"blocks.{index}.mlp.fc1.weight"] == 0.5 ** (depth - index)
    assert found["patch_embed.proj.weight"] == 0.5 ** (depth + 1)


def test_layer_decay_of_a_network_with_a_head_is_that_of_its_backbone() -> None:
    classifier = timm.create_model("test_resnet", num_classes=3)
    network = build_upernet("test_resnet", 3, channels=8)
    settings = OptimizerSettings(layer_decay=0.5)
    expected, found = scales_of(classifier, settings), scales_of(network, settings)
    heads = {name: value for name, value in found.items() if not name.startswith(BACKBONE)}
    assert heads
    assert set(heads.values()) == {1.0}
    for name, value in found.items():
        if name.startswith(BACKBONE):
            assert value == expected[name.removeprefix(BACKBONE)]


def test_layer_decay_needs_a_model_that_knows_its_layers() -> None:
    with pytest.raises(ValueError, match=r"^optimizer\.layer_decay must be null for this model"):
        build_optimizer(nn.Linear(2, 2), OptimizerSettings(layer_decay=0.5), 1)


def test_parts_have_rates_of_their_own() -> None:
    model = timm.create_model("dgt_nano", num_classes=3)
    scale = {"stages": {"0": 0.5, "0.blocks.0": 0.25}, "stem": 0.1, "head.fc.bias": 2.0}
    found = scales_of(model, OptimizerSettings(lr_scale=scale))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, value in found.items():
        expected = next(
            (
                factor
                for part, factor in sorted(
                    flat_names(scale).items(), key=lambda each: -len(each[0])
                )
                if f"{name}.".startswith(f"{part}.")
            ),
            1.0,
        )
        assert value == expected, name
    both = scales_of(model, OptimizerSettings(lr_scale={"stem": 0.1}, layer_decay=0.5))
    plain = scales_of(model, OptimizerSettings(layer_decay=0.5))
    for name in both:
        assert both[name] == pytest.approx(plain[name] * (0.1 if name.startswith("stem") else 1))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lamb", "adan", "lion", "nadamw"])
def test_optimizers_of_timm_take_a_step_with_what_a_recipe_says(name: str) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    settings = OptimizerSettings(name=name, lr=0.01, lr_scale={"fc": 0.5})
    optimizer = build_optimizer(model, settings, 1024)
    before = {key: value.clone() for key, value in model.named_parameters()}
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    moved = {key for key, value in model.named_parameters() if not torch.equal(before[key], value)}
    assert {"layer1.0.conv1.weight", "fc.weight", "fc.bias"} <= moved
    assert all(value.isfinite().all() for value in model.parameters())


def test_what_timm_has_and_a_recipe_cannot_use_is_refused() -> None:
    for name in ("kron", "adahessian"):
        with pytest.raises(ValueError, match=f"optimizer.name must not be {name!r}: its steps"):
            OptimizerSettings(name=name)
    for name, arguments in (("sgd", {"speed": 3}), ("adamw", {"betas": [0.9]})):
        with pytest.raises(ValueError, match=rf"'{name}' cannot be built with optimizer\.args"):
            build_optimizer(nn.Linear(2, 2), OptimizerSettings(name=name, args=arguments), 1)


def test_frozen_weights_are_not_optimized() -> None:
    model = timm.create_model("dgt_nano", num_classes=3)
    freeze(model, ["stem", "stages.0", "head.fc.bias"])
    trained = scales_of(model, OptimizerSettings()).keys()
    assert trained
    assert not any(name.startswith(("stem.", "stages.0.", "head.fc.bias")) for name in trained)
    freeze(model, [name for name, _ in model.named_children()])
    with pytest.raises(ValueError, match=r"model\.freeze must leave something to train"):
        build_optimizer(model, OptimizerSettings(), 1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "stages.9",
            r"got 'stages\.9': did you mean stages\.\d or stages\.\d\? the model consists",
        ),
        ("Stem", "did you mean stem"),
        ("", "the model consists of stem, stages"),
    ],
)
def test_a_part_that_is_not_there_is_refused(name: str, told: str) -> None:
    model = timm.create_model("dgt_nano", num_classes=3)
    with pytest.raises(ValueError, match=rf"^model\.freeze must name parts of the model.*{told}"):
        freeze(model, ["stages.1", name])
    with pytest.raises(ValueError, match=r"^optimizer\.lr_scale must name parts of the model"):
        build_optimizer(model, OptimizerSettings(lr_scale={name: 0.5}), 1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_centroids_move_by_the_rate_of_their_own_layer(name: str) -> None:
    """tau is 0.1 of the step's rate: half the rate, half the way."""

    def moved(factor: float) -> list[float]:
        torch.manual_seed(0)
        model = timm.create_model("dgt_nano", num_classes=3, tau_weighs="new")
        settings = OptimizerSettings(
            name=name, lr=0.02, lr_batch=None, lr_scale={"stages.1": factor}
        )
        optimizer = build_optimizer(model, settings, 1)
        schedule = ScheduleSettings(steps=4, warmup_steps=0, decay="linear", min_lr=0.0)
        build_schedule(optimizer, 4, settings, schedule).step_update(2)
        assert {group["lr"] for group in optimizer.param_groups} == {0.01, 0.01 * factor}
        seeding, images = torch.randn(2, 2, 3, 64, 64)
        with torch.no_grad():
            model(seeding)
        before = [layer.centroids.clone() for layer in layers_of(model)]
        model(images).sum().backward()
        optimizer.step()
        after = [layer.centroids for layer in layers_of(model)]
        return [float((a - b).norm()) for a, b in zip(after, before, strict=True)]

    def layers_of(model: nn.Module) -> list[Any]:
        return [model.get_submodule(f"stages.{stage}.blocks.0.attn") for stage in (0, 1)]

    (whole, faster), (same, slower) = moved(1.0), moved(0.5)
    assert same == pytest.approx(whole, rel=1e-6)
    assert slower == pytest.approx(faster / 2, rel=0.02)
    assert slower > 0
