"""`dgt.accelerate` on small diffusion transformers of diffusers with random weights."""

from __future__ import annotations

import diffusers
import pytest
import torch

import dgt
from dgt.acceleration import inspect_model

CROSS = "few tokens"  # of text, to which the image attends


def wan():
    sizes = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "text_dim": 32,
    }
    more = {
        "in_channels": 4,
        "out_channels": 4,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    inputs = {"hidden_states": torch.randn(2, 4, 2, 24, 24), "timestep": torch.tensor([3, 3])}
    return diffusers.WanTransformer3DModel(**sizes, **more), {
        **inputs,
        "encoder_hidden_states": torch.randn(2, 12, 32),
    }


def flux():
    sizes = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
    }
    more = {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = diffusers.FluxTransformer2DModel(**sizes, **more, axes_dims_rope=[4, 4, 8])
    inputs = {
        "hidden_states": torch.randn(2, 256, 4),
        "encoder_hidden_states": torch.randn(2, 12, 32),
    }
    ids = {
        "img_ids": torch.rand(256, 3),
        "txt_ids": torch.zeros(12, 3),
        "timestep": torch.tensor([0.5, 0.5]),
    }
    return model, {**inputs, **ids, "pooled_projections": torch.randn(2, 32)}


def ltx():
    sizes = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
    }
    model = diffusers.LTXVideoTransformer3DModel(
        **sizes, cross_attention_dim=32, caption_channels=16
    )
    inputs = {
        "hidden_states": torch.randn(2, 256, 8),
        "encoder_hidden_states": torch.randn(2, 12, 16),
    }
    more = {"timestep": torch.tensor([3, 3]), "encoder_attention_mask": torch.ones(2, 12)}
    return model, {**inputs, **more, "num_frames": 4, "height": 8, "width": 8}


MODELS = {  # the reasons of its attentions, in the order of their calls
    "wan": (wan, ["", CROSS, "", CROSS]),
    "flux": (flux, ["", ""]),
    "ltx": (ltx, ["", "a pairwise mask or bias", "", "a pairwise mask or bias"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_diffusion_transformers(name) -> None:
    build, reasons = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build()
    rows = inspect_model(  # a sequence, as Flux has positions that are the same for all images
        model, [inputs], num_prefix_tokens=12 if name == "flux" else 0, least_tokens=100
    )
    assert [row.reason for row in rows] == reasons


@pytest.mark.usefixtures("slow_attention")
def test_a_diffusion_transformer_accelerated(monkeypatch) -> None:
    torch.manual_seed(0)
    model, inputs = flux()
    with torch.no_grad():
        before = model(**inputs)[0]
        report = dgt.accelerate(model, [inputs] * 2, 0.5, num_prefix_tokens=12)
        assert [row.setting.choice for row in report.layers] == ["groups"] * 2
        assert not torch.equal(model(**inputs)[0], before)
        with dgt.exact_attention(model):
            assert torch.equal(model(**inputs)[0], before)
