"""Plans: what a model that one is applied to does, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import dgt
from dgt.acceleration import plan_names
from dgt.acceleration.intercept import installed_processors
from dgt.acceleration.plan import find_plan, read_plan

from .small_models import SIZE, difference, smooth_images, vit
from .test_intercept import apply


@pytest.mark.usefixtures("slow_attention")
def test_a_plan_serves_a_model_with_the_same_layers(tmp_path) -> None:
    model, images = vit(), torch.randn(4, 3, SIZE, SIZE)
    report = dgt.accelerate(model, images, 0.2)
    report.save(tmp_path / "plan.json")
    other = vit()
    again = dgt.apply_plan(other, tmp_path / "plan.json")
    with torch.no_grad():
        assert torch.equal(other(images), model(images))
    assert again.to_json() == report.to_json()
    json.dumps(again.to_json())

    with pytest.raises(ValueError, match=r"model must have .* but has no 'blocks\.0\.attn'"):
        dgt.apply_plan(nn.Linear(3, 3), tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError, match=r"plan .* does not exist"):
        dgt.apply_plan(vit(), tmp_path / "none")
    (tmp_path / "text").write_text("no plan")
    (tmp_path / "json").write_text(
        '{"format": "dgt-plan-2", "report": {"layers": [{"name": "blocks.0.attn"}]}}'
    )
    with pytest.raises(ValueError, match=r"'.*json' is not a valid plan: "):
        dgt.apply_plan(vit(), tmp_path / "json")
    with pytest.raises(ValueError, match="is not a valid plan"):
        dgt.apply_plan(vit(), tmp_path / "text")
    (tmp_path / "other").write_text('{"format": "dgt-plan-1"}')
    with pytest.raises(ValueError, match=r"its format is not dgt-plan-2"):
        dgt.apply_plan(vit(), tmp_path / "other")


@pytest.mark.parametrize("name", plan_names())
def test_plans_of_the_package_are_read_as_they_are_written(name) -> None:
    """Settings, bounds and times, under the keys of the file."""
    written = json.loads(find_plan(name).read_bytes())["report"]
    report = read_plan(find_plan(name))
    again = report.to_json()
    for row, row_again in zip(written["layers"], again["layers"], strict=True):
        assert row.pop("call") == 0  # of plans that had a row for each call
        assert not row_again.pop("sizes_vary")  # which they do not say
        assert row_again.pop("error") == pytest.approx(row.pop("error"), rel=1e-12)  # squared
    assert again == written
    assert (report.speedup_limit, report.compared_output) == (written["bound"], written["measured"])


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4}, "must have the plan's 2 heads .* got 4"),
        ({"embed_dim": 64}, "plan's 16 channels .* got 32"),
        ({"depth": 3}, "must have the plan's 2 attention modules, got 3"),
        ({"depth": 1}, r"must have the plan's layers, but has no 'blocks\.1\.attn'"),
    ],
)
def test_a_plan_of_other_sizes(options, message, tmp_path) -> None:
    dgt.accelerate(vit(), torch.randn(2, 3, SIZE, SIZE), 0.9).save(tmp_path / "plan")
    other = vit(**options)
    with pytest.raises(ValueError, match=message):
        dgt.apply_plan(other, tmp_path / "plan")
    assert not installed_processors(other)
    with pytest.raises(TypeError, match="model must be a module, got 'vit'"):
        dgt.apply_plan("vit", tmp_path / "plan")


@pytest.mark.parametrize(
    "wrong",
    [{"first_order": "no"}, {"most_batch": "4"}, {"frame": [1, 0]}, {"positions": [-1]}],
)
def test_a_plan_whose_values_make_no_sense(wrong, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"plan\.json' is not a valid plan"):
        apply(vit(), tmp_path, {"name": "blocks.0.attn", **wrong})


@pytest.mark.usefixtures("slow_attention")
def test_a_plan_of_other_prefix_tokens(tmp_path) -> None:
    """This is refused unless the user gave their number or the plan is older than that field."""
    images = torch.randn(2, 3, SIZE, SIZE)
    counted, given = (
        dgt.accelerate(vit(), images, 0.9, num_prefix_tokens=number) for number in (None, 1)
    )
    counted.save(tmp_path / "plan")
    other = vit(reg_tokens=4)
    with pytest.raises(ValueError, match=r"plan's 1 class .* tokens at 'blocks\.0\.attn', got 5"):
        dgt.apply_plan(other, tmp_path / "plan")
    assert not installed_processors(other)
    for report in (given, dataclasses.replace(counted, prefix_tokens_detected=False)):
        report.save(tmp_path / "plan")
        dgt.apply_plan(vit(reg_tokens=4), tmp_path / "plan")


@pytest.fixture
def named(tmp_path, monkeypatch) -> str:
    """The name of a plan for the small model, in a folder of plans by name."""
    report = dgt.accelerate(vit(), smooth_images(4), 0.2)
    for name in ("small@96-0.2", "small@96-0.1", "large@384-0.2"):
        report.save(tmp_path / f"{name}.json")
    monkeypatch.setattr("dgt.acceleration.plan.PLANS", tmp_path)
    return "small@96-0.2"


@pytest.mark.usefixtures("slow_attention")
def test_plans_by_name(named) -> None:
    assert plan_names() == ["large@384-0.2", "small@96-0.1", "small@96-0.2"]
    model = vit()
    dgt.apply_plan(model, named)
    assert dgt.guard_counts(model)
    unguarded = vit()
    dgt.apply_plan(unguarded, named, guard=False)
    assert installed_processors(unguarded).keys() == installed_processors(model).keys()
    assert not dgt.guard_counts(unguarded)
    with pytest.raises(
        FileNotFoundError,
        match=r"plan 'small@96-0\.3' .* nearest names are 'small@",
    ):
        dgt.apply_plan(vit(), "small@96-0.3")
    larger = vit(img_size=128)
    with pytest.raises(ValueError, match="the plan's size, 576 patches, got one for 1024"):
        dgt.apply_plan(larger, named)
    assert not installed_processors(larger)


@pytest.mark.usefixtures("slow_attention")
def test_a_plan_of_several_sizes_is_checked_on_others(tmp_path) -> None:
    """It was found with images of different sizes, and holds for more of them."""
    model = vit(dynamic_img_size=True)
    images = [torch.randn(1, 3, SIZE, width) for width in (SIZE, SIZE + 8, SIZE, SIZE + 16)]
    dgt.accelerate(model, images, 0.5).save(tmp_path / "plan.json")
    dgt.apply_plan(model, tmp_path / "plan.json")
    report = dgt.check_plan(model, [*images, torch.randn(1, 3, SIZE + 8, SIZE)])
    assert report.inputs == 5
    assert report.guard_checked == 5 * len(installed_processors(model))


@pytest.mark.usefixtures("slow_attention")
@torch.no_grad()
def test_a_plan_is_checked_on_other_images(named) -> None:
    model, images = vit(dynamic_img_size=True), smooth_images(3, seed=7)
    dgt.apply_plan(model, named)
    layers = installed_processors(model).keys()
    report = dgt.check_plan(model, images, metric=len)
    after = model(images)
    with dgt.exact_attention(model):
        before = model(images)
    assert report.measured_error == pytest.approx(difference(after, before), rel=1e-3)
    assert report.error_bound > report.measured_error
    assert report.model_speedup > 1
    assert report.guard_checked == 3 * len(layers)
    assert (report.metric_before, report.metric_after) == (3, 3)
    assert {layer.name for layer in report.layers} == layers
    assert "requested" not in str(report)

    with pytest.raises(ValueError, match=r"inputs must have the plan's 577 tokens .* got 1025"):
        dgt.check_plan(model, torch.randn(2, 3, 128, 128))
    with pytest.raises(ValueError, match="inputs must be at least 1, got 0"):
        dgt.check_plan(model, images[:0])
    with pytest.raises(ValueError, match="model must be accelerated"):
        dgt.check_plan(vit(), images)
    with pytest.raises(TypeError, match="model must be a module, got 'vit'"):
        dgt.check_plan("vit", images)
    assert installed_processors(model).keys() == layers
    assert torch.equal(model(images), after)
