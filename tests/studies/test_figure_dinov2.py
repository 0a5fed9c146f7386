"""Pictures of DINOv2: what a plan changes is shown and told, and invalid options are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from dgt.acceleration import Report
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement
from studies import figure_dinov2
from studies.figure_dinov2 import tokens_of

LAYERS = 12
TOKENS = 141  # of 10 x 14 patches and a class token


def make_model() -> nn.Module:
    """A small ViT with patches of 14 x 14 pixels, whose attention is not uniform."""
    torch.manual_seed(0)
    sizes = {"patch_size": 14, "depth": LAYERS, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, **sizes
    ).eval()
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
    return model


def save_plan(path: Path, keys: int) -> str:
    """A plan of groups in all layers, with so many selected keys."""
    sizes = {"heads": 2, "tokens": TOKENS, "key_tokens": TOKENS, "channels": 16, "prefix_tokens": 1}
    grouped = Measurement(Setting("groups", groups=20, keys=keys, residual_keys=4))
    names = [f"blocks.{layer}.attn" for layer in range(LAYERS)]
    Report(0.1, [AttentionSite(name, measurement=grouped, **sizes) for name in names]).save(path)
    return str(path)


def images() -> Tensor:
    return torch.randn(1, 3, 140, 196, generator=torch.Generator().manual_seed(0))


def test_tokens_move_the_less_the_more_keys_a_plan_has(tmp_path: Path) -> None:
    few, many, all_keys = (
        tokens_of(make_model(), images(), save_plan(tmp_path / "plan.json", keys))
        for keys in (8, 100, TOKENS)
    )
    assert all_keys.error < 1e-4
    assert all_keys.error < many.error < few.error < 1
    assert few.cosines.shape == (TOKENS - 1,)


def test_the_command_writes_pictures_and_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figure_dinov2, "load_dinov2", lambda _: make_model())
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    words = ["--weights", "w", "--photograph", str(tmp_path / "a.png"), "--out", str(tmp_path)]
    words += ["--plan", save_plan(tmp_path / "plan.json", 20)]
    monkeypatch.setattr("sys.argv", ["x", *words, "--json", str(tmp_path / "found.json")])
    assert figure_dinov2.main() == 0
    for name in ("dinov2-tokens.png", "dinov2-groups.png"):
        assert Image.open(tmp_path / name).width > 400
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["pixels"] == [196, 140]
    assert 0 < found["error"] < 1
    monkeypatch.setattr("sys.argv", ["x", *words[:3], "none.png"])
    assert figure_dinov2.main() == 2
    assert "a photograph is missing: 'none.png'" in capsys.readouterr().err
