"""`dgt.accelerate`: what it finds in models, what it leaves unchanged, its error, its plan, what is preserved."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import json

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn

import dgt
from dgt.acceleration import (
    Report,
    bound,
    choose,
    confirm,
    inspect_model,
    intercept,
    measure,
    settings,
)
from dgt.acceleration.intercept import installed_processors, uninstall_processors

SIZE = 96  # 6 x 6 patches of 16, or 24 x 24 of 4
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": SIZE, "num_classes": 5}


def vit(name: str = "vit_tiny_patch16_224", spread: float = 0.15, **options) -> nn.Module:
    """A small timm model whose attention is not uniform."""
    torch.manual_seed(3)
    model = timm.create_model(name, **{**SMALL, "patch_size": 4, **options}).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, 0, spread)
    return model


def difference(after: Tensor, before: Tensor) -> float:
    return float(((after - before).norm() / before.norm()).detach())


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
    assert {layer.num_special_tokens for layer in report.layers} == {MODELS[name]}
    chosen_by = [0, 2, 3]
    error = difference(after[chosen_by], before[chosen_by])
    assert 0 < error == pytest.approx(report.predicted_error, rel=1e-3, abs=1e-6)
    assert difference(after[1], before[1]) == pytest.approx(
        report.measured_error, rel=1e-3, abs=1e-6
    )
    assert report.predicted_error <= 0.2
    assert max(report.predicted_error, report.measured_error) < report.error_bound <= 0.2
    assert report.attention_speedup > 1
    assert report.bound >= 1
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], weights[key]) for key in weights)


@pytest.mark.usefixtures("slow_attention")
def test_the_error_is_what_was_asked_for() -> None:
    images = torch.randn(4, 3, SIZE, SIZE)
    reports = [dgt.accelerate(vit(), images, error) for error in (1e-5, 0.02, 0.3)]
    assert all(report.error_bound <= report.asked_error for report in reports)
    assert reports[0].predicted_error < reports[2].predicted_error
    speedups = [report.attention_speedup for report in reports]
    assert speedups == sorted(speedups)
    assert speedups[0] < speedups[2]


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize(("error", "spread"), [(0.004, 0.08), (0.1, 0.15)])
def test_the_bound_holds_for_other_images(error, spread) -> None:
    """The bound is not loose either: the requested error is used."""
    model, others = vit(spread=spread, global_pool="avg"), smooth_images(12, seed=1)
    with torch.no_grad():
        before = model(others)
        report = dgt.accelerate(model, smooth_images(12), error)
        assert 0.4 * error < report.error_bound <= error
        assert difference(model(others), before) <= report.error_bound
    assert report.error_bound < 2 * report.predicted_error


@pytest.mark.parametrize("spread", [0.6, 1.0])
@pytest.mark.parametrize("count", [4, 12, 48])
def test_the_bound_of_an_error(count, spread) -> None:
    """For lognormal squared errors: 19 of 20 such bounds are at least the error of as many other images."""
    draws = torch.Generator().manual_seed(0)
    shares = (
        1e-4 * (spread * torch.randn(600, 2, count, generator=draws, dtype=torch.float64)).exp()
    )
    bounds = []
    held = []
    for seen, unseen in shares:
        limit = bound.error_bound(torch.stack([seen, torch.ones_like(seen)], dim=1))
        bounds.append(limit / float(seen.mean().sqrt()))
        held.append(float(unseen.mean().sqrt()) <= limit)
    assert 0.9 < sum(held) / 600 < 0.99
    assert sum(bounds) / 600 < (2 if count >= 12 else 3)


def test_the_bound_of_no_error() -> None:
    assert bound.error_bound(torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)) == 0
    one = torch.tensor([[1e-4, 1.0]], dtype=torch.float64)
    assert bound.error_bound(one) == pytest.approx(0.01)


def test_the_interval_of_an_error_holds_it() -> None:
    """Squared errors that vary over images like those of a trained classifier, by 1.5 times their mean."""
    draws = torch.Generator().manual_seed(0)
    sizes = 14 + 4 * torch.randn(400, 40, generator=draws, dtype=torch.float64)
    ratios = 0.0025 * torch.distributions.LogNormal(-0.59, 1.086).icdf(
        torch.rand(400, 40, generator=draws, dtype=torch.float64)
    )
    found = [
        torch.stack([ratio * size, size], dim=1) for ratio, size in zip(ratios, sizes, strict=True)
    ]
    errors = [bound.relative_error(one) for one in found]
    halves = [bound.half_interval(one) for one in found]
    held = [abs(error - 0.05) <= half for error, half in zip(errors, halves, strict=True)]
    assert 0.85 < sum(held) / 400 < 0.98
    assert sum(halves) / 400 == pytest.approx(0.05 * 1.96 * 1.5 / 2 / 40**0.5, rel=0.2)
    one = found[0]
    assert bound.half_interval(one[:1]) is None
    assert bound.half_interval(one * torch.tensor([0.0, 1.0])) is None
    assert bound.half_interval(one[:2].repeat(20, 1)) < bound.half_interval(one[:2].repeat(3, 1))


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


def smooth_images(count: int, seed: int = 0) -> Tensor:
    """Images whose neighboring pixels are similar."""
    draws, options = torch.Generator().manual_seed(seed), {"size": SIZE, "mode": "bilinear"}
    sides = (torch.randn(count, 3, side, side, generator=draws) for side in (12, 24, 48))
    return sum((F.interpolate(side, **options) for side in sides), torch.zeros(()))


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
    same = 300.0, {(f"blocks.{number}.attn", 0): 100.0 for number in (0, 1)}
    monkeypatch.setattr("dgt.acceleration.confirm.time_choice", lambda *_: (same, same))
    model, images = vit(), torch.randn(2, 3, SIZE, SIZE)
    before = model(images)
    report = dgt.accelerate(model, images, 0.3)
    assert {layer.reason for layer in report.layers} == {"the model as a whole was not faster"}
    assert report.model_speedup == report.attention_speedup == 1
    assert report.bound == 3
    assert report.predicted_error == report.measured_error == 0
    assert report.predicted_margin is report.measured_margin is None
    assert not installed_processors(model)
    assert torch.equal(model(images), before)


class Reader(nn.Module):
    """Every kind of attention that groups cannot replace, and one that they can."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(
            Kind(kind) for kind in ("plain", "mask", "causal", "cross", "windows", "few", "3d")
        )
        self.shared = Kind("plain")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = images.flatten(2).transpose(1, 2)
        for kind in self.kinds:
            x = x + kind(x)
        return {"tokens": self.shared(self.shared(x)), "count": torch.tensor(3)}


