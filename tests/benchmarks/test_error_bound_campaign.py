"""`benchmarks/error_bound_campaign.py` makes draws, compares promises with unseen photographs, and resumes."""

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
    for name, count in {"POOL": 8, "APART": 4, "INPUTS": 4}.items():
        monkeypatch.setattr(campaign, name, count)
    words = ["campaign", "--weights", "none", "--photographs", f"noise={photographs}"]
    words += ["--sizes", "64", "--errors", "0.2", "--threads", "1", "--out", str(out)]
    words += ["--kept", str(tmp_path / "kept")]
    monkeypatch.setattr("sys.argv", [*words, "--draws", "1"])
    campaign.main()
    (first,) = json.loads(out.read_text())["rows"]
    assert first["layers_in_groups"]
    assert 0 < first["bound"] <= first["asked_error"] / 2
    assert len(first["unseen"]) == 4
    together = round(first["unseen_error"], 6)  # as those of single photographs
    assert min(first["unseen"].values()) <= together <= max(first["unseen"].values())
    # What was measured before is neither measured again nor changed.
    kept = (tmp_path / "kept" / "noise-64" / "photographs.jsonl").read_text()
    monkeypatch.setattr("sys.argv", [*words, "--draws", "2"])
    campaign.main()
    rows = json.loads(out.read_text())["rows"]
    assert rows[0] == first
    assert [row["number"] for row in rows] == [0, 1]
    lines = (tmp_path / "kept" / "noise-64" / "photographs.jsonl").read_text()
    assert lines.startswith(kept)
    known = [tuple(json.loads(line)[:2]) for line in lines.splitlines()]
    assert len(set(known)) == len(known)
