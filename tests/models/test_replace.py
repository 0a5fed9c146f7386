"""DG-Attention in timm's models: what stays, what changes, prefix tokens, training, and what is rejected."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.acceleration.intercept import installed_processors
from dgt.models.replace import SwinDGBlock, TimmDGAttention
from dgt.ops import reference, torch_backend

from .test_hybrids import from_timm

PLAIN = {"num_classes": 5, "embed_dim": 32, "depth": 3, "num_heads": 2}
SWIN = {"num_classes": 5, "img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2, 1, 1)}
SWIN |= {"num_heads": (1, 2, 2, 4)}
TWINS = {"num_classes": 5, "img_size": 64, "embed_dims": (16, 32, 32, 32), "depths": (2, 2, 2, 2)}
TWINS |= {"num_heads": (1, 2, 2, 2)}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {**PLAIN, "img_size": 64}),
    "registers": ("vit_base_patch16_224", {**PLAIN, "img_size": 64, "reg_tokens": 4}),
    "averaged": (
        "vit_base_patch16_224",
        {**PLAIN, "img_size": 64, "class_token": False, "global_pool": "avg"},
    ),
    "norms": (
        "vit_base_patch16_224",
        {**PLAIN, "img_size": 64, "qk_norm": True, "scale_attn_norm": True},
    ),
    "deit": ("deit_tiny_distilled_patch16_224", {**PLAIN, "img_size": 64}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "twins": ("twins_svt_small", TWINS),
}
PREFIX = {"vit": 1, "registers": 5, "averaged": 0, "norms": 1, "deit": 2}


def make(kind: str) -> nn.Module:
    """A small timm model with weights as after training, in evaluation mode."""
    torch.manual_seed(11)
    name, options = MODELS[kind]
    model = timm.create_model(name, **options).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.4, 0.2)
    return model


@pytest.mark.parametrize("kind", PREFIX)
def test_with_all_keys_a_vit_gives_what_it_gave(kind) -> None:
    model, images = make(kind), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(images)
        names = dgt.replace_attention(model, num_groups=3, top_k=16)  # 4 x 4 patches
        torch.testing.assert_close(model(images), before, rtol=1e-5, atol=1e-5)
        assert names == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
        dgt.set_attention(model, top_k=2)
        assert not torch.allclose(model(images), before, atol=1e-3)
    assert {
        layer.num_prefix_tokens for layer in model.modules() if isinstance(layer, TimmDGAttention)
    } == {PREFIX[kind]}


@pytest.mark.parametrize("kind", MODELS)
def test_every_weight_stays_the_parameter_it_was(kind) -> None:
    model = make(kind)
    before = dict(model.named_parameters())
    dgt.replace_attention(model, num_groups=3, top_k=5)
    after = dict(model.named_parameters())
    assert {name for name in before if name not in after} == {
        n for n in before if "relative_position_bias_table" in n
    }
    assert all(after[name] is before[name] for name in after if name in before)
    assert all(".cpe." in name for name in after if name not in before)


def test_a_token_of_the_prefix_sees_all_and_is_seen_by_all() -> None:
    """A change of the class token reaches every patch, and a change of any patch the class token, for any k."""
    torch.manual_seed(0)
    old = timm.models.vision_transformer.Attention(16, 2, qkv_bias=True)
    layer, x = (
        TimmDGAttention(old, 2, num_groups=3, top_k=1).eval(),
        torch.randn(1, 12, 16, requires_grad=True),
    )
    reach = torch.autograd.functional.jacobian(layer, x)[0].abs().sum((1, 2, 4))  # (to, from)
    assert reach[:2].all()  # what reaches the prefix
    assert reach[:, :2].all()  # what the prefix reaches
    # Patches see the prefix, themselves as queries, and the one key of their group.
    assert not reach.all()


def test_swin_s_blocks_are_those_of_our_hybrid() -> None:
    """timm's Swin with DG-Attention equals `swin_tiny_dga`, weight by weight."""
    model = make("swin")
    names = dgt.replace_attention(model, num_groups=3, top_k=5)
    assert names == [
        "layers.0.blocks.0",
        "layers.1.blocks.0",
        "layers.1.blocks.1",
        "layers.2.blocks.0",
        "layers.3.blocks.0",
    ]
    row = {
        "dims": (16, 32, 64, 128),
        "depths": (1, 2, 1, 1),
        "num_heads": (1, 2, 2, 4),
        "num_classes": 5,
    }
    ours = timm.create_model("swin_tiny_dga", num_groups=3, top_k=5, **row).eval()
    ours.load_state_dict(from_timm(model.state_dict()))
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        # LayerNorms with another epsilon.
        torch.testing.assert_close(model(images), ours(images), rtol=1e-4, atol=1e-4)