class Kind(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        options = {
            "mask": {"attn_mask": torch.randn(x.shape[1], x.shape[1])},
            "causal": {"is_causal": True},
        }
        if self.kind == "cross":
            key, value = key[:, :, ::2], value[:, :, ::2]
        if self.kind == "few":
            query, key, value = (t[:, :, :9] for t in (query, key, value))
        if self.kind == "windows":
            parts = (t.unflatten(2, (-1, 32)) for t in (query, key, value))
            query, key, value = (t.permute(0, 2, 1, 3, 4).flatten(0, 1) for t in parts)
        if self.kind == "3d":
            query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, **options.get(self.kind, {}))
        if self.kind == "windows":
            out = out.unflatten(0, (len(x), -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        if self.kind == "few":
            return F.pad(out, (0, 0, 0, x.shape[1] - 9)).transpose(1, 2).flatten(2)
        return out.view(len(x), 2, x.shape[1], 4).transpose(1, 2).flatten(2)


@pytest.mark.usefixtures("slow_attention")
def test_what_cannot_be_grouped_stays_and_says_why() -> None:
    torch.manual_seed(0)
    model = Reader()
    report = dgt.accelerate(model, torch.randn(4, 8, 16, 16), 0.9)
    assert {layer.title: layer.reason for layer in report.layers} == {
        "kinds.0": "",
        "kinds.1": "a pairwise mask or bias",
        "kinds.2": "causal",
        "kinds.3": "",
        "kinds.4": "",
        "kinds.5": "few tokens",
        "kinds.6": "",
        "shared": "",
        "shared call 2": "",
    }
    grouped = set(installed_processors(model))
    assert grouped == {"kinds.0", "kinds.3", "kinds.4", "kinds.6", "shared"}
    assert all(module.training for module in model.modules())
    assert "kinds.0" in str(report)
    assert "a pairwise mask or bias" in str(report)


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

    with pytest.raises(ValueError, match="model must not be accelerated already"):
        dgt.apply_plan(other, tmp_path / "plan.json")
    with pytest.raises(
        ValueError, match=r"model must have the plan's layers, but has no 'blocks\.0\.attn'"
    ):
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
    (tmp_path / "other").write_text('{"format": "dgt-plan-3"}')
    with pytest.raises(ValueError, match=r"its format is not dgt-plan-2"):
        dgt.apply_plan(vit(), tmp_path / "other")


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


class Fails(nn.Module):
    def __init__(self, last: int) -> None:
        super().__init__()
        self.inner, self.calls, self.last = vit(), 0, last

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.last:
            raise RuntimeError("out of luck")
        return self.inner(images)


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("last", [3, 5, 8])  # in the first pass, the second, the third
def test_a_model_that_fails_is_as_it_was(last) -> None:
    model, images = Fails(last).train(), torch.randn(4, 3, SIZE, SIZE)
    with pytest.raises(RuntimeError, match="out of luck"):
        dgt.accelerate(model, images, 0.3)
    assert not installed_processors(model)
    assert all(module.training for module in model.modules())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "vit"}, TypeError, "model must be a module, got 'vit' of type str"),
        (
            {"model": nn.Linear(4, 4)},
            ValueError,
            "model must call .*attention, got a Linear that does not",
        ),
        ({"inputs": None}, TypeError, r"inputs must be a tensor \(N, ...\), .*, got None"),
        (
            {"inputs": [1, 2]},
            TypeError,
            r"inputs must be a tensor .*, got \[1 of type int, 2 of type int\]",
        ),
        (
            {"inputs": {"x": 3}},
            TypeError,
            r"inputs must be .* from names to such tensors, .*got {x: 3 of type int}",
        ),
        ({"inputs": {"x": torch.randn(1, 4)}}, ValueError, "inputs must be at least 2, .* got 1"),
        ({"inputs": torch.randn(1, 4)}, ValueError, "inputs must be at least 2, .* got 1"),
        ({"inputs": torch.randn(0, 4)}, ValueError, "inputs must be at least 2, .* got 0"),
        ({"inputs": [torch.randn(1, 4)]}, ValueError, "inputs must be at least 2, .* got 1"),
        (
            {"inputs": [(torch.randn(1, 4),), (torch.randn(1, 4), 3)]},
            ValueError,
            r"inputs must all have the structure of the first one, \[a \(1, 4\) tensor .*\], but number 1 is \[a ",
        ),
        ({"error": -0.1}, ValueError, "error must be at least 0 and below 1, got -0.1"),
        ({"error": 1}, ValueError, "error must be at least 0 and below 1, got 1"),
        ({"error": "small"}, ValueError, "error must be at least 0 and below 1, got 'small'"),
        ({"error": float("nan")}, ValueError, "error must be at least 0 and below 1, got nan"),
        ({"forward": 3}, TypeError, "forward must be a function, got 3"),
        ({"metric": "mIoU"}, TypeError, "metric must be a function, got 'mIoU'"),
        ({"special_tokens": [1, 1]}, ValueError, "special_tokens must not repeat a position"),
        ({"special_tokens": [-1]}, ValueError, "special_tokens must be at least 0, got -1"),
        (
            {"special_tokens": dgt.FrameTokens(5, 4)},
            ValueError,
            "special_tokens must be fewer than the tokens",
        ),
    ],
)
def test_bad_input(change, error, message) -> None:
    arguments = {"model": nn.Linear(4, 4), "inputs": torch.randn(2, 4), "error": 0.1, **change}
    with pytest.raises(error, match=message):
        dgt.accelerate(**arguments)


