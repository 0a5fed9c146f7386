"""`benchmarks/error_bound_campaign.py` makes draws, compares the bound with unseen photographs, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import error_bound_campaign as campaign
import pytest
import torch
from PIL import Image
from timm.models import VisionTransformer


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Twelve noisy images: eight for the pool, and four apart."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(12):
        Image.effect_noise((64, 64), 20 + number).convert("RGB").save(folder / f"{number}.jpg")
    return folder


def test_draws_are_made_and_those_done_are_kept(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=64, patch_size=2, embed_dim=32, depth=2, num_heads=2, num_classes=0
    ).eval()
    out = tmp_path / "campaign.json"
    monkeypatch.setattr(campaign, "open_model", lambda *_: model)
    monkeypatch.setattr(campaign, "POOL", 8)
    monkeypatch.setattr(campaign, "COUNTS", (4,))
    words = ["campaign", "--weights", "none", "--photographs", f"noise={photographs}"]
    options = [*words, "--sizes", "64", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*options, "--draws", "1"])
    campaign.main()
    first = json.loads(out.read_text())["rows"]
    assert campaign.has_groups(first[-1])
    assert 0 < first[-1]["unseen_error"] < 1
    assert first[-1]["bound"] <= first[-1]["asked_error"]
    monkeypatch.setattr("sys.argv", [*options, "--draws", "2"])
    campaign.main()
    rows = json.loads(out.read_text())["rows"]
    assert rows[: len(first)] == first
    assert [row["number"] for row in rows] == list(range(len(rows)))
    assert sum(map(campaign.has_groups, rows)) == 2