def test_a_new_position_encoding_starts_at_zero_or_is_left_out() -> None:
    model, images = make("swin"), torch.randn(1, 3, 64, 64)
    without = make("swin")
    dgt.replace_attention(model, num_groups=3, top_k=5)
    dgt.replace_attention(without, num_groups=3, top_k=5, cpe=False)
    with torch.no_grad():
        assert torch.equal(model(images), without(images))
    assert [m.cpe is None for m in without.modules() if isinstance(m, SwinDGBlock)] == [True] * 5


def test_swin_may_still_be_given_another_size() -> None:
    model = make("swin")
    dgt.replace_attention(model, num_groups=3, top_k=5)
    model.set_input_size(img_size=(96, 64))
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5)


def test_only_the_windows_of_twins_go() -> None:
    model = make("twins")
    assert dgt.replace_attention(model, num_groups=3, top_k=5) == [
        f"blocks.{i}.0.attn" for i in range(4)
    ]
    assert type(model.blocks[0][1].attn).__name__ == "GlobalSubSampleAttn"
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize("kind", ["vit", "swin", "twins"])
def test_training_moves_centroids_and_a_checkpoint_brings_them_back(kind) -> None:
    model = make(kind).train()
    # Created first: the weights are the same objects.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dgt.replace_attention(model, num_groups=3, top_k=5, tau=0.1)
    layers = [layer for layer in model.modules() if isinstance(layer, TimmDGAttention)]
    start = [layer.centroids.clone() for layer in layers]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
        optimizer.step()
    assert all(layer.seeded and layer.training for layer in layers)
    assert all(
        not torch.equal(layer.centroids, old) for layer, old in zip(layers, start, strict=True)
    )
    assert all(p.grad is not None for name, p in model.named_parameters() if ".cpe." not in name)
    copy = make(kind)
    dgt.replace_attention(copy, num_groups=3, top_k=5)
    copy.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(copy.eval()(images), model.eval()(images))


def test_inspecting_counts_patches_and_prefix() -> None:
    model = make("vit")
    dgt.replace_attention(model, num_groups=3, top_k=5)
    seen = model.blocks[0].attn.inspect(torch.randn(2, 17, 32))
    assert (seen.group_ids[:, :, 0] == -1).all()
    assert (seen.group_ids[:, :, 1:] >= 0).all()
    assert seen.key_ids.shape == (2, 2, 3, 6)
    assert (seen.key_ids[..., 0] == 0).all()


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_selection_is_worth_can_be_measured_and_recorded(kind) -> None:
    model = make(kind)
    names = dgt.replace_attention(model, num_groups=3, top_k=5)
    found = dgt.diagnose(model, torch.randn(1, 3, 64, 64))
    assert [layer.name.removesuffix(".attn") for layer in found] == [
        name.removesuffix(".attn") for name in names
    ]
    assert all(0 < layer.selected <= layer.best_for_query + 1e-6 <= 1 + 2e-6 for layer in found)
    assert [layer.random for layer in found] == pytest.approx(
        [min(1, 5 / layer.tokens) for layer in found]
    )
    for record, layer in zip(
        dgt.group_records(model, torch.randn(1, 3, 64, 64)), found, strict=True
    ):
        assert (record.name, record.grid[0] * record.grid[1]) == (layer.name, layer.tokens)
        assert record.attention.group_ids.shape[2] == layer.tokens  # patches only
        assert record.attention.group_ids.min() >= 0
        assert 0 <= record.attention.key_ids.min() <= record.attention.key_ids.max() < layer.tokens
        assert record.residual_share is None
        assert layer.residual is None
    dgt.set_attention(model, residual_keys=1)
    images = torch.randn(1, 3, 64, 64)
    for record, layer in zip(
        dgt.group_records(model, images), dgt.diagnose(model, images), strict=True
    ):
        share = record.residual_share
        assert layer.residual == pytest.approx(float(share.mean()))
        assert share.shape == record.attention.group_ids.shape
        assert 0 <= share.min() <= share.max() < 1
        assert (share.max() > 0) == (share.shape[2] > 5)


