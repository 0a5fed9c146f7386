"""The lines of docs/accelerate_models.md, each on a small model of its class with random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import dgt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accelerate_models.md"
COUNT = 3
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64, **LAYERS}
SIZES = {"image_size": 96, "patch_size": 8}  # 144 patches
TEXT = {**SMALL, "vocab_size": 100, "max_position_embeddings": 16, "eos_token_id": 1}

Made = tuple[nn.Module, dict[str, Any]]
"""A model, and what the lines of the page call by name."""


def images(side: int) -> Tensor:
    return torch.randn(COUNT, 3, side, side)


def dinov3() -> Made:
    model = hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, **SIZES, num_register_tokens=4))
    return model, {"inputs": {"pixel_values": images(96)}, "labels": torch.tensor([0, 1, 0])}


def depth_anything() -> Made:
    backbone = hf.Dinov2Config(**SMALL, **SIZES, out_indices=[1, 2], reshape_hidden_states=False)
    neck = {
        "reassemble_hidden_size": 32,
        "neck_hidden_sizes": [16, 16],
        "reassemble_factors": [2, 1],
        "fusion_hidden_size": 16,
        "head_hidden_size": 8,
    }
    config = hf.DepthAnythingConfig(backbone_config=backbone, patch_size=8, **neck)
    depths = torch.rand(COUNT, 96, 96) + 0.5
    return hf.DepthAnythingForDepthEstimation(config), {
        "inputs": {"pixel_values": images(96)},
        "depths": depths,
    }


def sam2() -> Made:
    backbone = hf.Sam2HieraDetConfig(
        hidden_size=16,
        image_size=[256, 256],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 8, 4],
        global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
    )
    vision = hf.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[128, 64, 32, 16],
        backbone_feature_sizes=[[64, 64], [32, 32], [16, 16]],
        fpn_hidden_size=32,
    )
    decoder = {"hidden_size": 32, "num_attention_heads": 2, "mlp_dim": 32}
    config = hf.Sam2Config(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 32, "image_size": 256, "patch_size": 16},
        mask_decoder_config={**decoder, "iou_head_hidden_dim": 32},
    )
    inputs = {
        "pixel_values": images(256),
        "input_points": 256 * torch.rand(COUNT, 1, 1, 2),
        "input_labels": torch.ones(COUNT, 1, 1, dtype=torch.long),
    }
    return hf.Sam2Model(config), {"inputs": inputs, "masks": torch.rand(COUNT, 64, 64) < 0.5}


def sam3() -> Made:
    backbone = hf.Sam3ViTConfig(
        **SMALL,
        image_size=224,
        patch_size=14,
        window_size=4,
        global_attn_indexes=[1],
        pretrain_image_size=112,
    )
    vision = hf.Sam3VisionConfig(
        backbone_config=backbone,
        fpn_hidden_size=32,
        backbone_feature_sizes=[[64, 64], [32, 32], [16, 16]],
    )
    part = {"hidden_size": 32, "num_attention_heads": 2}
    layers = {**part, "num_layers": 1, "intermediate_size": 64}
    config = hf.Sam3Config(
        vision_config=vision,
        text_config={**TEXT, "projection_dim": 32, "bos_token_id": 0},
        geometry_encoder_config=layers,
        detr_encoder_config=layers,
        detr_decoder_config={**layers, "num_queries": 5},
        mask_decoder_config=part,
    )
    inputs = {
        "pixel_values": images(224),
        "input_ids": torch.randint(2, 100, (COUNT, 8)),
        "attention_mask": torch.ones(COUNT, 8, dtype=torch.long),
    }
    return hf.Sam3Model(config), {"inputs": inputs, "masks": torch.rand(COUNT, 64, 64) < 0.5}


def eomt() -> Made:
    config = hf.EomtConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        **SIZES,
        num_blocks=1,
        num_queries=6,
        num_upscale_blocks=1,
        num_labels=3,
    )
    maps = torch.randint(0, 3, (COUNT, 24, 24))
    maps[:, :2] = 255
    return hf.EomtForUniversalSegmentation(config), {
        "inputs": {"pixel_values": images(96)},
        "maps": maps,
    }


def siglip2() -> Made:
    vision = {**SMALL, "patch_size": 8, "num_patches": 144}
    config = hf.Siglip2Config(text_config={**TEXT, "projection_size": 32}, vision_config=vision)
    inputs = {
        "pixel_values": torch.randn(COUNT, 144, 192),
        "pixel_attention_mask": torch.ones(COUNT, 144, dtype=torch.long),
        "spatial_shapes": torch.tensor([[12, 12]] * COUNT),
    }
    texts = F.normalize(torch.randn(3, 32), dim=-1)
    return hf.Siglip2Model(config), {
        "inputs": inputs,
        "texts": texts,
        "labels": torch.tensor([0, 1, 2]),
    }


def qwen3_vl() -> Made:
    image_token, first, last = 190, 192, 193
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 200}
    vision = {
        "depth": 2,
        "num_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "patch_size": 8,
        "out_hidden_size": 32,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    config = hf.Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=image_token,
        video_token_id=191,
        vision_start_token_id=first,
        vision_end_token_id=last,
    )
    conversations, answers = [], []
    for height, width in ((16, 16), (12, 16), (14, 16)):
        patches = height * width
        ids = torch.tensor([[1, first, *[image_token] * (patches // 4), last, 3, 4, 5]])
        conversations.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": (ids == image_token).int(),
                "pixel_values": torch.randn(patches, 3 * 2 * 64),
                "image_grid_thw": torch.tensor([[1, height, width]]),
            }
        )
        answer = torch.full_like(ids, -100)
        answer[:, -2:] = ids[:, -2:]
        answers.append(answer)
    return hf.Qwen3VLForConditionalGeneration(config), {
        "conversations": conversations,
        "answers": answers,
    }


class MultiView(nn.Module):
    """Five tokens before each frame's patches; layers that attend within frames and across all, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.before = nn.Parameter(torch.randn(5, 32))
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(32, 9)

    def forward(self, frames: Tensor) -> dict[str, Tensor]:  # (1, T, 3, H, W)
        patches = self.patches(frames[0]).flatten(2).transpose(1, 2)
        x = torch.cat([self.before.expand(len(patches), -1, -1), patches], dim=1)
        for number, layer in enumerate(self.layers):
            across = x.reshape(1, -1, 32) if number % 2 else x
            x = (across + layer(across)).reshape(x.shape)
        return {"rotation": torch.linalg.qr(self.head(x[:, 0]).unflatten(-1, (3, 3)))[0]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def multi_view() -> Made:
    rotations = torch.linalg.qr(torch.randn(COUNT, 3, 3, 3))[0]
    scenes = [torch.randn(1, 3, 3, 96, 96) for _ in range(COUNT)]
    return MultiView(), {"scenes": scenes, "patches": 144, "rotations": rotations}


MODELS: dict[str, Callable[[], Made]] = {  # the class in the lines, if one opens the model
    "DINOv2, DINOv3": dinov3,
    "Depth Anything": depth_anything,
    "Sam2Model": sam2,
    "Sam3Model": sam3,
    "EoMT": eomt,
    "SigLIP 2": siglip2,
    "Qwen3-VL": qwen3_vl,
    "VGGT and other multi-view models": multi_view,
}


def lines_about(what: str) -> tuple[str, str]:
    """The two lines about a model, and the metric of its section."""
    sections = re.split(r"^###? ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next(text for text in sections if text.startswith(what) or what in text)
    *blocks, metric = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if what in block or len(blocks) == 1), metric


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("what", MODELS)
def test_the_two_lines_about_a_model(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eomt_module = hf.models.eomt.modeling_eomt
    monkeypatch.setattr(eomt_module, "requires_backends", lambda *_: None)  # SciPy, for training
    torch.manual_seed(0)
    model, names = MODELS[what]()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and any(word in name for word in ("q_proj", "k_proj", "qkv")):
            nn.init.normal_(parameter, 0, 0.3)  # attention that is not uniform
    lines, metric = lines_about(what)
    names |= {"model": model.eval(), "dgt": dgt, "torch": torch, "F": F}
    for kind in re.findall(r"(\w+)\.from_pretrained", lines):
        assert hasattr(hf, kind)
        opened = type(kind, (), {"from_pretrained": staticmethod(lambda _: model)})
        names[kind] = opened
    exec(metric, names)
    exec(lines.replace("0.05", "0.99"), names)
    report = names["report"]
    assert any(layer.setting.choice == "groups" for layer in report.layers)
    assert 0 < report.measured_error < 0.99
    assert all(math.isfinite(figure) for figure in (report.metric_before, report.metric_after))
