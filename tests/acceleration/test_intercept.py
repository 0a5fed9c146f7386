"""Accelerated modules are modules: in threads, after errors, with checkpoints, in parts of a model, copied, traced."""

from __future__ import annotations

import copy
import functools
import io
import json
import threading
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_fx
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

import dgt
from dgt.acceleration.intercept import installed_processors, uninstall_processors

ROW = {
    "choice": "groups",
    "heads": 2,
    "channels": 16,
    "tokens": 256,
    "key_tokens": 256,
    "groups": 8,
    "keys": 16,
    "residual_keys": 4,
    "least_tokens": 16,
}


def apply(model: nn.Module, folder: Path, *rows: dict) -> nn.Module:
    """Apply a plan of these rows, which were not measured."""
    numbers = ("asked_error", "predicted_error", "measured_error")
    speedups = ("attention_speedup", "model_speedup", "bound")
    layers = [{**ROW, **row} for row in rows]
    report = {**dict.fromkeys(numbers, 0.1), **dict.fromkeys(speedups, 2.0), "layers": layers}
    path = folder / "plan.json"
    path.write_text(json.dumps({"format": "dgt-plan-2", "report": report}))
    dgt.apply_plan(model, path)
    return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        nn.init.normal_(self.qkv.weight, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(query, key, value)
        return self.proj(output.transpose(1, 2).flatten(2))


class Twice(Attention):
    """Calls attention twice by itself, as differential attention does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - super().forward(x.flip(-1)) / 2


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def call(function, x: Tensor) -> Tensor:
    return function(x)


class Tower(nn.Module):
    """One block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(Attention())
        self.run = call

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.run(self.block, x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x))


NAME = "tower.block.attention"
SHARED = {"name": NAME, "keys": 4, "residual_keys": 0}


@pytest.fixture
def repeated(tmp_path) -> nn.Module:
    """A model with an attention that is called three times."""
    torch.manual_seed(0)
    return apply(Model().eval(), tmp_path, SHARED)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(1))


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 64, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes, **options)
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.7)
    return model.eval()


