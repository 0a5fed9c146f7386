"""The entropy of heads: known values, selectors at their limits, a run on a small model, and errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from dgt.utils.errors import UserError
from studies import captured_attention, head_entropy
from studies.captured_attention import Captured
from studies.head_entropy import (
    BEST,
    RANDOM,
    SELECTORS,
    Head,
    entropy_of,
    measure_layer,
    parts_of,
    rank_correlation,
)


def operands(sharpness: float) -> Captured:
    """Random operands of two heads of 100 tokens; the queries of the second are `sharpness` times as long."""
    query, key, value = torch.randn(3, 1, 2, 100, 16, generator=torch.Generator().manual_seed(0))
    query[:, 1] *= sharpness
    return Captured(query, key, value, (10, 10), 0)


def test_entropy_of_uniform_and_of_single_keys() -> None:
    key = torch.randn(1, 1, 50, 8)
    assert entropy_of(torch.zeros(1, 1, 50, 8), key, 1.0).tolist() == pytest.approx([1.0])
    half = torch.zeros(1, 1, 4, 2)
    half[0, 0, :2, 0] = 1000.0  # two of four keys share all of the mass
    assert entropy_of(torch.tensor([[[[1.0, 0.0]]]]), half, 1.0).item() == pytest.approx(
        math.log(2) / math.log(4)
    )


def test_best_keys_suit_sharp_heads_and_random_ones_flat_heads() -> None:
    sharp = measure_layer(operands(40.0), (10,))[1]
    flat = measure_layer(operands(0.0), (10,))[1]
    assert flat["entropy"] == pytest.approx(1.0)
    assert sharp["entropy"] < 0.2
    assert sharp[BEST][0] < 0.1 < sharp[RANDOM][0]
    # the mean of random keys has no bias, and the residual key of a flat head is exact
    assert flat["random, remainder"][0] < 1e-3
    assert flat["groups, remainder"][0] < 1e-3


def test_nearly_all_keys_are_nearly_exact() -> None:
    for row in measure_layer(operands(1.0), (2, 99)):
        for selector in SELECTORS:
            assert row[selector][1] < 0.5 * row[selector][0]


def test_rank_correlation_sees_only_the_order() -> None:
    def head(entropy: float, best: float) -> Head:
        return Head(entropy, {name: best if name == BEST else 1.0 for name in SELECTORS})

    rising = [head(entropy, entropy**5) for entropy in (0.1, 0.2, 0.5, 0.9)]
    assert rank_correlation(rising) == pytest.approx(1.0)
    falling = [head(entropy, 1 / entropy) for entropy in (0.1, 0.2, 0.5, 0.9)]
    assert rank_correlation(falling) == pytest.approx(-1.0)
    assert [part.random_wins for part in parts_of([head(0.1, 2.0), *rising[1:]])] == [1, 0, 0, 0]


@pytest.fixture
def photograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image; the model is one random layer of attention over its patches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [None]

        def forward_features(self, image: torch.Tensor) -> torch.Tensor:
            tokens = (
                nn.functional.unfold(image, 14, stride=14).mT[:, None, :, :48].unflatten(-1, (6, 8))
            )
            query = tokens.squeeze(1).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    monkeypatch.setattr(captured_attention, "load_dinov2", lambda weights: Model())
    path = tmp_path / "image.png"
    Image.effect_noise((90, 80), 60).convert("RGB").save(path)
    return path


def test_a_run_is_resumed(
    photograph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--weights=any",
        f"--photographs={photograph},{photograph}",
        "--size=84",
        "--percent=10,50",
    ]
    folder = head_entropy.head_entropy(words, out=tmp_path / "out")
    path = folder / "head_entropy.json"
    content = json.loads(path.read_text())
    assert [(row["image"], row["head"]) for row in content["rows"]] == [
        (i, h) for i in (0, 1) for h in range(6)
    ]
    assert "10 % of the keys; rank correlation" in (folder / "head_entropy.md").read_text()
    assert len(head_entropy.draw(content).axes) == 2
    first = {**content, "rows": content["rows"][:6]}
    path.write_text(json.dumps(first))
    measured = []
    original = head_entropy.measure_layer
    monkeypatch.setattr(
        head_entropy, "measure_layer", lambda *given: measured.append(1) or original(*given)
    )
    head_entropy.head_entropy(words, out=tmp_path / "out")
    assert len(measured) == 1
    assert json.loads(path.read_text())["rows"] == content["rows"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--photographs="], "--photographs must name at least one file"),
        (["--photographs=a.jpg", "--size=100"], "--size must be a multiple of 14, got 100"),
        (["--photographs=missing.jpg"], "a photograph is missing: 'missing.jpg'"),
        (["--data.root=x"], "head_entropy takes no --data.root"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        head_entropy.head_entropy(words)


def test_a_percentage_of_no_keys_is_refused(photograph: Path) -> None:
    with pytest.raises(UserError, match="--percent must lie in 1 to 99"):
        head_entropy.head_entropy([f"--photographs={photograph}", "--percent=0,5"])
