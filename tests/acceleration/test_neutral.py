"""Exact attention is neutral: timing leaves no trace, and names of transformers are no way past its checks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.maskformer import modeling_maskformer

import dgt
from dgt.acceleration import exact
from dgt.acceleration.adapters import reason_against

from .small_models import SIZE, vit

IMAGES = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was timed in earnest, on a process that has timed nothing yet; ours is then the faster one."""
    found: list[float] = []
    measure = exact.ratio_of_times

    def measured(call: Any) -> float:
        found.append(measure(call))
        return 0.5

    monkeypatch.setattr(exact, "SECONDS", 0.0)
    monkeypatch.setattr(exact, "_is_faster", {})
    monkeypatch.setattr(exact, "ratio_of_times", measured)
    return found


class Functions(TorchFunctionMode):
    """Counts calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            self.seen.append("attention")
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators that attend."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "attention" in str(operator) or "dgt" in str(operator):
            self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "functions": Functions,
    "operators": Operators,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
def test_timing_leaves_no_trace(mode, training, timings) -> None:
    """A mode sees a call as often where it is timed as where it is not; random numbers stay."""
    model = vit().train(training)
    dgt.accelerate(model, error=0)
    seen = []
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        with torch.no_grad(), MODES[mode]() as watching:
            outputs.append(model(IMAGES).clone())
            assert not torch.is_grad_enabled()
        seen.append((getattr(watching, "seen", None), torch.get_rng_state().tolist()))
    assert len(timings) == (mode != "functions")  # PyTorch's kernel is what they see
    assert seen[0] == seen[1]
    assert torch.equal(outputs[0], outputs[1])


@torch.no_grad()
def test_timing_under_autocast(timings) -> None:
    model = vit()
    dgt.accelerate(model, error=0)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = model(IMAGES), model(IMAGES)
    assert len(timings) == 1
    assert torch.equal(first, second)


@torch.no_grad()
def test_timing_in_threads(timings) -> None:
    model = vit()
    dgt.accelerate(model, error=0)
    outputs: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            outputs.append(model(IMAGES))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 3
    assert len(timings) == 1
    assert all(torch.equal(output, outputs[0]) for output in outputs)


class Attention(nn.Module):
    """Attention with what the native kernel does not have."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, **self.options)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"is_causal": True}])
def test_what_stays_pytorch_is_not_timed(options, timings) -> None:
    """Dropout draws the random numbers that it always did, from the first call on."""
    x = torch.randn(1, 2, 64, 16)
    model = Attention(**options)
    expected, found = [], []
    for outputs in (expected, found):
        torch.manual_seed(7)
        outputs += [model(x), torch.rand(1)]
        dgt.accelerate(model, error=0)
    assert not timings
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@torch.no_grad()
def test_nothing_is_timed_without_values_or_in_a_graph(timings) -> None:
    model = Attention()
    dgt.accelerate(model, error=0)
    x = torch.randn(1, 2, 64, 16)
    graph = make_fx(model)(x)
    attending = [node for node in graph.graph.nodes if "attention" in str(node.target)]
    assert len(attending) == 1
    with FakeTensorMode() as mode:
        assert model(mode.from_tensor(x)).shape == x.shape
    assert not timings


class Noise(nn.Module):
    """Draws random numbers, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images + 1e-6 * torch.randn_like(images))


@pytest.mark.usefixtures("slow_attention")
def test_a_search_leaves_random_numbers_as_they_were(tmp_path) -> None:
    model = Noise()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    dgt.accelerate(model, IMAGES, 0.3).save(tmp_path / "plan.json")
    dgt.apply_plan(model, tmp_path / "plan.json")
    dgt.check_plan(model, IMAGES)
    dgt.acceleration.inspect_model(model, IMAGES)
    assert torch.equal(torch.get_rng_state(), before)


class Masked(nn.Module):
    """Attends among tokens that are drawn at random, as masked autoencoders do, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, torch.rand(x.shape[1]).argsort()[:60]]
        attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return attended


def test_random_numbers_are_no_error() -> None:
    model = Masked()
    dgt.accelerate(model, error=0)
    assert dgt.check_plan(model, torch.randn(2, 90, 16)).measured_error < 1e-5


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
}
WORDS = torch.arange(5, 29)[None]


@pytest.fixture(params=["dgt-exact", "dgt"])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name under which attention is registered with transformers."""
    dgt.register_attention(exact=request.param == "dgt-exact")
    return request.param


@torch.no_grad()
def test_models_that_do_not_support_sdpa(name) -> None:
    """With attention sinks, and with capped scores: transformers refuses "sdpa" for both."""
    sinks = hf.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    for build, config in ((hf.GptOssModel, sinks), (hf.Gemma2Model, hf.Gemma2Config(**SMALL))):
        with pytest.raises(ValueError, match="does not support"):
            build._from_config(config, attn_implementation="sdpa")
        model = build._from_config(config, attn_implementation=name).eval()
        with pytest.raises(ValueError, match=rf"not be '{name}' where .* does not support 'sdpa'"):
            model(WORDS)


@torch.no_grad()
def test_models_that_ask_for_the_name(name) -> None:
    """Their code passes sparse keys in a mask to "sdpa" alone, or drops queries by the name."""
    config = hf.Gemma4TextConfig(**SMALL)
    model = hf.Gemma4TextModel._from_config(config, attn_implementation=name).eval()
    with pytest.raises(ValueError, match="asks for the name 'sdpa'"):
        model(WORDS)


def test_models_with_both_kinds_of_parts() -> None:
    """Of a file's models those count that have the configuration of the attention."""
    attention = modeling_maskformer.MaskFormerDetrSelfAttention
    decoder = modeling_maskformer.MaskFormerDetrDecoder
    assert reason_against(attention, decoder.config_class) is None
    assert "does not support" in str(reason_against(attention, hf.MaskFormerConfig))


@torch.no_grad()
def test_options_that_change_scores(name) -> None:
    """Also of modules that are not of transformers; what says where tokens are is passed on."""
    attend = hf.AttentionInterface()[name]
    module = nn.Identity()
    query, key, value = torch.randn(3, 1, 2, 8, 4)
    places = {"position_ids": torch.arange(8)[None], "sliding_window": 4, "softcap": None}
    output, _ = attend(module, query, key, value, is_causal=False, **places)
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    for option in ("s_aux", "sinks", "indices", "block_indices"):
        with pytest.raises(ValueError, match=f"not be '{name}' with {option}"):
            attend(module, query, key, value, is_causal=False, **{option: torch.zeros(2)})
    with pytest.raises(ValueError, match="softcap"):
        attend(module, query, key, value, is_causal=False, softcap=30.0)


@torch.no_grad()
def test_a_name_in_a_compiled_model(name) -> None:
    config = hf.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )
    model = hf.Dinov2Model._from_config(config, attn_implementation=name).eval()
    images = torch.randn(1, 3, 32, 32)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(images).last_hidden_state
    torch.testing.assert_close(found, model(images).last_hidden_state, rtol=1e-4, atol=1e-4)
