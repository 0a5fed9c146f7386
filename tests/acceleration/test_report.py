"""What a report says: times, the limit of the speedup, the error of what, a picture."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import dgt
from dgt.acceleration import Report

from .small_models import SIZE, Reader, difference, vit


def test_a_report_says_when_images_are_too_few() -> None:
    report = Report(0.05, [], predicted_error=0.04, predicted_margin=0.016)
    assert (
        "\nnote: 4 times as many inputs would narrow the error's interval to 20 %\n"
        in f"\n{report}"
    )
    for error, half in ((0.04, 0.0079), (0.04, None), (4e-7, 2e-7)):  # the last one is rounding
        assert "note" not in str(
            dataclasses.replace(report, predicted_error=error, predicted_margin=half)
        )


def test_a_report_says_what_single_inputs_may_have() -> None:
    few = Report(0.05, [], error_bound=0.02, largest_error=0.03, inputs=4)
    assert "takes 7 inputs or more to say" in str(few)
    enough = dataclasses.replace(
        few, inputs=12, single_error_95=0.041, single_error_999=0.087, exact_speedup=1.1
    )
    assert "one in twenty may have 0.041 or more, one in a thousand 0.087" in str(enough)
    assert "with exact attention alone about 1.10x" in str(enough)
    without = dataclasses.replace(few, error_bound=0.0)  # exact attention
    assert "single inputs" not in str(without)


def test_a_saved_report_is_json_whatever_its_metric(tmp_path) -> None:
    """Which has no NaN."""
    Report(0.05, [], metric_before=0.5, metric_after=math.nan).save(tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_bytes(), parse_constant=pytest.fail)
    assert (plan["report"]["metric_before"], plan["report"]["metric_after"]) == (0.5, None)


@pytest.mark.usefixtures("slow_attention")
def test_a_picture_of_the_report(tmp_path) -> None:
    report = dgt.accelerate(Reader(), torch.randn(4, 8, 16, 16), 0.9)
    report.plot(tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as picture:
        assert picture.size[0] == 1500
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20
    with pytest.raises(ValueError, match="not supported"):
        report.plot(tmp_path / "report.docx")
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


@pytest.mark.usefixtures("slow_attention")
def test_what_counts_is_what_forward_returns() -> None:
    """For a timm model without a head it is measured on the tokens; the report says so and adds a task metric."""
    model, images = vit(num_classes=0), torch.randn(4, 3, SIZE, SIZE)
    with torch.no_grad():
        before = model.forward_features(images)
        report = dgt.accelerate(model, images, 0.5)
        after = model.forward_features(images)
    assert report.compared_output == "all tokens of forward_features"
    assert difference(after[1:2], before[1:2]) == pytest.approx(report.measured_error, rel=1e-3)
    alike = F.cosine_similarity(after, before, dim=-1)
    assert float(alike.mean()) == pytest.approx(report.cosine_mean, abs=1e-5)
    assert float(alike.flatten().quantile(0.01)) == pytest.approx(report.cosine_low, abs=1e-5)
    assert f"lowest hundredth {report.cosine_low:.5f}" in str(report)

    calls = []

    def largest(outputs: list[Tensor]) -> float:
        calls.append(len(outputs))
        return max(float(output.max()) for output in outputs)

    other = vit(num_classes=0)
    report = dgt.accelerate(
        other,
        images,
        0.5,
        forward=lambda model, item: model.forward_features(item)[:, 1:],
        metric=largest,
    )
    assert report.compared_output == "the output of forward"
    assert calls == [4, 4]
    assert report.metric_before == pytest.approx(float(before[:, 1:].max()), rel=1e-5)
    assert report.metric_before != report.metric_after
    assert f"metric: {report.metric_before:.6g} before" in str(report)


@pytest.mark.usefixtures("slow_attention")
def test_all_attention_counts_in_the_limit() -> None:
    """On that machine each of nine calls takes 0.1 s, and each reading of the clock 0.1 ms."""
    report = dgt.accelerate(Reader(), torch.randn(8, 8, 16, 16), 0.9)
    before = {layer.title: layer.measurement.dense_ms for layer in report.layers}
    assert before == pytest.approx({**dict.fromkeys(before, 100.1), "shared": 200.2})
    for layer in report.layers:
        pairs = layer.setting.groups + layer.setting.keys + layer.setting.residual_keys
        assert layer.measurement.setting_ms / layer.calls == pytest.approx(
            pairs / 10 + 0.1 if layer.setting.choice == "groups" else 100.1
        )
    after = {layer.title: layer.measurement.setting_ms for layer in report.layers}
    assert report.attention_speedup == pytest.approx(sum(before.values()) / sum(after.values()))
    assert report.speedup_limit > report.model_speedup > 1