VIT = [
    {"name": f"blocks.{number}.attn", "tokens": 257, "key_tokens": 257, "prefix": 1}
    for number in range(2)
]
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def oracle(model: nn.Module, x: Tensor) -> Tensor:
    """What the repeated model is to compute, without anything installed."""
    block = model.tower.block
    for _ in range(3):
        y = block.norm(x)
        qkv = block.attention.qkv(y).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = dgt.clustered_attention(*qkv, num_groups=8, top_k=4, residual_keys=0)
        x = x + block.attention.proj(y.transpose(1, 2).flatten(2))
    return model.head(x)


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), list(model.parameters())))


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def assert_same_gradients(found, expected) -> None:
    """Relative to the largest element: sums of many terms differ by rounding."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one / other.abs().max(), other / other.abs().max())


def test_all_calls_of_a_module_share_a_setting(repeated, x) -> None:
    assert_close(repeated(x), oracle(repeated, x))
    assert_same_gradients(
        gradients(repeated, repeated(x)), gradients(repeated, oracle(repeated, x))
    )
    assert "tower.block.attention: 8 groups, 4 keys" in str(repeated)


@pytest.mark.parametrize("kind", ["one model", "copies", "in exact attention"])
def test_threads_do_not_disturb_each_other(kind, repeated, x) -> None:
    with torch.no_grad():
        expected = repeated(x)

    def predict() -> None:
        model = copy.deepcopy(repeated) if kind == "copies" else repeated
        for _ in range(8):
            if kind == "in exact attention":
                with dgt.exact_attention(model):
                    model(x)
            else:
                with torch.no_grad():
                    assert_close(model(x), expected)

    errors: list[BaseException] = []

    def run() -> None:
        try:
            predict()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with torch.no_grad():
        assert_close(repeated(x), expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("place", ["tower.block.norm", NAME, "head"])
def test_nothing_is_left_of_an_interrupted_forward(place, error, repeated, x) -> None:
    expected = repeated(x)

    def stop(*_) -> None:
        raise error

    hook = repeated.get_submodule(place).register_forward_hook(stop)
    with pytest.raises(error):
        repeated(x)
    hook.remove()
    assert_close(repeated(x), expected)
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


ROWS_OF_CALLS = {  # the keys of each call, None for dense attention, and what their module gets
    "most keys": ((4, 200, 60), "8 groups, 200 keys"),
    "dense": ((200, None), "dense"),
}


@pytest.mark.parametrize("kind", ROWS_OF_CALLS)
def test_plans_with_a_row_for_each_call(kind, tmp_path) -> None:
    """The most careful one is for all of them, with the strictest guard, and it is said."""
    keys, expected = ROWS_OF_CALLS[kind]
    rows = [
        {"name": NAME, "call": call, "residual_keys": 0, "allowed_error": 0.5 / (call + 1)}
        | ({"choice": "dense"} if count is None else {"keys": count})
        for call, count in enumerate(keys)
    ]
    model = Model()
    with pytest.warns(RuntimeWarning, match=rf"calls of '{NAME}', .* share one: {expected}"):
        apply(model, tmp_path, *rows)
    settings = [answer.site.setting for answer in installed_processors(model).values()]
    assert [(found.keys, found.allowed_error) for found in settings] == (
        [] if expected == "dense" else [(200, 0.5 / 3)]
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_parts_of_a_model(use_reentrant, repeated, x) -> None:
    """A part works by itself, also where it is computed again in the backward pass."""
    x = x.requires_grad_()
    expected = oracle(repeated, x)
    assert_close(repeated.head(repeated.tower(x)), expected)
    repeated.tower.run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    repeated(x).square().sum().backward()
    found = [parameter.grad for parameter in repeated.parameters()]
    assert_same_gradients(found, gradients(repeated, expected))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [Attention, Twice])
def test_checkpoints_of_blocks(kind, use_reentrant, tmp_path, x) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind()), nn.Linear(32, 3))
    apply(model, tmp_path, {"name": "0.attention", "keys": 4})
    x = x.requires_grad_()
    expected = gradients(model, model(x))
    y = checkpoint(model[0], x, use_reentrant=use_reentrant)
    model[1](y).square().sum().backward()
    assert_same_gradients([parameter.grad for parameter in model.parameters()], expected)


class Recursive(Model):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.tower.block(x)
        return self(x, depth - 1) if depth else self.head(x)


def test_recursion(tmp_path, x) -> None:
    torch.manual_seed(0)
    model = apply(Recursive(), tmp_path, SHARED)
    assert_close(model(x), oracle(model, x))


class Itself(Attention):
    """An attention module that calls itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = x + super().forward(x)
        return self(x, depth - 1) if depth else x


def test_an_attention_module_that_calls_itself(tmp_path, x) -> None:
    torch.manual_seed(0)
    model, plain = apply(Itself(), tmp_path, {**SHARED, "name": ""}), Model()
    plain.tower.block = Block(nn.Module())
    plain.tower.block.norm = plain.head = nn.Identity()
    plain.tower.block.attention = model
    assert_close(model(x), oracle(plain, x))


def test_any_method_of_a_model(tmp_path) -> None:
    model = apply(vit(), tmp_path, *VIT)
    with torch.no_grad():
        expected = model(IMAGES)
        with dgt.exact_attention(model):
            assert not torch.allclose(model(IMAGES), expected, atol=1e-3)
        features = model.forward_features(IMAGES)
        assert_close(model.forward_head(features), expected)
        layers = model.get_intermediate_layers(IMAGES, n=2, norm=True, return_prefix_tokens=True)
        assert_close(layers[1][0], features[:, 1:])
        assert_close(model.forward_intermediates(IMAGES)[0], features)
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(IMAGES)))
        assert_close(model.norm(model.blocks(tokens)), features)
        model.set_grad_checkpointing()
    model.train()
    found = gradients(model, model(IMAGES))
    model.set_grad_checkpointing(False)
    assert_same_gradients(found, gradients(model, model(IMAGES)))
    assert type(model) is type(vit())


