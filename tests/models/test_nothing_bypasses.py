"""Whatever is done to a model's parts, it predicts what it computes with gradients and without native kernels."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from dgt.models.heads.upernet import build_upernet
from dgt.ops import native_loader

PRODUCTS = (nn.Linear, nn.Conv2d)
NORMS = (nn.BatchNorm2d, nn.LayerNorm)


SIZES = {"depths": (1, 1, 1, 1), "num_groups": 4, "top_k": 8}


def nano(**options: Any) -> nn.Module:
    return timm.create_model("dgt_nano", num_classes=5, **SIZES, **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "DGT-Nano": nano,
    "post-norm": lambda: nano(post_norm=True),
    "segmentation": lambda: build_upernet("dgt_nano", 5, 16, 8, **SIZES),
}


class Adapter(nn.Module):
    """Like those of PEFT: it shows the weight of what it wraps, and adds something of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.extra = copy.deepcopy(base)
        nn.init.normal_(self.extra.weight, std=0.3)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.extra(x)


class Shifted(nn.Module):
    """A parametrization that is not the identity."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.2 * weight.cumsum(0).cos()


def wrap(module: nn.Module) -> nn.Module:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PRODUCTS + NORMS):
                setattr(parent, name, Adapter(child))
    return module


def hook(module: nn.Module) -> nn.Module:
    """Add hooks that change what every part gets and returns."""
    for part in module.modules():
        if isinstance(part, PRODUCTS + NORMS + (nn.GELU, nn.Dropout)):
            part.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.3,))
            part.register_forward_hook(lambda _, inputs, output: output.clamp(-0.7, 2.0))
            part.register_full_backward_hook(lambda _, into, out: None)
    return module


def parametrize(module: nn.Module) -> nn.Module:
    for part in list(module.modules()):
        if isinstance(part, PRODUCTS + NORMS):
            register_parametrization(part, "weight", Shifted())
    return module


def write_data(module: nn.Module) -> nn.Module:
    """Write what PyTorch does not count as a change."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data.add_(0.1 * torch.rand(tensor.shape))
    return module


def replace(module: nn.Module) -> nn.Module:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.GELU):
                setattr(parent, name, nn.SiLU())
            elif isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(1, child.num_features))
    return module


def replicate(module: nn.Module) -> nn.Module:
    """Copy a module as DataParallel does: its weights are plain tensors."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicate(child)
    for name, weight in module._parameters.items():
        found = None if weight is None else (weight + 0.1).detach().requires_grad_()
        setattr(replica, name, found)
    return replica


def copied(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(copy.deepcopy(write_data(module))))


INTERFERENCES = (wrap, hook, parametrize, write_data, replace, replicate, copied)


TOLERANCE = 1e-4  # of float32 after some tens of layers


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected.detach()).norm() / expected.detach().norm())


def first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else first(found[-1])


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    module = MODELS[name]().eval()
    for part in module.modules():
        if isinstance(part, NORMS):
            nn.init.normal_(part.weight, 1.0, 0.2)
            nn.init.normal_(part.bias, 0.0, 0.2)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return module, torch.randn(1, 3, 32, 64)


@pytest.mark.parametrize("interfere", INTERFERENCES)
@pytest.mark.parametrize("name", MODELS)
def test_a_prediction_is_what_is_computed_with_gradients(name, interfere, monkeypatch) -> None:
    module, x = build(name)
    with torch.no_grad():
        before = first(module(x))  # fills what might be kept
        module = interfere(module)
        predicted = first(module(x))
        with ThreadPoolExecutor(2) as pool:
            in_threads = list(pool.map(lambda _: first(module(x)), range(4)))
    monkeypatch.setattr(native_loader, "_reason", lambda: "not wanted")
    expected = first(module(x))
    assert expected.requires_grad
    assert all(error(found, expected) < TOLERANCE for found in (predicted, *in_threads))
    assert error(predicted, before) > 10 * TOLERANCE


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", ["DGT-Nano", "post-norm", "CMT"])
def test_every_part_is_called_as_a_module(name, with_gradients) -> None:
    cmt = timm.create_model("dgt_nano_cmt_block", **SIZES).eval()
    module, x = (cmt, torch.randn(1, 3, 32, 64)) if name == "CMT" else build(name)
    calls: dict[str, int] = {}
    for part_name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.ModuleDict):
            calls[part_name] = 0
            count = calls.__setitem__
            part.register_forward_hook(
                lambda *_, key=part_name, count=count: count(key, calls[key] + 1)
            )
    with torch.set_grad_enabled(with_gradients):
        first(module(x))
    assert not [key for key, times in calls.items() if times == 0]


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_quantization_finds_every_linear(name) -> None:
    module, x = build(name)
    linears = [key for key, part in module.named_modules() if type(part) is nn.Linear]
    if torch.backends.quantized.engine == "none":
        pytest.skip("this build of PyTorch has no quantized layers")
    quantized = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, torch.qint8)
    kind = torch.ao.nn.quantized.dynamic.Linear
    assert [key for key, part in quantized.named_modules() if type(part) is kind] == linears
    assert error(first(quantized(x)), first(module(x))) < 0.1


def feed_forward_linears(module: nn.Module) -> list[str]:
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return [name for name in names if name.endswith(("ffn.expand", "ffn.project"))]


@pytest.mark.parametrize("name", MODELS)
def test_low_rank_adapters_of_feed_forward_networks_act(name) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    module, x = build(name)
    linears = feed_forward_linears(module)
    before = first(module(x))
    config = peft.LoraConfig(target_modules=["expand", "project"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, module)
    adapted = [key for key, part in module.named_modules() if hasattr(part, "lora_A")]
    assert adapted == linears
    expected = first(module(x))
    with torch.no_grad():
        assert error(first(module(x)), expected) < TOLERANCE
    assert error(expected, before) > 10 * TOLERANCE
    expected.square().sum().backward()
    trained = [key for key, weight in module.named_parameters() if weight.grad is not None]
    assert {key.partition(".lora_")[0] for key in trained if "lora_" in key} == set(linears)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_of_feed_forward_networks_are_used(name) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    module, x = build(name)
    linears = feed_forward_linears(module)
    expected = first(module(x))
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(module, config, filter_fn=lambda _, key: key in linears)
    kinds = {type(module.get_submodule(key).weight).__module__ for key in linears}
    assert all(kind.startswith("torchao") for kind in kinds)
    with torch.no_grad():
        found = first(module(x))
    assert TOLERANCE < error(found, expected) < 0.1
