"""Exact attention at once: without inputs, and by a name of transformers."""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dgt
from dgt.acceleration import exact, inspect_model
from dgt.acceleration.calls import read_call
from dgt.acceleration.intercept import installed_processors, uninstall_processors

from .small_models import SIZE, Heads, vit
from .test_transformers import build


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A machine whose native kernel is faster with more than 40 tokens; the shapes that were timed."""
    shapes = []

    def ratio(call) -> float:
        shapes.append(tuple(call.query.shape))
        return 0.5 if call.query.shape[2] > 40 else 2.0

    monkeypatch.setattr(exact, "_is_faster", {})
    monkeypatch.setattr(exact, "ratio_of_times", ratio)
    return shapes


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of the calls that the native kernel has answered."""
    tokens = []
    answer = exact.dense_attention

    def recording(query: Tensor, *operands: Tensor, **options: object) -> Tensor:
        tokens.append(query.shape[-2])
        return answer(query, *operands, **options)

    monkeypatch.setattr(exact, "dense_attention", recording)
    return tokens


@torch.no_grad()
def test_the_faster_kernel_answers(timed, answered, tmp_path) -> None:
    """A shape is timed once; where PyTorch's kernel is faster nothing changes, to the bit."""
    model = vit(patch_size=16, dynamic_img_size=True)
    small, large = torch.randn(2, 3, 64, 64), torch.randn(2, 3, SIZE, 2 * SIZE)  # 17 and 73 tokens
    before = [model(images) for images in (small, large)]
    report = dgt.accelerate(model, error=0)
    assert [layer.name for layer in report.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert "timed at the first call of every shape" in str(report)
    for _ in range(2):
        assert torch.equal(model(small), before[0])
        torch.testing.assert_close(model(large), before[1], rtol=1e-5, atol=1e-5)
    assert timed == [(2, 2, 17, 16), (2, 2, 73, 16)]
    assert answered == [73] * 4
    answered.clear()
    with dgt.exact_attention(model):
        assert torch.equal(model(large), before[1])
    assert not answered
    copy.deepcopy(model)(large)
    assert answered == [73] * 2
    report.save(tmp_path / "plan.json")
    uninstall_processors(model)
    dgt.apply_plan(model, tmp_path / "plan.json")
    model(large)
    checked = dgt.check_plan(model, large)
    assert checked.inputs == 2
    assert checked.measured_error < 1e-5
    assert answered == [73] * 2 * 4


def test_gradients_and_other_types_are_those_of_pytorch(timed, answered) -> None:
    """The kernel is chosen by the times of inference, and autocast would change the type."""
    model = vit()
    images = torch.randn(1, 3, SIZE, SIZE)
    dgt.accelerate(model, error=0)
    model(images).sum().backward()
    assert not answered
    call = read_call(*torch.randn(3, 1, 2, 50, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert exact.attend_where_faster(call) is None
    assert model.to(torch.bfloat16)(images.bfloat16()).dtype == torch.bfloat16
    with torch.no_grad():
        model(images.bfloat16())
    assert answered == [577] * 2


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_tiny_patch16_siglip_224"]
)
def test_the_modules_that_call_attention_are_known_by_their_code(name) -> None:
    model = vit(name) if timm.is_model(name) else vit("vit_base_patch16_siglip_224")
    images = torch.randn(1, 3, SIZE, SIZE)
    assert attending(model) == {site.name for site in inspect_model(model, images)}


def test_modules_of_other_libraries(timed, answered) -> None:
    """transformers calls a function by name, PyTorch's module one of its own, others a function of theirs."""
    model = build("Dinov2")
    images = {"pixel_values": torch.randn(1, 3, 96, 96)}
    assert attending(model) == {site.name for site in inspect_model(model, images)}
    assert attending(nn.Sequential(Heads(), nn.Linear(2, 2))) == {"0"}
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 50, 8)
    with torch.no_grad():
        before = attention(x, x, x, need_weights=False)[0]
        dgt.accelerate(attention, error=0)
        torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], before)
    assert answered == [50]


def test_what_is_projected_is_projected_once() -> None:
    """Where PyTorch's kernel is to run, as with gradients, attention of its module costs no more than before."""
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 30, 8)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            output = model(x, x, x, need_weights=False)[0]
        counts.append((counter.get_total_flops(), output))
        dgt.accelerate(model, error=0)
    assert counts[0][0] == counts[1][0] > 0
    torch.testing.assert_close(counts[0][1], counts[1][1])