def replicate(model: nn.Module) -> nn.Module:
    """A replica as ``DataParallel`` makes it, with weights of its own."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        for name, child in module._modules.items():
            setattr(copies[module], name, copies[child])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(copies[module], name, parameter.detach().clone())
    return copies[model]


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "file": through_a_file, "replica": replicate}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["vit", "repeated"])
def test_copies(kind, way, repeated, x, tmp_path) -> None:
    model, x = (repeated, x) if kind == "repeated" else (apply(vit(), tmp_path, *VIT), IMAGES)
    with torch.no_grad():
        expected = model(x)
        with dgt.exact_attention(model):
            exact = model(x)
            again = COPIES[way](model)
        again = COPIES[way](model) if way == "replica" else again
        assert_close(again(x), expected)
        with dgt.exact_attention(again):
            assert_close(again(x), exact)
        assert_close(again(x), expected)
        for module in again.modules():  # its own weights count
            for name in ("weight", "bias"):
                if isinstance(getattr(module, name, None), Tensor):
                    getattr(module, name).zero_()
        assert not again(x).any()
        assert_close(model(x), expected)


def add_hook(module: nn.Module) -> list[str]:
    """Wrap a module's forward as the library `accelerate` does."""
    seen: list[str] = []
    old = module.forward
    module._old_forward = old

    def new_forward(module: nn.Module, *arguments, **named) -> Tensor:
        seen.append(type(module).__name__)
        return module._old_forward(*arguments, **named)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)
    return seen


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["vit", "repeated"])
def test_forwards_that_are_wrapped(kind, order, repeated, x, tmp_path) -> None:
    if kind == "repeated":
        model, rows, name = Model().eval(), [SHARED], NAME
        model.load_state_dict(repeated.state_dict())
        expected = repeated(x)
    else:
        model, rows, name, x = vit(), VIT, "blocks.0.attn", IMAGES
        expected = apply(vit(), tmp_path, *VIT)(IMAGES)
    places = [model.get_submodule(name), model]
    if order == "after":
        apply(model, tmp_path, *rows)
    seen = [add_hook(place) for place in places]
    if order == "before":
        apply(model, tmp_path, *rows)
    assert_close(model(x), expected)
    assert seen[0]
    uninstall_processors(model)
    assert not torch.allclose(model(x), expected, atol=1e-3)
    for place in places:
        del place.forward
        del place._old_forward


class TorchAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["vit", "repeated", "torch"])
def test_traces(kind, repeated, x, tmp_path) -> None:
    model = repeated
    if kind == "vit":
        model, x = apply(vit(), tmp_path, *VIT), IMAGES
    if kind == "torch":
        torch.manual_seed(0)
        model = apply(
            nn.Sequential(Block(TorchAttention(32, 2, batch_first=True))).eval(),
            tmp_path,
            {"name": "0.attention"},
        )
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        assert_close(traced(x.flip(0)), model(x.flip(0)))
        assert_close(traced(torch.cat([x, x])), model(torch.cat([x, x])))


@pytest.mark.parametrize("kind", ["vit", "repeated"])
def test_compiled(kind, repeated, x, tmp_path) -> None:
    model = repeated
    if kind == "vit":
        model, x = apply(vit(), tmp_path, *VIT), IMAGES
    with torch.no_grad():
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_close(compiled(x), model(x))
        with dgt.exact_attention(model):
            assert_close(compiled(x), model(x))
        assert_close(compiled(x), model(x))


def dinov2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Dinov2Config(**sizes, intermediate_size=64, image_size=64, patch_size=4)
    return hf.Dinov2Model(config).eval()


def plan_rows(model: nn.Module, images: Tensor) -> list[dict]:
    rows = dgt.acceleration.inspect_model(model, images)
    return [{"name": row.name, "tokens": 257, "key_tokens": 257, "prefix": 1} for row in rows]


def switch_off(model: nn.Module) -> str:
    """Have a model compute attention in another way; what its library calls the other one."""
    if isinstance(model, hf.PreTrainedModel):
        model.set_attn_implementation("eager")
        return "set_attn_implementation"
    for block in model.blocks:
        block.attn.fused_attn = False
    return "set_fused_attn"