def test_compiles_without_a_break() -> None:
    model, images = make("vit"), torch.randn(1, 3, 64, 64)
    dgt.replace_attention(model, num_groups=3, top_k=5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-6)


def test_under_autocast_norms_of_queries_and_keys_keep_their_type() -> None:
    model, images = make("norms"), torch.randn(1, 3, 64, 64)
    dgt.replace_attention(model, num_groups=3, top_k=5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(images).isfinite().all()


def test_no_tokens_after_the_prefix_are_refused() -> None:
    model = make("registers")
    dgt.replace_attention(model, num_groups=3, top_k=5)
    with pytest.raises(ValueError, match="more tokens than the prefix of 5, got 5"):
        model.blocks[0].attn(torch.randn(1, 5, 32))


def test_a_mask_of_pairs_is_refused() -> None:
    model = make("vit")
    dgt.replace_attention(model, num_groups=3, top_k=5)
    with pytest.raises(ValueError, match="attn_mask must be None and is_causal False"):
        model.blocks[0].attn(torch.randn(1, 17, 32), is_causal=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for images in (torch.zeros(0, 3, 64, 64), torch.full((1, 3, 64, 64), torch.nan)):
        with pytest.raises(ValueError, match=r"some queries at 'blocks\.0\.attn', all finite"):
            dgt.calibrate(model, images)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="mask must be None"):
        model.blocks[0].attn.inspect(torch.randn(1, 17, 32), torch.ones(1, 17, dtype=torch.bool))


class Mixed(nn.Module):
    """One attention that can be replaced, then one that cannot."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first = timm.models.vision_transformer.Attention(16, 2)
        self.second = second


def with_a_hook() -> nn.Module:
    """An attention that is looked at, which would be lost with it."""
    attention = timm.models.vision_transformer.Attention(16, 2)
    attention.register_forward_hook(lambda *_: None)
    return attention


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            nn.MultiheadAttention(16, 2),
            r"only attention that can be replaced .*MultiheadAttention at 'second'",
        ),
        (
            timm.models.beit.Attention(16, 2),
            r"timm's vision_transformer.Attention.*beit\.Attention at 'second'",
        ),
        (
            timm.models.vision_transformer.Attention(16, 2, attn_drop=0.1),
            r"must have no dropout .* got 0.1 at 'second'",
        ),
        (
            timm.models.vision_transformer.Attention(16, 2, attn_head_dim=4),
            r"must be as wide as its input, got .* at 'second'",
        ),
        (with_a_hook(), r"must have no hooks and no forward of its own, got one at 'second'"),
    ],
)
def test_what_cannot_be_replaced_is_named_and_nothing_is_replaced(second, message) -> None:
    model = Mixed(second)
    with pytest.raises(ValueError, match=message):
        dgt.replace_attention(model)
    assert type(model.first) is timm.models.vision_transformer.Attention


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"num_groups": 2.5}, TypeError, "num_groups must be an int"),
        ({"cosine": True}, TypeError, "settings must be among num_groups, .* got 'cosine'"),
        ({"num_prefix_tokens": -1}, ValueError, "num_prefix_tokens must be at least 0, got -1"),
    ],
)
def test_bad_settings_change_nothing(settings, error, message) -> None:
    model = Mixed(timm.models.vision_transformer.Attention(16, 2))
    with pytest.raises(error, match=message):
        dgt.replace_attention(model, **settings)
    assert type(model.first) is type(model.second) is timm.models.vision_transformer.Attention


@pytest.mark.parametrize(
    ("model", "error", "expected"),
    [
        ("vit_tiny_patch16_224", TypeError, "be a module, got str"),
        (nn.Linear(3, 3), ValueError, "contain attention to replace .* got a Linear without any"),
        (timm.models.vision_transformer.Attention(16, 2), ValueError, "got a bare Attention"),
    ],
)
def test_what_is_no_model_with_attention(model, error, expected) -> None:
    with pytest.raises(error, match=f"model must .*{expected}"):
        dgt.replace_attention(model)


def test_windows_have_no_prefix() -> None:
    model = make("swin")
    with pytest.raises(ValueError, match=r"num_prefix_tokens must be 0 or None at 'layers\.0\."):
        dgt.replace_attention(model, num_prefix_tokens=1)
    assert not any(isinstance(module, dgt.DGAttention) for module in model.modules())


def test_accelerated_attention_is_replaced() -> None:
    """And with it what accelerated it."""
    model, images = make("vit"), torch.randn(2, 3, 64, 64)
    before = model(images)
    dgt.accelerate(model, error=0)
    dgt.replace_attention(model, num_groups=3, top_k=16)  # all patches
    assert not installed_processors(model)
    torch.testing.assert_close(model(images), before, rtol=1e-5, atol=1e-5)


def test_a_module_used_twice_is_replaced_by_one() -> None:
    model = Mixed(nn.Identity())
    model.second = model.first
    assert dgt.replace_attention(model) == ["first", "second"]
    assert model.first is model.second


@pytest.mark.parametrize("kind", ["vit", "averaged"])
def test_every_step_goes_through_the_chosen_backend(kind, monkeypatch) -> None:
    """Also for grouping and selection, with and without prefix tokens: nothing silently uses another backend."""
    model, images, taken = make(kind), torch.randn(2, 3, 64, 64), []
    steps = ("group_queries", "select_keys", "attend")
    for name in steps:
        step = getattr(reference, name)

        def recording(*arguments, name=name, step=step):
            taken.append(name)
            return step(*arguments)

        def refuse(*_):
            raise AssertionError("a step was taken on another backend")

        monkeypatch.setattr(reference, name, recording)
        monkeypatch.setattr(torch_backend, name, refuse)
    with torch.no_grad():
        dgt.replace_attention(model, num_groups=3, top_k=4, backend="torch")
        with pytest.raises(AssertionError, match="another backend"):
            model(images)
        assert taken == []
        dgt.set_attention(model, backend="reference")
        model(images)
    assert taken == list(steps) * 3


@pytest.mark.parametrize("kind", ["registers", "norms", "swin"])
def test_a_residual_key_keeps_what_was_learnt(kind) -> None:
    """With centroids from images, few keys plus a residual key are close to global attention; few keys are not."""
    images, outputs = torch.randn(8, 3, 64, 64), []
    with torch.no_grad():
        for keys, residual_keys in ((256, 0), (2, 0), (2, 1)):
            model = make(kind)
            dgt.replace_attention(model, num_groups=8, top_k=keys, residual_keys=residual_keys)
            dgt.calibrate(model, images[:4])
            outputs.append(model.forward_features(images[4:]))
    whole, few, with_residual_key = outputs
    assert (with_residual_key - whole).norm() < (few - whole).norm() / 2


@pytest.mark.parametrize("name", ["dgt_nano", "vit", "twins"])
def test_images_seed_centroids_as_a_training_would(name) -> None:
    images = torch.randn(4, 3, 64, 64)
    model = timm.create_model(name, num_classes=5) if name == "dgt_nano" else make(name)
    if name != "dgt_nano":
        dgt.replace_attention(model, num_groups=3, top_k=4)
    twin = copy.deepcopy(model.eval())
    layers = dgt.calibrate(model, images)
    assert layers == [
        name for name, module in model.named_modules() if isinstance(module, dgt.DGAttention)
    ]
    assert not any(module.training for module in model.modules())
    dgt_layers = [model.get_submodule(name) for name in layers]
    assert all(layer.seeded for layer in dgt_layers)
    first = twin.get_submodule(layers[0])
    first.train()
    with torch.no_grad():
        twin(images)  # the first layer sees the same input and initializes itself
    assert torch.equal(first.centroids, dgt_layers[0].centroids)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dgt.calibrate(model, images)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_calibrated_stays_as_it_was() -> None:
    model = make("vit")
    with pytest.raises(
        ValueError,
        match="model must contain DGAttention layers, got a VisionTransformer without any",
    ):
        dgt.calibrate(model, torch.randn(1, 3, 64, 64))
    dgt.replace_attention(model, num_groups=3, top_k=4)
    with pytest.raises(TypeError, match="images must be a tensor, got list"):
        dgt.calibrate(model, [1])
    with pytest.raises(AssertionError):
        dgt.calibrate(model.train(), torch.randn(1, 3, 32, 32))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