class Heads(nn.Module):
    """A model that calls the function itself, with fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(8, 32), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.rest(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return (
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


@pytest.mark.usefixtures("slow_attention")
def test_grouped_key_heads_of_a_model_that_is_one_attention() -> None:
    model, x = Heads(), torch.randn(2, 256, 8)
    report = dgt.accelerate(model, x, 0.9)
    assert [layer.setting.choice for layer in report.layers] == ["groups"]
    assert list(installed_processors(model)) == [""]
    grouped = model(x)
    with dgt.exact_attention(model):
        assert 0 < difference(grouped, model(x)) < 0.9


class Outer(Heads):
    """An attention module that contains another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = Heads(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.down(self.inner(x)))


@pytest.mark.usefixtures("slow_attention")
def test_groups_do_not_answer_for_attention_inside() -> None:
    report = dgt.accelerate(Outer(), torch.randn(2, 256, 8), 0.9)
    assert {layer.name: layer.reason for layer in report.layers} == {
        "inner": "",
        "": "contains other attention",
    }


@pytest.mark.usefixtures("slow_attention")
def test_an_accelerated_model_is_saved_whole_and_keeps_what_was_patched() -> None:
    model, images = vit(), torch.randn(2, 3, SIZE, SIZE)
    attention = model.blocks[0].attn
    attention.forward = functools.partial(_twice, attention)
    with torch.no_grad():
        before = model(images)
        dgt.accelerate(model, images, 0.9)
        with dgt.exact_attention(model):
            assert torch.equal(model(images), before)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert installed_processors(again).keys() == installed_processors(model).keys() != set()
        assert torch.equal(again(images), model(images))
        with dgt.exact_attention(again):
            assert torch.equal(again(images), before)
        uninstall_processors(model)
        assert attention.forward.func is _twice
        assert torch.equal(model(images), before)


