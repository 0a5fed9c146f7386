"""Pictures of DINOv2: changes are reported, and invalid command line options rejected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from studies import figure_dinov2
from studies.figure_dinov2 import Shortcut, tokens_of


class TinyModel(nn.Module):
    """Attention layers over patches of 14 x 14 pixels and a class token."""

    num_prefix_tokens = 1

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 16, 14, 14)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers))

    def forward_features(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        x = torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1)
        for layer in self.layers:
            parts = (3 * layer(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            found = torch.nn.functional.scaled_dot_product_attention(*parts)
            x = x + found.transpose(1, 2).flatten(2)
        return x


def images() -> Tensor:
    return torch.randn(1, 3, 140, 196, generator=torch.Generator().manual_seed(0))


def test_layers_that_stay_dense_do_not_move() -> None:
    """If all layers are dense, nothing changes; with groups tokens change, more so with fewer products."""
    model = TinyModel(3).eval()
    assert tokens_of(model, images(), Shortcut(None, 0.2, (0, 1, 2))).error == 0
    little, less = (tokens_of(model, images(), Shortcut(None, share, (0,))) for share in (0.9, 0.1))
    assert 0 < little.error < less.error < 1
    assert less.cosines.shape == (140,)


def test_the_command_writes_pictures_and_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figure_dinov2, "load_dinov2", lambda _: TinyModel().eval())
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    words = ["--weights", "w", "--photograph", str(tmp_path / "a.png"), "--out", str(tmp_path)]
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
