"""`benchmarks/accelerate_native.py` searches on some photographs, measures squares of others, and resumes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import accelerate_native as native
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


def jpeg(width: int) -> bytes:
    """A square of noise in a gray of its width."""
    content = io.BytesIO()
    Image.effect_noise((width, width), 30).convert("RGB").save(content, "JPEG")
    return content.getvalue()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photographs of two packages: as files, and in two sizes in one file."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.jpg").write_bytes(jpeg(80 + number))
    (folder / "theme.edj").write_bytes(b"\0" * 9 + jpeg(70) + b"\0" + jpeg(90) + b"\xff\xd8\xff")
    monkeypatch.setattr(
        native, "PHOTOGRAPHS", {"{}.jpg": tuple("0123456789"), "{}.edj": ("theme",)}
    )
    monkeypatch.setattr(native, "CHOOSING", 8)
    monkeypatch.setattr(native, "open_model", open_model)
    return folder


def test_a_theme_gives_its_largest_photograph(packages: Path) -> None:
    assert native.open_photograph(packages / "theme.edj").size == (90, 90)


def test_squares_are_not_scaled(packages: Path) -> None:
    photograph = native.open_photograph(packages / "theme.edj")
    first, second = (native.cut(photograph, 64, square, 2) for square in range(2))
    assert first.shape == second.shape == (1, 3, 64, 64)
    assert torch.equal(first[..., 13:], second[..., : 64 - 13])


def test_others_than_those_that_choose_are_measured_once(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "native.json"
    words = ["native", "--weights", "none", "--packages", packages, "--size", "64", "--out", out]
    words += ["--error", "0.5", "--kept", tmp_path / "kept"]
    monkeypatch.setattr("sys.argv", [*map(str, words), "--squares", "0"])
    native.main()
    searched = json.loads(out.read_text())
    assert searched["rows"] == []
    assert len(searched["chosen_by"]) == 8
    monkeypatch.setattr("sys.argv", [*map(str, words)])
    native.main()
    found = json.loads(out.read_text())
    assert found["report"] == searched["report"]
    measured = {row["photograph"] for row in found["rows"]}
    assert len(found["rows"]) == 6
    assert len(measured) == 3
    assert not measured & set(found["chosen_by"])
    assert found["found"]["largest"] == max(row["error"] for row in found["rows"])
    native.main()
    assert json.loads(out.read_text()) == found