def _twice(module: nn.Module, *arguments, **named) -> Tensor:
    return 2 * type(module).forward(module, *arguments, **named)


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
def test_autocast() -> None:
    model, x = Mixed(), torch.randn(2, 256, 8)
    dgt.accelerate(model, x, 0.9)
    assert installed_processors(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.blocks[0].compile()
    return model


class Label(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images).argmax(-1)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (Label, {}, ValueError, "model must return floating point tensors"),
        (vit, {"special_tokens": -1}, ValueError, "special_tokens must be at least 0, got -1"),
        (
            vit,
            {"special_tokens": "1"},
            TypeError,
            "special_tokens must be an int of at least 0, got '1'",
        ),
        (
            vit,
            {"special_tokens": [0, 577]},
            ValueError,
            r"special_tokens must be positions within the sequence, got 577 for the 577 tokens of 'blocks\.0\.attn'",
        ),
        (
            vit,
            {"forward": lambda model, item: {"best": model(item).argmax(-1)}},
            ValueError,
            r"forward must return floating point tensors, got {best: a \(1,\) tensor of torch.int64 on cpu}",
        ),
        (
            vit,
            {"special_tokens": 577},
            ValueError,
            r"special_tokens must be fewer than the 577 tokens of 'blocks\.0\.attn', got 577",
        ),
        (
            vit,
            {"special_tokens": dgt.FrameTokens(5, 578)},
            ValueError,
            r"special_tokens must have frames of at most the 577 tokens of 'blocks\.0\.attn', got FrameTokens",
        ),
        (lambda: torch.compile(vit()), {}, ValueError, "model must not be compiled yet"),
        (lambda: compiled_in_place(vit()), {}, ValueError, "model must not be compiled yet"),
    ],
)
def test_bad_models(model, options, error, message) -> None:
    with pytest.raises(error, match=message):
        dgt.accelerate(model(), torch.randn(2, 3, SIZE, SIZE), 0.1, **options)


