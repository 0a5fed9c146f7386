"""On CPUs a training step computes GELU and BatchNorm in one, and a map plus its depthwise convolution.

It does so only where that is what the modules do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils._python_dispatch import TorchDispatchMode

from dgt.layers import Block, ConditionalPositionEncoding, ConvStem, InvertedResidualFFN
from dgt.ops.cpu import library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)


class Recorder(TorchDispatchMode):
    """The names of our operators that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function.namespace == "dgt":
            self.names.add(function.name().removeprefix("dgt::"))
        return function(*arguments, **(named or {}))


def operators_of(module: nn.Module, x: Tensor) -> set[str]:
    with Recorder() as recorder:
        module(x)
    return recorder.names


def make_network() -> InvertedResidualFFN:
    return InvertedResidualFFN(6).train()


class Passing(nn.Module):
    """An attention that returns what it gets."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x


def make_block() -> Block:
    return Block(6, Passing(), ffn="mlp").train()


def draw_tokens() -> Tensor:
    return torch.randn(2, 4, 5, 6, requires_grad=True)


BOTH = {"gelu_norm", "add_depthwise"}


def test_training_runs_the_operators() -> None:
    assert operators_of(make_network(), draw_tokens()) == BOTH
    stem = ConvStem(3, 8).train()
    assert operators_of(stem, torch.randn(2, 3, 9, 9)) == {"gelu_norm"}
    assert operators_of(make_block(), draw_tokens()) == {"add_depthwise"}


def step(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers of one training step."""
    module = copy.deepcopy(module)
    x = x.detach().requires_grad_()
    output = module(x, mask=torch.arange(80).view(1, 8, 10) % 7 != 3)
    (output * torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view_as(output)).sum().backward()
    found = {"output": output.detach(), "x": x.grad, **dict(module.named_buffers())}
    return found | {f"grad of {name}": it.grad for name, it in module.named_parameters()}


def plainly(module: nn.Module) -> nn.Module:
    """A copy whose modules are called: a hook watches each."""
    module = copy.deepcopy(module)
    for part in module.modules():
        part.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("half", [False, True])
