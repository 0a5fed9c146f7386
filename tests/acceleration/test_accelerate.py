"""`dgt.accelerate`: its error, what it leaves unchanged, its price, what is preserved."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgt
from dgt.acceleration import choose, grouped, intercept, measure
from dgt.acceleration.intercept import installed_processors
from dgt.acceleration.search import read_search

from .small_models import SIZE, Heads, difference, vit

MODELS = {
    "vit_tiny_patch16_224": 1,
    "deit3_small_patch16_224": 1,
    "vit_base_patch16_224": 5,  # with registers
    "eva02_tiny_patch14_224": 1,  # rotary positions, and norms in the attention
    "vit_small_patch16_dinov3": 5,
}


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_timm(name) -> None:
    more = {"reg_tokens": 4} if name == "vit_base_patch16_224" else {}
    model, images = vit(name, **more), torch.randn(4, 3, SIZE, SIZE)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        before = model(images)
        report = dgt.accelerate(model, images, error=0.2)
        after = model(images)
        with dgt.exact_attention(model):
            assert torch.equal(model(images), before)
    assert "groups" in {layer.setting.choice for layer in report.layers}
    assert {layer.num_prefix_tokens for layer in report.layers} == {MODELS[name]}
    chosen_by = [0, 2, 3]
    error = difference(after[chosen_by], before[chosen_by])
    assert 0 < error == pytest.approx(report.predicted_error, rel=1e-3, abs=1e-6)
    assert difference(after[1], before[1]) == pytest.approx(
        report.measured_error, rel=1e-3, abs=1e-6
    )
    assert report.predicted_error <= 0.2
    assert max(report.predicted_error, report.measured_error) < report.error_bound <= 0.2
    assert report.attention_speedup > 1
    assert report.speedup_limit >= 1
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], weights[key]) for key in weights)


@pytest.mark.usefixtures("slow_attention")
def test_where_groups_are_not_faster_nothing_changes(monkeypatch) -> None:
    for module in (measure, choose):
        monkeypatch.setattr(module, "GAIN", 0.001)  # 0.1 ms there
    model, images = vit(), torch.randn(2, 3, SIZE, SIZE)
    report = dgt.accelerate(model, images, 0.9)
    assert {(layer.setting.choice, layer.reason) for layer in report.layers} == {
        ("dense", "no faster setting within the error")
    }
    assert not installed_processors(model)
    assert report.attention_speedup == report.model_speedup == 1


@pytest.mark.usefixtures("slow_attention")
def test_where_the_whole_model_is_not_faster_nothing_changes(monkeypatch) -> None:
    same = types.SimpleNamespace(model_ms=300.0, attention_ms=200.0)
    monkeypatch.setattr("dgt.acceleration.install.time_choice", lambda *_: (same, same))
    model, images = vit(), torch.randn(2, 3, SIZE, SIZE)
    before = model(images)
    report = dgt.accelerate(model, images, 0.3)
    assert {layer.reason for layer in report.layers} == {"the model as a whole was not faster"}
    assert report.model_speedup == report.attention_speedup == 1
    assert report.speedup_limit == 3
    assert report.predicted_error == report.measured_error == 0
    assert report.predicted_margin is report.measured_margin is None
    assert not installed_processors(model)
    assert torch.equal(model(images), before)


@pytest.mark.usefixtures("slow_attention")
def test_one_slow_run_of_a_large_model_is_not_believed(monkeypatch) -> None:
    disturbed = iter([6000.0, 1500.0])

    def run(_model: object, _run: object, is_exact: bool) -> object:
        ms = 3000.0 if is_exact else next(disturbed)
        site_ms = {f"blocks.{number}.attn": ms / 4 for number in range(2)}
        return types.SimpleNamespace(model_ms=ms, attention_ms=ms / 2, site_ms=site_ms)

    monkeypatch.setattr("dgt.acceleration.install.TimedRun", run)
    report = dgt.accelerate(vit(), torch.randn(6, 3, SIZE, SIZE), 0.3)
    assert report.model_speedup == report.attention_speedup == 2


class InPlace(nn.Module):
    """Normalizes the images that it is given in place, and takes its threshold from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit()

    def forward(self, images: Tensor, thresholds: list[Tensor]) -> Tensor:
        images.sub_(0.5).div_(0.25)
        return self.vit(images.clamp(min=thresholds.pop()))


@pytest.mark.usefixtures("slow_attention")
def test_a_model_may_change_its_inputs_in_place() -> None:
    model, images = InPlace(), torch.rand(4, 3, SIZE, SIZE)
    items = [(images[at : at + 1].clone(), [torch.zeros(())]) for at in range(4)]
    report = dgt.accelerate(model, items, error=0.2)
    checked = dgt.check_plan(model, items)
    for (image, thresholds), expected in zip(items, images.split(1), strict=True):
        assert torch.equal(image, expected)
        assert len(thresholds) == 1
    assert "groups" in {layer.setting.choice for layer in report.layers}
    assert 0 < checked.measured_error <= 0.2