@pytest.mark.usefixtures("slow_attention")
def test_a_metric_that_is_no_number_is_refused_in_the_first_pass() -> None:
    model = vit()
    images = torch.randn(4, 3, SIZE, SIZE)
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(ValueError, match="metric must return a number, got 'good' of type str"):
        dgt.accelerate(model, images, 0.3, metric=lambda outputs: "good")
    assert len(runs) == len(images)
    assert not installed_processors(model)


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 3, 96), (2, 5, SIZE, SIZE)])
def test_images_of_a_wrong_shape(shape) -> None:
    model = vit().train()
    with pytest.raises(
        ValueError, match=rf"model must accept the inputs, got a \(1, {str(shape[1:])[1:-1]}\) .*: "
    ):
        dgt.accelerate(model, torch.randn(shape))
    assert all(module.training and not module._forward_hooks for module in model.modules())


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


@pytest.mark.usefixtures("slow_attention")
def test_a_plan_of_other_prefix_tokens(tmp_path) -> None:
    """This is refused unless the user gave their number or the plan is older than that field."""
    images = torch.randn(2, 3, SIZE, SIZE)
    counted, given = (
        dgt.accelerate(vit(), images, 0.9, special_tokens=number) for number in (None, 1)
    )
    counted.save(tmp_path / "plan")
    other = vit(reg_tokens=4)
    with pytest.raises(
        ValueError, match=r"plan's 1 class and register tokens at 'blocks\.0\.attn', got 5"
    ):
        dgt.apply_plan(other, tmp_path / "plan")
    assert not installed_processors(other)
    for report in (given, dataclasses.replace(counted, special_tokens_detected=False)):
        report.save(tmp_path / "plan")
        dgt.apply_plan(vit(reg_tokens=4), tmp_path / "plan")


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


class Parts(nn.Module):
    """torch's own module, in all the ways of calling it that hide its attention."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
        kinds = "plain", "bare", "apart", "mask", "weights", "probe"
        options = {"bare": {"bias": False}, "apart": {"kdim": 16, "vdim": 16}}
        self.parts = nn.ModuleDict(
            {
                kind: nn.MultiheadAttention(32, 2, batch_first=batch_first, **options.get(kind, {}))
                for kind in kinds
            }
        )
        for part in self.parts.values():
            nn.init.normal_(
                part.in_proj_weight if part.in_proj_weight is not None else part.q_proj_weight,
                0,
                0.2,
            )
        self.encoder = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), images], dim=1)
        batch_first = self.parts["plain"].batch_first
        x = x if batch_first else x.transpose(0, 1)
        for kind in ("plain", "bare"):
            x = x + self.parts[kind](x, x, x, need_weights=False)[0]
        x = x + self.parts["apart"](x, x[..., :16], x[..., 16:], need_weights=False)[0]
        mask = torch.ones(images.shape[1] + 1, images.shape[1] + 1, dtype=torch.bool).triu(1)
        x = x + self.parts["mask"](x, x, x, attn_mask=mask, need_weights=False)[0]
        x = x + self.parts["weights"](x, x, x)[0]
        x = x if batch_first else x.transpose(0, 1)
        probe = x[:, :1] if batch_first else x[:, :1].transpose(0, 1)
        rest = x if batch_first else x.transpose(0, 1)
        probe = self.parts["probe"](probe, rest, rest, need_weights=False)[0]
        return self.encoder(x) + (probe if batch_first else probe.transpose(0, 1))


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_multi_head_attention_of_torch(batch_first) -> None:
    torch.manual_seed(0)
    model, images = Parts(batch_first).eval(), torch.randn(2, 256, 32)
    runs = []
    with torch.no_grad():
        before = model(images)
        with intercept.trace_sdpa(
            model, lambda _, number, call: runs.append(call.run()) or runs[-1]
        ):  # as in the timing
            torch.testing.assert_close(model(images), before)
        assert [isinstance(output, tuple) for output in runs] == [
            False,
            False,
            True,
            True,
            True,
            False,
            False,
        ]
        report = dgt.accelerate(model, images, 0.9)
        assert {layer.name: layer.reason for layer in report.layers} == {
            "parts.plain": "",
            "parts.bare": "",
            "parts.apart": "extra keys, or separate projections",
            "parts.mask": "a pairwise mask or bias",
            "parts.weights": "called with need_weights",
            "parts.probe": "few tokens",
            "encoder.self_attn": "inside nn.TransformerEncoderLayer, which bypasses it in eval mode",
        }
        assert {
            (layer.heads, layer.tokens, layer.channels, layer.num_special_tokens)
            for layer in report.layers[:5]
        } == {(2, 257, 16, 1)}
        after = model(images)
        assert difference(after[:1], before[:1]) == pytest.approx(report.predicted_error, rel=1e-3)
        assert report.predicted_error > 0
        with dgt.exact_attention(model):
            assert torch.equal(model(images), before)
        for answer in installed_processors(model).values():  # with all keys groups are exact
            for site in answer.sites.values():
                site.measurement.setting = dataclasses.replace(site.setting, keys=257)
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-4)


def test_a_vit_of_torchvision() -> None:
    model = torchvision.models.VisionTransformer(64, 4, 2, 2, 32, 32, num_classes=3)
    rows = inspect_model(model, torch.randn(1, 3, 64, 64))
    assert [(row.reason, row.tokens, row.num_special_tokens, row.note) for row in rows] == [
        ("", 257, 1, "")
    ] * 2
    assert model.training


def test_what_would_be_found_needs_no_values() -> None:
    with torch.device("meta"):
        model, images = timm.create_model("vit_small_patch16_dinov3"), torch.empty(1, 3, 256, 256)
    rows = inspect_model(model, images)
    assert [(row.reason, row.tokens, row.num_special_tokens) for row in rows] == [("", 261, 5)] * 12
    assert {row.reason for row in inspect_model(model, images, least_tokens=300)} == {"few tokens"}
    with pytest.raises(
        TypeError, match=r"inputs must not be empty, got a \(1, 3, 256, 256\) tensor"
    ):
        dgt.accelerate(model, images)


class Registers(nn.Module):
    """Tokens under the names in other implementations of DINO, and attributes that are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.storage_tokens, self.head = nn.Parameter(torch.zeros(1, 4, 8)), nn.Module()
        self.patch_embed, self.blocks = nn.Module(), Heads()
        self.patch_embed.cls_token = nn.Parameter(torch.zeros(8))
        self.head.cls_token = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.blocks(x)


