"""What `dgt.accelerate` refuses, and that the model is then as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dgt
from dgt.acceleration.intercept import installed_processors

from .small_models import SIZE, vit

ONE = torch.randn(1, 4)


@pytest.mark.parametrize(
    ("argument", "value", "error", "expected"),
    [
        ("model", "vit", TypeError, "be a module, got 'vit' of type str"),
        ("model", nn.Linear(4, 4), ValueError, "call .*attention, got a Linear that does not"),
        ("inputs", None, ValueError, "be given where error is above 0, got None"),
        ("inputs", [1, 2], TypeError, r"be a tensor .*, got \[1 of type int, 2 of type int\]"),
        (
            "inputs",
            {"x": 3},
            TypeError,
            "be .* from names to such tensors, .*got {x: 3 of type int}",
        ),
        ("inputs", {"x": torch.randn(1, 4)}, ValueError, "be at least 2, .* got 1"),
        (
            "inputs",
            {"x": torch.randn(2, 4), "sizes": torch.ones(3, 2)},
            ValueError,
            r"be tensors \(2, \.\.\.\), .* 'sizes' is .*\(3, 2\).* a mapping per call",
        ),
        (
            "inputs",
            {"x": torch.randn(2, 4), "labels": [{"boxes": ONE}, {"boxes": ONE}]},
            ValueError,
            r"be tensors \(2, \.\.\.\), .* 'labels' is \[{boxes: .* a mapping per call",
        ),
        (
            "inputs",
            {"x": torch.randn(2, 4), "sizes": [(480, 640), (600, 400)]},
            ValueError,
            r"be tensors \(2, \.\.\.\), .* 'sizes' is .* a mapping per call",
        ),
        ("inputs", [torch.randn(1, 4)], ValueError, "be at least 2, .* got 1"),
        ("inputs", torch.randn(0, 4), ValueError, "be at least 2, .* got 0"),
        (
            "inputs",
            [(ONE,), (ONE, 3)],
            ValueError,
            r"all have .* first one, .* but number 1 is \[a ",
        ),
        ("error", -0.1, ValueError, r"be at least 0 and below 1, got -0\.1"),
        ("error", "small", ValueError, "be at least 0 and below 1, got 'small'"),
        ("forward", 3, TypeError, "be a function, got 3"),
        ("metric", "mIoU", TypeError, "be a function, got 'mIoU'"),
        ("approximate", 3, TypeError, "be a pattern of module names, or several, got 3"),
        ("approximate", [], TypeError, r"be a pattern .*, got \[\]"),
        ("approximate", ["*", None], TypeError, "be a pattern .*, got "),
        ("approximate", "*.attn", ValueError, r"name modules of the model, got '\*\.attn'"),
        ("guard", None, TypeError, "be True or False, got None"),
        ("first_order", 1, TypeError, "be True or False, got 1"),
        ("num_prefix_tokens", "1", TypeError, "be an int of at least 0, got '1'"),
        ("num_prefix_tokens", [1, 1], ValueError, "not repeat a position"),
        ("num_prefix_tokens", [-1], ValueError, "be at least 0, got -1"),
        ("num_prefix_tokens", dgt.FrameTokens(5, 4), ValueError, "be fewer than the tokens"),
    ],
)
def test_bad_input(argument, value, error, expected) -> None:
    good = {"model": nn.Linear(4, 4), "inputs": torch.randn(2, 4), "error": 0.1}
    with pytest.raises(error, match=f"^{argument} must {expected}"):
        dgt.accelerate(**{**good, argument: value})


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
    ("model", "expected"),
    [
        (Label, "return floating point tensors"),
        (lambda: torch.compile(vit()), "not be compiled yet"),
        (lambda: compiled_in_place(vit()), "not be compiled yet"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "be no TorchScript yet"),
    ],
)
def test_bad_models(model, expected) -> None:
    with pytest.raises(ValueError, match=f"^model must {expected}"):
        dgt.accelerate(model(), torch.randn(2, 3, SIZE, SIZE), 0.1)


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("num_prefix_tokens", 577, r"be fewer than the 577 tokens of 'blocks\.0\.attn', got 577"),
        (
            "num_prefix_tokens",
            [0, 577],
            "be positions within .*, got 577 for the 577 tokens of 'blo",
        ),
        ("num_prefix_tokens", dgt.FrameTokens(5, 578), "have frames of at most the 577 tokens of"),
        (
            "forward",
            lambda model, item: {"best": model(item).argmax(-1)},
            "return .*, got {best: a ",
        ),
    ],
)
def test_what_does_not_fit_a_model(argument, value, expected) -> None:
    with pytest.raises(ValueError, match=f"^{argument} must {expected}"):
        dgt.accelerate(vit(), torch.randn(2, 3, SIZE, SIZE), 0.1, **{argument: value})


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 3, SIZE, SIZE)])
def test_exact_attention_has_nothing_to_approximate(inputs) -> None:
    with pytest.raises(ValueError, match=r"^approximate must be None w"):
        dgt.accelerate(vit(), inputs, 0, approximate="blocks.*")


def test_modules_without_attention_are_not_to_be_approximated() -> None:
    model = vit()
    patterns = ["blocks.*.attn", "*.mlp"]
    with pytest.raises(ValueError, match=r"call F\.sc.*, got '\*\.mlp'; .* 'blocks\.0\.attn'"):
        dgt.accelerate(model, torch.randn(2, 3, SIZE, SIZE), 0.1, approximate=patterns)
    assert not installed_processors(model)


@pytest.mark.usefixtures("slow_attention")
def test_outputs_whose_sizes_depend_on_values_are_no_outputs_to_compare() -> None:
    """As those of a detector."""
    model = vit()

    def detect(model: nn.Module, images: Tensor) -> Tensor:
        features = model.forward_features(images)
        return features[features > 0]

    with pytest.raises(ValueError, match=r"^forward must return tensors whose number"):
        dgt.accelerate(model, torch.randn(2, 3, SIZE, SIZE), 0.5, forward=detect)
    assert not installed_processors(model)


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