@pytest.mark.usefixtures("slow_attention")
def test_an_accelerated_model_is_a_model() -> None:
    """It can be copied, compiled, trained, and given images of another size."""
    model, images = vit(dynamic_img_size=True), torch.randn(4, 3, SIZE, SIZE)
    dgt.accelerate(model, images, 0.3)
    with torch.no_grad():
        expected = model(images)
        twin = copy.deepcopy(model)
        dgt_calls = installed_processors(twin)
        assert torch.equal(twin(images), expected)
        with dgt.exact_attention(twin):
            assert not torch.equal(twin(images), expected)
            again = copy.deepcopy(twin)  # nothing would end the exact mode of the copy
        assert torch.equal(again(images), expected)
        assert torch.equal(model(images), expected)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(images), expected, rtol=1e-4, atol=1e-4)
        model(torch.randn(1, 3, 2 * SIZE, SIZE))
        model(torch.randn(1, 3, 16, 16))  # fewer than half of the tokens: attended to as before
    assert len(dgt_calls) >= 1
    model.train()(images).square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(kind) -> None:
    model, images = vit().to(kind), torch.randn(2, 3, SIZE, SIZE, dtype=kind)
    report = dgt.accelerate(model, images, 0.5)
    assert "groups" in {layer.setting.choice for layer in report.layers}
    assert model(images).dtype == kind


class Mixed(Heads):
    """Under autocast, which casts for the function, its operands have two types."""

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key = value = query.float()
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("search", [False, True])
def test_autocast(search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are computed in its type, also by a search under it."""
    kinds = set()
    attend = grouped.attend_in_clusters

    def recording(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        kinds.update((query.dtype, key.dtype, value.dtype))
        return attend(query, key, value, **options)

    model, x = Mixed(), torch.randn(2, 256, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=search):
        dgt.accelerate(model, x, 0.9)
    assert installed_processors(model)
    monkeypatch.setattr(grouped, "attend_in_clusters", recording)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert kinds == {torch.bfloat16}


@pytest.mark.usefixtures("slow_attention")
def test_in_inference_mode(tmp_path) -> None:
    """A model that was accelerated there can be trained elsewhere."""
    models = [vit(), vit()]
    with torch.inference_mode():
        dgt.accelerate(models[0], torch.randn(2, 3, SIZE, SIZE), 0.9).save(tmp_path / "plan")
        dgt.apply_plan(models[1], tmp_path / "plan")
    for model in models:
        assert installed_processors(model)
        model.train()(torch.randn(1, 3, SIZE, SIZE)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def count_runs(model: nn.Module) -> list[int]:
    """A list with one entry per call of the model."""
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("count", [2, 3, 6])
def test_its_own_price(count) -> None:
    """At most six passes over the inputs, one if there is nothing to gain."""
    model = vit()
    runs = count_runs(model)
    dgt.accelerate(model, torch.randn(count, 3, SIZE, SIZE), 0.05)
    assert 2 * count < len(runs) <= 6 * count


@pytest.mark.usefixtures("slow_attention")
def test_no_gain_is_said_within_one_pass(slow_attention, monkeypatch) -> None:
    """It stops after the first input because of the bound, or after one pass if nothing is faster."""
    model = vit()
    runs = count_runs(model)
    for module in (measure, choose):
        monkeypatch.setattr(module, "GAIN", 0.001)
    report = dgt.accelerate(model, torch.randn(4, 3, SIZE, SIZE), 0.5)
    assert len(runs) == 4
    assert "nothing gained: no faster setting within the error" in str(report)

    def wait(*_) -> None:
        slow_attention.now += 1000

    model.patch_embed.register_forward_hook(wait)
    runs.clear()
    report = dgt.accelerate(model, torch.randn(4, 3, SIZE, SIZE), 0.5)
    assert len(runs) == 1
    assert "the model would be 1.00x as fast" in report.verdict


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_original_outputs_of_inputs_without_settings(kind, slow_attention, monkeypatch) -> None:
    """The native dense kernel may compute them where it is faster, but only up to float32's rounding."""
    answer = measure.compute_call
    answered = []

    def instant(call, site, setting):
        start = slow_attention.now
        if len(call.query) == 1:  # no batch
            answered.append(setting.choice)
        output = answer(call, site, setting)
        if setting.choice == "exact":
            slow_attention.now = start
        return output

    monkeypatch.setattr(measure, "compute_call", instant)
    model = vit().to(kind)
    images = torch.randn(8, 3, SIZE, SIZE, dtype=kind)
    search = read_search(model, images, 0.0)
    measure.measure_model(search)
    # The kernel is timed on the first input; three of eight are measured, and the others may use it.
    calls = 1 + 5 if kind == torch.float32 else 1
    assert answered == ["exact"] * calls * len(search.sites)
    tolerance = 1e-5 if kind == torch.float32 else 0.0
    for outputs, image in zip(search.outputs, images, strict=True):
        assert difference(outputs[0], model(image[None])) <= tolerance


@pytest.mark.usefixtures("slow_attention")
def test_no_error_allows_exact_attention_alone(monkeypatch) -> None:
    model, images = vit(), torch.randn(4, 3, SIZE, SIZE)
    assert not installed_processors(model)
    before = model(images)
    report = dgt.accelerate(model, images, 0)
    assert {row.setting.choice for row in report.layers} == {
        "dense"
    }  # there the native kernel is not faster
    monkeypatch.setattr(intercept, "read_call", slower(intercept.read_call))
    report = dgt.accelerate(model, images, error=0)
    assert {row.setting.choice for row in report.layers} == {"exact"}
    torch.testing.assert_close(model(images), before, rtol=1e-5, atol=1e-5)
    assert report.error_bound == 0
    with dgt.exact_attention(model):
        assert torch.equal(model(images), before)


def slower(read):
    """Read calls so that the model's own attention is run twice."""

    def read_slower(*arguments, **options):
        call = read(*arguments, **options)
        return call._replace(run=lambda: (call.run(), call.run())[1])

    return read_slower