def test_class_and_register_tokens_are_found() -> None:
    model, x = Registers(), torch.randn(1, 256, 8)
    assert [(row.num_special_tokens, row.note) for row in inspect_model(model, x)] == [(5, "")]
    assert [row.num_special_tokens for row in inspect_model(model, x, special_tokens=2)] == [2]
    (row,) = inspect_model(model.blocks, x)
    assert row.num_special_tokens == 0
    assert "no class or register tokens were detected" in row.note


@pytest.mark.usefixtures("slow_attention")
def test_inputs_by_name() -> None:
    model, x = Registers(), torch.randn(4, 256, 8)
    report = dgt.accelerate(model, {"x": x, "scale": 2.0}, 0.9)
    other = Registers()
    other.load_state_dict(model.state_dict())
    assert report.predicted_error == pytest.approx(
        dgt.accelerate(other, x, 0.9).predicted_error, rel=1e-4
    )
    assert report.layers[0].setting.choice == "groups"


@pytest.mark.usefixtures("slow_attention")
def test_all_attention_counts_in_the_bound() -> None:
    """On that machine each of nine calls takes 0.1 s, and each reading of the clock 0.1 ms."""
    report = dgt.accelerate(Reader(), torch.randn(8, 8, 16, 16), 0.9)
    before = {layer.title: layer.measurement.own_ms for layer in report.layers}
    assert before == pytest.approx(dict.fromkeys(before, 100.1))
    for layer in report.layers:
        pairs = layer.setting.groups + layer.setting.keys + layer.setting.residual_keys
        assert layer.measurement.ms == pytest.approx(
            pairs / 10 + 0.1 if layer.setting.choice == "groups" else 100.1
        )
    after = {layer.title: layer.measurement.ms for layer in report.layers}
    assert report.attention_speedup == pytest.approx(sum(before.values()) / sum(after.values()))
    assert report.bound > report.model_speedup > 1


