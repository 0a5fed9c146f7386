"""Settings of a whole model, and records of its groups and selected keys."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dgt
from dgt.layers import attention


def attention_layers(model) -> dict[str, dgt.DGAttention]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, dgt.DGAttention)
    }


def test_settings_reach_every_layer(small) -> None:
    model = small()
    settings = {
        "top_k": 3,
        "backend": "reference",
        "tau": 0.5,
        "tau_weighs": "old",
        "residual_keys": 2,
    }
    assert dgt.set_attention(model, **settings) == 5
    for layer in attention_layers(model).values():
        assert {name: getattr(layer, name) for name in settings} == settings
    assert {
        r.attention.key_ids.shape[-1] for r in dgt.group_records(model, torch.randn(1, 3, 64, 64))
    } == {3}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"top_k": 1.5}, TypeError, r"top_k must be an int of at least 1, got 1\.5 of type float"),
        ({"backend": "fast"}, ValueError, "backend must be one of auto, .*got 'fast'"),
        ({"tau": -1}, ValueError, "tau, where it is not None, must be between 0 and 1, got -1"),
        ({"num_groups": 4}, TypeError, "settings must be among top_k, .* got 'num_groups'"),
    ],
)
def test_bad_settings_set_nothing(settings, error, message, small) -> None:
    model = small()
    with pytest.raises(error, match=message):
        dgt.set_attention(model, **{"top_k": 3, "backend": "reference", **settings})
    assert {(layer.top_k, layer.backend) for layer in attention_layers(model).values()} == {
        (7, "auto")
    }


def test_a_model_without_our_attention() -> None:
    without = "model must contain DGAttention layers, got a Linear without any"
    with pytest.raises(ValueError, match=without):
        dgt.set_attention(nn.Linear(2, 2), top_k=3)
    with pytest.raises(ValueError, match=without):
        dgt.group_records(nn.Linear(2, 2), torch.randn(1, 3, 64, 64))
    with pytest.raises(TypeError, match="model must be a module, got str"):
        dgt.group_records("dgt_nano", torch.randn(1, 3, 64, 64))


def test_tokens_without_a_grid_have_no_record() -> None:
    layer = nn.Sequential(dgt.DGAttention(dim=8, num_heads=2, num_groups=3, top_k=2))
    with pytest.raises(ValueError, match=r"tokens of layer '0' must form a grid, got \(1, 6, 8\)"):
        dgt.group_records(layer, torch.randn(1, 6, 8))


@torch.no_grad()  # like a capture: kernels without gradients round differently
def test_a_capture_also_returns_what_the_model_does(small) -> None:
    model, images = small(), torch.randn(2, 3, 64, 75)
    seen, output = dgt.models.capture(model, images, lambda layer: (layer.name, layer.x.shape[-1]))
    assert seen == [
        (name, layer.qkv.in_features) for name, layer in attention_layers(model).items()
    ]
    assert torch.equal(output, model(images))


@torch.no_grad()
@pytest.mark.parametrize("post_norm", [False, True])
def test_records_are_what_forward_uses(post_norm, small, monkeypatch) -> None:
    model, images = small(post_norm=post_norm), torch.randn(2, 3, 64, 75)
    used = []
    original = attention.attend_in_groups

    def recording(*args, **options):
        public = {name: value for name, value in options.items() if name != "return_ids"}
        found = dgt.dynamic_group_attention(*args, **public)
        assert torch.equal(original(*args, **options).output, found.output)
        used.append(found)
        return found

    monkeypatch.setattr(attention, "attend_in_groups", recording)
    model(images)
    monkeypatch.undo()
    records = dgt.group_records(model, images)
    assert [record.name for record in records] == list(attention_layers(model))
    assert [record.grid for record in records] == [(16, 19)] + 2 * [(8, 10)] + 2 * [(4, 5)]
    for record, seen in zip(records, used, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(record.attention, seen, strict=True))


def test_recording_leaves_mode_and_state(small) -> None:
    model = small().train()
    before = copy.deepcopy(model.state_dict())
    dgt.group_records(model, torch.randn(2, 3, 64, 64))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(layer.seeded for layer in attention_layers(model).values())
    model.eval()
    dgt.group_records(model, torch.randn(2, 3, 64, 64))
    assert not any(module.training for module in model.modules())