@pytest.mark.parametrize("build", [vit, dinov2])
def test_attention_that_bypasses_the_function(build, tmp_path) -> None:
    model = build()
    rows = plan_rows(model, IMAGES)
    remedy = switch_off(model)
    with pytest.raises(ValueError, match=rf"must call F\.scaled_dot_product_attention.*{remedy}"):
        apply(model, tmp_path, *rows)
    with pytest.raises(ValueError, match=rf"must call F\.scaled_dot_product_attention.*{remedy}"):
        dgt.accelerate(model, IMAGES)
    assert not installed_processors(model)
    model = apply(build(), tmp_path, *rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IMAGES)
    switch_off(model)
    with pytest.warns(RuntimeWarning, match=rf"is not accelerated: .*{remedy}"):
        model(IMAGES)


def test_attention_of_its_own_that_bypasses_the_function(tmp_path, x) -> None:
    model = apply(nn.Sequential(Block(Attention())), tmp_path, {"name": "0.attention"})
    model[0].attention.forward = lambda x: x
    with pytest.warns(RuntimeWarning, match=r"'0\.attention' is not accelerated"):
        model(x)


EXACT = [{**row, "keys": 256, "residual_keys": 0} for row in VIT]  # of all keys


class LowRank(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(rows, 2) / 10)
        self.down = nn.Parameter(torch.randn(2, columns) / 10)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@pytest.mark.parametrize("order", ["before", "after"])
def test_parametrizations_are_merged(order, tmp_path, x) -> None:
    """Of the module itself, whose class they change as interception does."""
    row = {"name": "0.attention", "keys": 4}

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Block(Twice()))
        model[0].attention.scale = nn.Parameter(torch.ones(32, 32))
        return model

    def adapt(model: nn.Module) -> None:
        torch.manual_seed(1)
        attention = model[0].attention
        parametrize.register_parametrization(attention, "scale", LowRank(32, 32))
        attention.register_forward_hook(lambda module, _, output: output @ module.scale)

    plain = build()
    adapt(plain)
    model = build()
    for step in (adapt, apply) if order == "before" else (apply, adapt):
        step(*(model, tmp_path, row) if step is apply else (model,))
    expected = model(x)
    assert not torch.equal(expected, plain(x))
    assert_close(copy.deepcopy(model)(x), expected)
    parametrize.remove_parametrizations(model[0].attention, "scale")
    assert "scale" in dict(model[0].attention.named_parameters())
    assert_close(model(x), expected)
    uninstall_processors(model)
    assert type(model[0].attention) is Twice
    assert_close(model(x), plain(x))


def test_the_model_as_it_was_while_parametrized(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(TorchAttention(32, 2, batch_first=True))).eval()
    x = torch.randn(1, 256, 32)
    attention = model[0].attention
    parametrize.register_parametrization(attention, "in_proj_weight", LowRank(96, 32))
    before = model(x)
    apply(model, tmp_path, {"name": "0.attention"})
    uninstall_processors(model)
    assert torch.equal(model(x), before)
    parametrize.remove_parametrizations(attention, "in_proj_weight")
    assert_close(model(x), before)
    assert type(attention) is TorchAttention


class Registry(type):
    """A metaclass that keeps the classes it makes, one of a name."""

    known: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: tuple, names: dict) -> type:
        if name in cls.known:
            raise KeyError(f"{name} is registered already")
        cls.known[name] = super().__new__(cls, name, bases, names)
        return cls.known[name]


class OfMetaclass(Attention, metaclass=Registry):
    pass


class OfSubclasses(Attention):
    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, key: str) -> None:
        cls.known[key] = cls


class Registered(OfSubclasses, key="registered"):
    pass