def test_a_step_is_as_exact_as_that_of_the_modules(half) -> None:
    module, x = InvertedResidualFFN(16).train(), torch.randn(2, 8, 10, 16, requires_grad=True)
    exact = step(plainly(module).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plain, found = step(plainly(module), x), step(module, x)
        assert operators_of(module, x) == BOTH
    errors = {"plain": 0.0, "found": 0.0}
    for name, tensor in exact.items():
        assert found[name].dtype == plain[name].dtype, name
        size = max(float(tensor.double().norm()), 1.0)  # some gradients are only rounding
        errors["plain"] += float((plain[name].double() - tensor).norm()) / size
        errors["found"] += float((found[name].double() - tensor).norm()) / size
    assert errors["found"] <= 1.2 * errors["plain"]


class Gelu(nn.GELU):
    """A class of one's own that changes nothing."""


class Norm(nn.BatchNorm2d):
    """The same."""


class Convolution(nn.Conv2d):
    """The same."""


def nothing(*_: Any) -> None:
    """A hook."""


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "a replaced forward": lambda part: setattr(part, "forward", part.forward),
    "a compiler": lambda part: setattr(part, "_compiled_call_impl", part._call_impl),
    "a forward hook": lambda part: part.register_forward_hook(nothing),
    "a forward pre-hook": lambda part: part.register_forward_pre_hook(nothing),
    "a backward hook": lambda part: part.register_full_backward_hook(nothing),
    "a backward pre-hook": lambda part: part.register_full_backward_pre_hook(nothing),
    "a hook on state dicts": lambda part: part.register_state_dict_post_hook(nothing),
    "a hook on loading": lambda part: part.register_load_state_dict_pre_hook(nothing),
}
PARTS = {
    "act": {"add_depthwise"},
    "norm1 norm2": {"add_depthwise"},
    "depthwise": {"gelu_norm"},
}
"""What the network still runs if modules of these names do more than their classes."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", PARTS)
def test_a_part_that_does_more_than_its_class_is_called(names, way) -> None:
    module = make_network()
    for name in names.split():
        WAYS[way](getattr(module, name))
    assert operators_of(module, draw_tokens()) == PARTS[names]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["cpe", "cpe.conv"])
def test_a_position_encoding_that_does_more_than_its_class_is_called(name, way) -> None:
    block = make_block()
    WAYS[way](block.get_submodule(name))
    assert operators_of(block, draw_tokens()) == set()


@pytest.mark.parametrize("names", ["norm1 norm2", "depthwise"])
def test_parametrizations_are_obeyed(names) -> None:
    module = make_network()
    for name in names.split():
        part = getattr(module, name)
        nn.utils.parametrize.register_parametrization(part, "weight", nn.Identity())
    assert operators_of(module, draw_tokens()) == PARTS[names]


OTHERS: dict[str, list[Callable[[], nn.Module]]] = {
    "act": [lambda: nn.GELU("tanh"), nn.SiLU, Gelu],
    "norm1 norm2": [
        lambda: Norm(24),
        lambda: nn.BatchNorm2d(24, affine=False),
        lambda: nn.BatchNorm2d(24, track_running_stats=False),
        lambda: nn.BatchNorm2d(24, momentum=None),
        lambda: nn.BatchNorm2d(24).eval(),
        lambda: nn.GroupNorm(3, 24),
    ],
    "depthwise": [
        lambda: Convolution(24, 24, 3, padding=1, groups=24),
        lambda: nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False),
        lambda: nn.Conv2d(24, 24, 3, padding=1, groups=12),
        lambda: nn.Conv2d(24, 24, 5, padding=2, groups=24),
        lambda: nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=24),
        lambda: nn.Conv2d(24, 24, 3, padding="same", groups=24),
        lambda: nn.Conv2d(24, 24, 3, padding=1, groups=24, padding_mode="reflect"),
    ],
}
"""Modules with another class or other options."""


@pytest.mark.parametrize(
    ("names", "make"), [(names, make) for names, makers in OTHERS.items() for make in makers]
)
def test_another_part_is_called(names, make) -> None:
    module = make_network()
    for name in names.split():
        setattr(module, name, make())
    assert operators_of(module, draw_tokens()) == PARTS[names]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_another_type_are_left_to_the_modules(dtype) -> None:
    module = make_network().to(dtype)
    assert operators_of(module, draw_tokens().to(dtype)) == set()


@pytest.fixture(params=["forward_hook", "forward_pre_hook", "full_backward_hook"])
def hook_of_all_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    handle = getattr(all_modules, f"register_module_{request.param}")(nothing)
    yield
    handle.remove()


@pytest.mark.usefixtures("hook_of_all_modules")
def test_hooks_of_all_modules_are_obeyed() -> None:
    assert operators_of(make_network(), draw_tokens()) == set()


def test_a_replaced_class_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x)
    monkeypatch.setattr(ConditionalPositionEncoding, "forward", lambda self, x: x)
    assert operators_of(make_network(), draw_tokens()) == {"add_depthwise"}
    assert operators_of(make_block(), draw_tokens()) == set()


def test_what_they_give_may_be_changed_in_place() -> None:
    stem = ConvStem(3, 4).train()
    twin = copy.deepcopy(stem)
    twin.register_forward_hook(lambda *call: call[2].mul_(2))
    images = torch.randn(2, 3, 16, 16)
    (2 * stem(images)).square().sum().backward()
    twin(images).square().sum().backward()
    for one, other in zip(stem.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_without_gradients_and_in_forward_mode_the_modules_are_called() -> None:
    module, x = make_network(), draw_tokens()
    with torch.no_grad():
        assert operators_of(module, x) == set()
    assert operators_of(module.requires_grad_(False), x.detach()) == set()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert operators_of(make_network(), dual) == set()


def test_a_batch_of_one_number_is_refused_as_by_pytorch() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        make_network()(torch.randn(1, 1, 1, 6))