class SeparateProjections(nn.Module):
    """Calls PyTorch's function as fairseq does: with separate projections, and an empty joint one."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out = self.projections
        output, _ = F.multi_head_attention_forward(
            x,
            x,
            x,
            8,
            2,
            torch.empty(0),
            torch.cat((query.bias, key.bias, value.bias)),
            None,
            None,
            False,
            0.0,
            out.weight,
            out.bias,
            need_weights=False,
            use_separate_proj_weight=True,
            q_proj_weight=query.weight,
            k_proj_weight=key.weight,
            v_proj_weight=value.weight,
        )
        return output


def test_separate_projections_are_left_to_pytorch() -> None:
    model, x = nn.Sequential(SeparateProjections()), torch.randn(30, 1, 8)
    before = model(x)
    dgt.accelerate(model, error=0)
    assert torch.equal(model(x), before)


def test_attention_that_is_passed_by_is_told_of() -> None:
    """PyTorch's encoder computes attention by itself in eval mode, if images come first."""
    for batch_first in (True, False):
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=batch_first)
        report = dgt.accelerate(nn.TransformerEncoder(layer, 2), error=0)
        assert ("bypasses it in eval mode" in str(report)) == batch_first


class Attending(nn.Module):
    """Has attention in a method that is not `forward`."""

    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_attention_in_another_method_is_told_of() -> None:
    model = nn.Sequential(Attending(), Heads())
    report = dgt.accelerate(model, error=0)
    assert [layer.reason.partition(":")[0] for layer in report.layers] == [
        "its attention is in another method than forward",
        "",
    ]
    with pytest.raises(ValueError, match="in another method than forward: pass inputs"):
        dgt.accelerate(model[:1], error=0)


def attending(model: nn.Module) -> set[str]:
    """The modules that have exact attention without inputs."""
    names = {layer.name for layer in dgt.accelerate(model, error=0).layers}
    assert names == set(installed_processors(model))
    uninstall_processors(model)
    return names


WITH_TABLES = {  # and how many of their attentions see more than 40 tokens
    "BEiT": (lambda: vit("beit_base_patch16_224", patch_size=12), 2),
    "BEiT of transformers": (lambda: build("Beit", use_relative_position_bias=True), 2),
    "relative positions": (
        lambda: vit("vit_relpos_base_patch16_224", patch_size=12, init_values=1.0),
        2,
    ),
    "windows of TinyViT": (lambda: timm.create_model("tiny_vit_5m_224", **SMALL_TINY_VIT), 3),
}
SMALL_TINY_VIT = {
    "embed_dims": (8, 16, 16, 16),
    "num_heads": (1, 2, 2, 2),
    "depths": (1, 1, 1, 1),
    "num_classes": 5,
}


@pytest.mark.parametrize("name", WITH_TABLES)
@torch.no_grad()
def test_a_fixed_bias_of_all_pairs_is_a_mask(name, timed, answered) -> None:
    make, calls = WITH_TABLES[name]
    model = make().eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:  # tables among them
            nn.init.normal_(parameter, 0, 0.3)
    images = torch.randn(2, 3, SIZE, SIZE)
    before = model(images)[0]
    dgt.accelerate(model, error=0)
    torch.testing.assert_close(model(images)[0], before, rtol=1e-5, atol=1e-5)
    assert len(answered) == calls