@pytest.mark.usefixtures("slow_attention")
def test_no_speedup_is_above_the_bound() -> None:
    """Both come from the same run with the model's own attention, which takes nearly all of the time there."""
    report = dgt.accelerate(vit(), torch.randn(4, 3, SIZE, SIZE), 0.9)
    ms, by_site = confirm.time_run(vit(), lambda: None, [], is_exact=True)
    assert not by_site
    assert 0 < ms < 1
    assert 1 < report.model_speedup < report.attention_speedup < report.bound


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
    assert report.verdict == "attention takes too little of the model's time (bound 1.00)"


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


@pytest.mark.usefixtures("slow_attention")
def test_what_counts_is_what_forward_returns() -> None:
    """For a timm model without a head it is measured on the tokens; the report says so and adds a task metric."""
    model, images = vit(num_classes=0), torch.randn(4, 3, SIZE, SIZE)
    with torch.no_grad():
        before = model.forward_features(images)
        report = dgt.accelerate(model, images, 0.5)
        after = model.forward_features(images)
    assert report.measured == "all tokens of forward_features"
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
    assert report.measured == "the output of forward"
    assert calls == [4, 4]
    assert report.metric_before == pytest.approx(float(before[:, 1:].max()), rel=1e-5)
    assert report.metric_before != report.metric_after
    assert f"metric: {report.metric_before:.6g} before" in str(report)


class Pair(nn.Module):
    """A matcher: one attention called for each of two point sets, and one across, in nested mappings."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.across = Points(), Points()

    def forward(self, data: dict[str, dict[str, Tensor]]) -> dict[str, list[Tensor]]:
        first, second = (data[side]["points"] for side in ("first", "second"))
        first, second = (
            x + self.within(x, x, data[s]["real"])
            for x, s in ((first, "first"), (second, "second"))
        )
        return {"points": [first + self.across(first, second), second + self.across(second, first)]}


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor, other: Tensor, real: Tensor | None = None) -> Tensor:
        query = self.query(x).unflatten(-1, (2, 8)).transpose(1, 2)
        key, value = self.rest(other).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = None if real is None else real[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)


def pair(seed: int) -> tuple[dict[str, dict[str, Tensor]]]:
    draws = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(1, count, 16, generator=draws) for count in (96, 120))
    real = torch.arange(96)[None] < 80
    return (
        {
            "first": {"points": first, "real": real},
            "second": {"points": second, "real": torch.ones(1, 120, dtype=torch.bool)},
        },
    )


@pytest.mark.usefixtures("slow_attention")
def test_modules_called_more_than_once_across_two_sets(tmp_path) -> None:
    """Every call of a module has its own settings; padding is respected; a plan reproduces it."""
    torch.manual_seed(0)
    model, items = Pair(), [pair(seed) for seed in range(4)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = dgt.accelerate(model, items, 0.5)
    sizes = {(row.title, row.tokens, row.key_tokens) for row in report.layers}
    assert sizes == {
        ("within", 96, 96),
        ("within call 2", 120, 120),
        ("across", 96, 120),
        ("across call 2", 120, 96),
    }
    assert {row.setting.choice for row in report.layers} == {"groups"}
    report.save(tmp_path / "plan.json")
    again = Pair()
    again.load_state_dict(weights)
    dgt.apply_plan(again, tmp_path / "plan.json")
    with torch.no_grad():
        for _ in range(2):
            for new, old in zip(
                again(*items[0])["points"], model(*items[0])["points"], strict=True
            ):
                assert torch.equal(new, old)
    items[1][0]["second"].pop("real")
    expected = r"inputs must all have the structure of the first one, .* but number 1 is"
    with pytest.raises(ValueError, match=expected) as caught:
        dgt.accelerate(Pair(), items, 0.5)
    assert "tensor([" not in str(caught.value)


class Packed(nn.Module):
    """The vision tower of a language model: images of different sizes in one sequence, one attention call each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Points()
        self.inner = Sequences(self.attention)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        return tokens + self.inner(tokens, lengths)


class Sequences(nn.Module):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self.query, self.rest = points.query, points.rest

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        return torch.cat(
            [Points.forward(self, part, part) for part in x.split(lengths, dim=1)], dim=1
        )


