"""The inference form of a model: the same outputs on every path, the model itself untouched."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.inference import optimize_for_inference


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A small model whose normalization layers have seen data."""
    torch.manual_seed(0)
    model = timm.create_model("dgt_nano", num_classes=7, depths=(1, 1, 2, 1)).train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 64, 64))
    return model.eval()


@pytest.mark.parametrize("size", [(64, 64), (33, 47), (32, 160), (96, 128)])
@torch.no_grad()
def test_outputs_are_equal(trained, size) -> None:
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(
        optimize_for_inference(trained)(images), trained(images), rtol=0, atol=1e-4
    )


@torch.no_grad()
def test_feature_maps_and_masks_are_equal(trained) -> None:
    fast = optimize_for_inference(trained)
    images, mask = torch.randn(2, 3, 64, 96), torch.zeros(2, 64, 96, dtype=torch.bool)
    mask[0], mask[1, :40, :70] = True, True
    plain_maps = trained.forward_intermediates(images, intermediates_only=True, mask=mask)
    fast_maps = fast.forward_intermediates(images, intermediates_only=True, mask=mask)
    for plain, same in zip(plain_maps, fast_maps, strict=True):
        torch.testing.assert_close(same, plain, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_getter_of_features_is_folded_inside() -> None:
    backbone = timm.create_model("dgt_nano", features_only=True, depths=(1, 1, 1, 1)).eval()
    images = torch.randn(1, 3, 64, 64)
    for plain, same in zip(backbone(images), optimize_for_inference(backbone)(images), strict=True):
        torch.testing.assert_close(same, plain, rtol=0, atol=1e-4)


@torch.no_grad()
def test_post_norm_and_cosine_attention() -> None:
    model = timm.create_model("dgt_nano", post_norm=True, depths=(1, 1, 1, 1)).eval()
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(
        optimize_for_inference(model)(images), model(images), rtol=0, atol=1e-4
    )


def test_the_model_itself_stays_as_it_is(trained) -> None:
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    state = torch.random.get_rng_state()
    trained.train()
    fast = optimize_for_inference(trained)
    assert trained.training
    assert not fast.training
    assert torch.equal(torch.random.get_rng_state(), state)
    after = trained.eval().state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.requires_grad for parameter in trained.parameters())
    assert not any(parameter.requires_grad for parameter in fast.parameters())


@torch.no_grad()
def test_settings_and_records_of_the_attention_work_on_it(trained) -> None:
    fast = optimize_for_inference(trained)
    images = torch.randn(1, 3, 64, 64)
    for plain, same in zip(
        dgt.group_records(trained, images), dgt.group_records(fast, images), strict=True
    ):
        assert plain.name == same.name
        assert (plain.attention.group_ids == same.attention.group_ids).float().mean() > 0.999
    outputs = {}
    for backend in ("auto", "reference"):
        dgt.set_attention(fast, top_k=9, backend=backend)
        outputs[backend] = fast(images)
    torch.testing.assert_close(outputs["auto"], outputs["reference"], rtol=0, atol=1e-4)
    assert not torch.allclose(outputs["auto"], trained(images), atol=1e-3)


@torch.no_grad()
def test_bfloat16_stays_near(trained) -> None:
    images = torch.randn(2, 3, 64, 64)
    expected = trained(images)
    error = {}
    for name, model in (("plain", trained), ("fast", optimize_for_inference(trained))):
        with torch.autocast("cpu", torch.bfloat16):
            error[name] = (model(images).float() - expected).norm() / expected.norm()
    assert error["fast"] < 1.5 * error["plain"]


@torch.no_grad()
def test_a_block_compiles_without_a_break(trained) -> None:
    block = optimize_for_inference(trained).stages[1].blocks[0]
    x = torch.randn(1, 8, 8, 64)
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=1e-5)


@torch.no_grad()
def test_its_state_dict_holds_all_of_it(trained) -> None:
    images = torch.randn(1, 3, 33, 47)
    other = timm.create_model("dgt_nano", num_classes=7, depths=(1, 1, 2, 1)).eval()
    fast, other_fast = optimize_for_inference(trained), optimize_for_inference(other)
    other_fast.load_state_dict(fast.state_dict())
    torch.testing.assert_close(other_fast(images), fast(images))


@pytest.mark.parametrize("post_norm", [False, True])
def test_gradients_of_the_input_are_equal(post_norm) -> None:
    model = timm.create_model(
        "dgt_nano", depths=(1, 1, 1, 1), num_classes=3, post_norm=post_norm
    ).eval()
    images = torch.randn(1, 3, 64, 48, requires_grad=True)
    expected, actual = (
        torch.autograd.grad(form(images)[:, 0].sum(), images)[0]
        for form in (model, optimize_for_inference(model))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["dgt_nano", "dgt_nano_swin_block"])
@torch.no_grad()
def test_the_form_of_a_form_is_equal(name) -> None:
    fast = optimize_for_inference(timm.create_model(name, depths=(1, 1, 1, 1)))
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(optimize_for_inference(fast)(images), fast(images))


def test_it_cannot_be_trained(trained) -> None:
    fast = optimize_for_inference(trained)
    assert fast.eval() is fast
    with pytest.raises(RuntimeError, match="cannot be trained"):
        fast.train()


def test_what_has_no_such_form() -> None:
    with pytest.raises(TypeError, match="model must be a module, got str"):
        optimize_for_inference("dgt_tiny")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must contain DGT modules, got a Linear without any"):
        optimize_for_inference(nn.Linear(3, 3))