@torch.no_grad()
def test_a_name_of_transformers(timed, answered) -> None:
    dgt.register_attention(exact=True)
    images = torch.randn(1, 3, 96, 96)
    model = build("Dinov2").eval()
    before = model(images).last_hidden_state
    model.set_attn_implementation("dgt-exact")
    torch.testing.assert_close(model(images).last_hidden_state, before, rtol=1e-5, atol=1e-5)
    assert answered == [145] * 2
    answered.clear()
    text = hf.LlamaModel(
        hf.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=16,
            attn_implementation="dgt-exact",
        )
    ).eval()
    words = torch.arange(60)[None] % 16
    after = text(words).last_hidden_state
    text.set_attn_implementation("sdpa")
    torch.testing.assert_close(after, text(words).last_hidden_state, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_matcher_of_transformers(timed, answered, tmp_path) -> None:
    """Exact by a name and in place: the same matches of images with different numbers of keypoints."""
    torch.manual_seed(0)
    matcher = small_matcher()
    images = torch.rand(1, 2, 3, 96, 128)  # a pair
    expected = matcher(images, output_hidden_states=True)
    counts = expected.mask.sum(-1).flatten().tolist()
    assert 40 < min(counts) < max(counts)

    def check(matcher: nn.Module) -> None:
        found = matcher(images, output_hidden_states=True)
        for name in ("matches", "keypoints", "mask"):
            assert torch.equal(found[name], expected[name])
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
        assert answered == [max(counts)] * 4  # both attentions of two layers
        answered.clear()

    dgt.accelerate(matcher, error=0)
    check(matcher)
    matcher.save_pretrained(tmp_path)
    dgt.register_attention(exact=True)
    kind = hf.LightGlueForKeypointMatching
    check(kind.from_pretrained(tmp_path, attn_implementation="dgt-exact").eval())


def small_matcher() -> nn.Module:
    """LightGlue with SuperPoint's features, of random weights; it keeps all points in all layers."""
    features = hf.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, descriptor_decoder_dim=32
    )
    sizes = {"descriptor_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LightGlueConfig(
        keypoint_detector_config=features,
        depth_confidence=-1.0,
        width_confidence=-1.0,
        filter_threshold=0.0,
        **sizes,
    )
    matcher = hf.LightGlueForKeypointMatching(config).eval()
    for layer in matcher.transformer_layers:
        for attention in (layer.self_attention, layer.cross_attention):
            nn.init.normal_(attention.q_proj.weight)
            nn.init.normal_(attention.k_proj.weight)
    for (
        parameter
    ) in matcher.keypoint_detector.parameters():  # so that points differ in their scores
        nn.init.normal_(parameter, std=0.3)
    return matcher


def test_without_inputs_only_exact_attention() -> None:
    model = vit()
    with pytest.raises(ValueError, match="inputs must be given where error is above 0"):
        dgt.accelerate(model, error=0.05)
    for wrong in (-1, 1, False, "0", math.nan):
        with pytest.raises(ValueError, match="error must be at least 0 and below 1"):
            dgt.accelerate(model, error=wrong)
    with pytest.raises(ValueError, match="forward must be None without inputs"):
        dgt.accelerate(model, error=0, forward=lambda model, item: model(item))
    with pytest.raises(ValueError, match="whose code calls"):
        dgt.accelerate(nn.Sequential(nn.Linear(2, 2)), error=0)
    for block in model.blocks:
        block.attn.fused_attn = False
    with pytest.raises(ValueError, match="fused attention is off"):
        dgt.accelerate(model, error=0)
    assert not installed_processors(model)
    with pytest.raises(ValueError, match="num_groups must be None"):
        dgt.register_attention(exact=True, num_groups=8, top_k=8)


@pytest.mark.parametrize("slower", ["ours", "PyTorch's"])
def test_the_median_of_pairs_decides(slower, monkeypatch) -> None:
    """Of long calls a part is timed."""
    now = [0.0]
    seen = []

    def kernel(seconds: float):
        def attend(query: Tensor, **_: object) -> Tensor:
            seen.append(tuple(query.shape))
            now[0] += seconds
            return query

        return attend

    monkeypatch.setattr(exact, "dense_attention", kernel(0.2 if slower == "ours" else 0.1))
    monkeypatch.setattr(exact, "SDPA", kernel(0.1 if slower == "ours" else 0.2))
    monkeypatch.setattr(exact, "timer", lambda: now[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(exact, "MOST_SCORES", 4 * 6 * 50 * 50 - 1)
    monkeypatch.setattr(exact, "MOST_QUERIES", 40)
    call = read_call(*torch.randn(3, 4, 6, 50, 8))
    assert exact.ratio_of_times(call) == pytest.approx(2.0 if slower == "ours" else 0.5)
    assert set(seen) == {(1, 2, 40, 8)}
    assert now[0] < 1.5


def test_causal_attention_without_a_mask_is_refused_as_by_pytorch(timed, answered) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    dgt.accelerate(model, error=0)
    x = torch.randn(1, 50, 8)
    with pytest.raises(RuntimeError, match="is_causal"), torch.no_grad():
        model(x, x, x, need_weights=False, is_causal=True)
    assert not answered
