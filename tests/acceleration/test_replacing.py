"""Settings of an accelerated model are replaced by others, or stay where those are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dgt
from dgt.acceleration import inspect_model
from dgt.acceleration.intercept import installed_processors

from .small_models import SIZE, smooth_images, vit

IMAGES = smooth_images(3, seed=7)


@pytest.fixture
def plans(tmp_path: Path, slow_attention: object) -> Path:
    """A folder with two plans: "many.json" of both layers, "few.json" of the second one alone."""
    report = dgt.accelerate(vit(), smooth_images(4), 0.2)
    assert {layer.setting.choice for layer in report.layers} == {"groups"}
    report.save(tmp_path / "many.json")
    first, second = report.layers
    fewer = dataclasses.replace(second.setting, groups=4, keys=8, allowed_error=None)
    measurement = dataclasses.replace(second.measurement, setting=fewer)
    dense = dataclasses.replace(first.measurement, setting=dgt.acceleration.Setting())
    layers = [
        dataclasses.replace(first, measurement=dense),
        dataclasses.replace(second, measurement=measurement),
    ]
    dataclasses.replace(report, layers=layers).save(tmp_path / "few.json")
    return tmp_path


STEPS: dict[str, Callable[[nn.Module, Path], object]] = {
    "exact": lambda model, _: dgt.accelerate(model, error=0),
    "plan": lambda model, plans: dgt.apply_plan(model, plans / "many.json"),
    "other plan": lambda model, plans: dgt.apply_plan(model, plans / "few.json"),
    "search": lambda model, _: dgt.accelerate(model, smooth_images(4), 0.2),
}


def what_it_is(model: nn.Module) -> list[object]:
    """What a model shows of its settings and of what its guards did."""
    kinds = [type(module) for module in model.modules()]
    return [str(model), list(installed_processors(model)), dgt.guard_counts(model), kinds]


@torch.no_grad()
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("exact", "plan"),
        ("plan", "other plan"),
        ("exact", "search"),
        ("plan", "search"),
        ("plan", "exact"),
        ("search", "plan"),
    ],
)
def test_nothing_is_left_of_the_first(first, second, plans) -> None:
    model, alone = vit(), vit()
    original = alone(IMAGES)
    STEPS[first](model, plans)
    model(IMAGES)
    STEPS[second](model, plans)
    STEPS[second](alone, plans)
    assert what_it_is(model) == what_it_is(alone)
    expected = alone(IMAGES)
    assert torch.equal(model(IMAGES), expected)
    assert what_it_is(model) == what_it_is(alone)
    with dgt.exact_attention(model):
        assert torch.equal(model(IMAGES), original)


@torch.no_grad()
def test_a_model_that_was_compiled(plans) -> None:
    """What was compiled with the first settings is compiled again."""
    model = vit()
    STEPS["plan"](model, plans)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(IMAGES)
    STEPS["other plan"](model, plans)  # without a guard, which a compiled model has not
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("first", STEPS)
def test_what_is_refused_or_fails_changes_nothing(first, plans) -> None:
    model = vit()
    STEPS[first](model, plans)
    expected = model(IMAGES)
    before = what_it_is(model)

    def interrupt(model: nn.Module, item: torch.Tensor) -> torch.Tensor:
        runs.append(item)
        if len(runs) == 6:  # while choices are tried
            raise KeyboardInterrupt
        return model(item)

    runs: list[torch.Tensor] = []
    (plans / "broken.json").write_text("{}")
    dgt.accelerate(vit(depth=3), smooth_images(4), 0.2).save(plans / "deeper.json")
    for error, step in (
        (ValueError, lambda: dgt.apply_plan(model, plans / "broken.json")),
        (ValueError, lambda: dgt.apply_plan(model, plans / "deeper.json")),
        (FileNotFoundError, lambda: dgt.apply_plan(model, plans / "none.json")),
        (ValueError, lambda: dgt.accelerate(model, error=0.2)),
        (ValueError, lambda: dgt.accelerate(model, torch.randn(2, 3, SIZE, SIZE + 1), 0.2)),
        (KeyboardInterrupt, lambda: dgt.accelerate(model, IMAGES, 0.2, forward=interrupt)),
    ):
        with pytest.raises(error):
            step()
        assert what_it_is(model) == before
    assert torch.equal(model(IMAGES), expected)


@torch.no_grad()
def test_an_accelerated_model_is_inspected_as_it_was(plans) -> None:
    model = vit()
    expected = inspect_model(model, IMAGES)
    STEPS["plan"](model, plans)
    assert inspect_model(model, IMAGES) == expected