@pytest.mark.usefixtures("slow_attention")
def test_packed_sequences() -> None:
    """With changing lengths there is one row for all calls of a module; short sequences stay dense."""
    torch.manual_seed(0)
    model = Packed()
    packs = [[60, 70], [64, 80, 90], [100], [60, 10, 60, 60, 60, 60]]
    items = [
        {"tokens": torch.randn(1, sum(lengths), 16), "lengths": tuple(lengths)} for lengths in packs
    ]
    report = dgt.accelerate(model, items, 0.5)
    (row,) = report.layers
    assert (row.name, row.calls, row.setting.choice) == ("inner", 6, "groups")
    with torch.no_grad():
        after = model(**items[3])
        with dgt.exact_attention(model):
            before = model(**items[3])
    changed = (after - before).abs().amax((0, 2)) > 0
    assert changed[:60].any()
    assert not changed[60:70].any()


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("special", [[5, 0, 100], dgt.FrameTokens(2, 64)])
def test_special_tokens_at_places(special, tmp_path) -> None:
    """They attend to everything and everything attends to them: a class token is exact in any position."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(4, 256, 8)
    places = [0, 5, 100] if isinstance(special, list) else [0, 1, 64, 65, 128, 129, 192, 193]
    with torch.no_grad():
        before = model(x)
        report = dgt.accelerate(model, x, 0.9, special_tokens=special)
        after = model(x)
        assert report.layers[0].num_special_tokens == len(places)
        torch.testing.assert_close(after[:, places], before[:, places], rtol=1e-4, atol=1e-5)
        others = [place for place in range(256) if place not in places]
        assert not torch.allclose(after[:, others], before[:, others], rtol=1e-3, atol=1e-3)
        report.save(tmp_path / "plan")
        other = Heads()
        other.load_state_dict(model.state_dict())
        dgt.apply_plan(other, tmp_path / "plan")
        assert torch.equal(other(x), after)


@pytest.mark.usefixtures("slow_attention")
def test_a_gain_that_batches_lose(slow_attention, monkeypatch) -> None:
    """If groups are slower for four inputs at once, they are used for one input, and dense attention for more."""
    counted = measure.compute_call

    def slow_in_batches(call, *arguments):
        slow_attention.now += 10.0 if len(call.query) > 1 else 0.0
        return counted(call, *arguments)

    monkeypatch.setattr(measure, "compute_call", slow_in_batches)
    model, images = vit(), torch.randn(4, 3, SIZE, SIZE)
    report = dgt.accelerate(model, images, 0.9)
    assert {row.setting.most_batch for row in report.layers if row.setting.choice == "groups"} == {
        1
    }
    with torch.no_grad():
        batch, one = model(images), model(images[:1])
        with dgt.exact_attention(model):
            assert torch.equal(model(images), batch)
            assert not torch.equal(model(images[:1]), one)


@pytest.mark.usefixtures("slow_attention")
def test_larger_inputs_keep_the_share() -> None:
    model = vit(dynamic_img_size=True)
    report = dgt.accelerate(model, torch.randn(2, 3, SIZE, SIZE), 0.9)
    row = next(row for row in report.layers if row.setting.choice == "groups")
    larger = settings.scale_setting(row.setting, 4, 4)
    assert larger == dataclasses.replace(
        row.setting,
        groups=4 * row.setting.groups,
        keys=4 * row.setting.keys,
        residual_keys=4 * row.setting.residual_keys,
    )
    with torch.no_grad():
        assert model(torch.randn(1, 3, 2 * SIZE, 2 * SIZE)).isfinite().all()


@pytest.mark.parametrize("share", settings.SHARES)
@pytest.mark.parametrize("tokens", [20, 200, 5477])
def test_a_budget_is_split_as_it_costs(share, tokens) -> None:
    split = settings.split_budget(share, tokens, tokens, True)
    assert min(split.groups, split.keys, split.residual_keys) >= 1
    if share * tokens > 100:
        pairs = 2.5 * split.groups + 2 * split.residual_keys + split.keys
        assert pairs == pytest.approx(share * tokens, rel=0.05)
