"""`benchmarks/accelerate_unseen.py` measures images of every set one by one with a plan, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import accelerate_unseen as unseen
import pytest
import torch
from PIL import Image
from timm.models import VisionTransformer


def open_model(*_: object) -> VisionTransformer:
    """A small one with random weights, always the same."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=64, patch_size=2, embed_dim=32, depth=2, num_heads=2, num_classes=0
    ).eval()


def test_images_of_all_sets_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        image = Image.effect_noise((100, 80), 20 + 5 * number).convert("RGB")
        image.save(tmp_path / f"{number}.jpg")
    (tmp_path / "page.md").write_text("A page of text.\n" * 9, encoding="utf-8")

    monkeypatch.setattr(unseen, "open_model", open_model)
    site = {"heads": 2, "channels": 16, "tokens": 1025, "key_tokens": 1025, "prefix": 1}
    site |= {"choice": "groups", "groups": 16, "keys": 64, "residual_keys": 8, "least_tokens": 16}
    site["allowed_error"] = 0.5
    report = dict.fromkeys(("asked_error", "predicted_error", "measured_error"), 0.1)
    report |= {"attention_speedup": 2.0, "model_speedup": 1.5, "bound": 2.0}
    report["layers"] = [site | {"name": f"blocks.{number}.attn"} for number in range(2)]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"format": "dgt-plan-2", "report": report}))
    out = tmp_path / "unseen.json"
    words = ["unseen", "--weights", "none", "--size", "64", "--plan", plan]
    words += ["--photographs", f"noise={tmp_path}", "--native", f"native={tmp_path}"]
    words += ["--text", tmp_path, "--out", out, "--references", tmp_path / "tokens"]
    monkeypatch.setattr("sys.argv", [*map(str, words), "--count", "1"])
    unseen.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["set"] for row in rows[:3]] == ["noise", "native", "text"]
    assert len(rows) == 1 + 4 * 4 + 1
    assert all(0 < row["error"] < 1 for row in rows)
    assert all(row["error"] == row["error_without_guard"] for row in rows if not row["acted"])
    products = rows[0]["products"]
    assert products["guard"] > 0
    assert 0 < products["groups"] < products["dense"]
    monkeypatch.setattr("sys.argv", [*map(str, words), "--count", "2"])
    unseen.main()
    again = json.loads(out.read_text())["rows"]
    assert again[: len(rows)] == rows
    assert len(again) == len(rows) + 1
    report["layers"][0]["keys"] = 32
    plan.write_text(json.dumps({"format": "dgt-plan-2", "report": report}))
    with pytest.raises(SystemExit, match="was measured with another plan"):
        unseen.main()


@torch.no_grad()
def test_tokens_of_another_image_are_not_kept_for_this_one(tmp_path: Path) -> None:
    model = open_model()
    kept = tmp_path / "tokens" / "image.pt"
    for value in (0.2, 0.8):
        image = torch.full((1, 3, 64, 64), value)
        expected = model.forward_features(image)
        for _ in range(2):
            torch.testing.assert_close(unseen.tokens_before(model, image, kept), expected)