@pytest.mark.parametrize("kind", [OfMetaclass, Registered])
def test_registries_of_classes(kind, tmp_path, x) -> None:
    known = {**OfSubclasses.known, **Registry.known}
    model = apply(nn.Sequential(Block(kind())), tmp_path, {"name": "0.attention"})
    assert_close(through_a_file(model)(x), model(x))
    assert isinstance(model[0].attention, kind)
    assert {**OfSubclasses.known, **Registry.known} == known


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["features", "quantization", "repeated", "copy", "file"])
def test_graphs_of_fx(kind, repeated, x, tmp_path) -> None:
    """A symbolic trace holds what computes attention, guard and exact attention included."""
    rows = [{**row, "allowed_error": 5.0} for row in VIT]
    model, x = (repeated, x) if kind == "repeated" else (apply(vit(), tmp_path, *rows), IMAGES)
    with torch.no_grad():
        if kind == "features":
            graph = create_feature_extractor(model, {"head": "output"})
        elif kind == "quantization":
            graph = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
            graph, model = copy.deepcopy(graph), graph
        else:
            graph = torch.fx.symbolic_trace(model)
        graph = COPIES.get({"copy": "deepcopy"}.get(kind, kind), lambda graph: graph)(graph)

        def run(module: nn.Module) -> Tensor:
            output = module(x)
            return output["output"] if isinstance(output, dict) else output

        assert_close(run(graph), run(model))
        if kind in ("features", "repeated"):
            with dgt.exact_attention(model):
                assert_close(run(graph), model(x))


def per_sample_gradients(model: nn.Module, images: Tensor) -> Tensor:
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, weights, (image[None],)).square().sum()

    gradient = vmap(grad(loss), in_dims=(None, 0))
    return gradient(weights, images)["blocks.0.attn.qkv.weight"]


def change_along(model: nn.Module, images: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return jvp(model, (images,), (images.flip(0),))[1]


FUNCTIONS = {
    "no images": lambda model, images: model(images[:0]),
    "vmap": lambda model, images: vmap(lambda image: model(image[None])[0])(images),
    "vmap of grad": per_sample_gradients,
    "jvp": change_along,
    "make_fx": lambda model, images: make_fx(model)(images.flip(0))(images),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("choice", ["groups", "exact"])
def test_functions_of_a_model_are_as_before(choice, name, tmp_path) -> None:
    rows = [{**row, "choice": choice, "allowed_error": 0.05} for row in EXACT]
    model = apply(vit(), tmp_path, *rows)
    assert_close(FUNCTIONS[name](model, IMAGES), FUNCTIONS[name](vit(), IMAGES))


def test_gradients_of_functions(tmp_path) -> None:
    model, images = apply(vit(), tmp_path, *VIT), IMAGES.clone().requires_grad_()
    expected = torch.autograd.grad(model(images).square().sum(), images)
    assert_same_gradients([grad(lambda x: model(x).square().sum())(IMAGES)], expected)


class Tagged(Tensor):
    """A tensor of another class, as those of distributed tensors and masks are."""


def test_tensors_of_other_classes(tmp_path, x) -> None:
    model = apply(nn.Sequential(Block(Attention())), tmp_path, {"name": "0.attention"})
    with dgt.exact_attention(model):
        expected = model(x)
    found = model(x.as_subclass(Tagged))
    assert type(found) is Tagged
    assert torch.equal(found.as_subclass(Tensor), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("setting", [{}, {"residual_keys": 0, "allowed_error": 5.0}])
@torch.no_grad()
def test_a_broken_image_leaves_the_others_alone(setting, value, tmp_path) -> None:
    model, images = apply(vit(), tmp_path, *({**row, **setting} for row in VIT)), IMAGES.clone()
    images[0, 1, 5, 5] = value
    expected = vit()(images)
    assert torch.equal(model(images)[1], expected[1])
    assert model(images)[0].isnan().all()
    assert expected[0].isnan().all()


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_nested_tensors_are_those_of_pytorch() -> None:
    model = nn.Sequential(Bare())
    x = torch.nested.nested_tensor([torch.randn(2, length, 8) for length in (4, 6)])
    before = model(x)
    dgt.accelerate(model, error=0)
    for ours, theirs in zip(model(x).unbind(), before.unbind(), strict=True):
        assert torch.equal(ours, theirs)


def test_scripts_are_refused() -> None:
    model = nn.Sequential(Bare())
    dgt.accelerate(model, error=0)
    with pytest.raises(ValueError, match=r"cannot be scripted by torch\.jit\.script"):
        torch.jit.script(model)
