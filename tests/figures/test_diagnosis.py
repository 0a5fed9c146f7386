"""`dgt diagnose`: the figure, the table, and the errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from dgt.figures.diagnosis import diagnosis_table, figure_diagnosis
from dgt.models import BlockDiagnosis
from dgt_command import main, visualize

from .test_visualize import make_run

SOME = BlockDiagnosis(
    "stages.0.blocks.0.attn",
    64,
    16,
    8,
    0.4,
    0.125,
    0.2,
    0.3,
    0.5,
    0.7,
    11.5,
    7.25,
    16.0,
    20.0,
    0.75,
)
NO_GRID = SOME._replace(name="blocks.3.attn", window=None)
ALL = SOME._replace(name="stages.1.blocks.0.attn", tokens=8)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders `run` and `peer` are models with random weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "peer"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(
        visualize,
        "load_run",
        lambda path: make_run(0, "test_resnet" if path == "peer" else "dgt_nano"),
    )


@pytest.fixture
def image(tmp_path: Path) -> str:
    Image.effect_noise((90, 70), 60).convert("RGB").save(tmp_path / "image.png")
    return str(tmp_path / "image.png")


def test_the_figure_has_a_mark_for_every_choice() -> None:
    figure = figure_diagnosis([SOME, NO_GRID, ALL])
    masses, balance = figure.axes
    marks = {
        points.get_label(): points.get_offsets().data.tolist() for points in masses.collections
    }
    assert marks["selected by the group"] == [[0.4, 0], [0.4, 1]]
    assert marks["window around the query"] == [[0.2, 0]]
    assert len(marks) == 6
    assert [text.get_text() for text in masses.texts] == ["k = 8 covers all 8 tokens"]
    assert [bar.get_width() for bar in balance.patches] == [11.5 / 16] * 3
    assert len(figure_diagnosis([ALL]).axes[0].collections) == 0
    with pytest.raises(ValueError, match="at least one BlockDiagnosis"):
        figure_diagnosis([])


def test_the_table_lines_up() -> None:
    lines = diagnosis_table([SOME, NO_GRID]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[4:8] == ["40.0", "%", "12.5", "%"]
    assert lines[2].split()[8] == "-"
    assert "residual" not in lines[0]


def test_the_share_of_residual_keys_is_a_column_where_there_are_some() -> None:
    heads, *lines = diagnosis_table([SOME._replace(residual=0.25), NO_GRID]).splitlines()
    assert heads.split()[-1] == "residual"
    assert [line.split("  ")[-1].strip() for line in lines] == ["25.0 %", "-"]


def test_the_command_writes_and_prints(
    run: None, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "diagnosis.svg"
    assert main(["diagnose", "run", image, image, "--out", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in rows] == [256, 64, 16, 16, 16, 16]
    assert out.stat().st_size > 5000
    assert main(["diagnose", "run", image, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("stages.0.blocks.0.attn")


def test_mistakes(
    run: None, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["peer", image], "must contain DGAttention layers, got a ResNet"),
        (["run", str(tmp_path / "none.png")], "none.png' does not exist"),
        (["run", image, "--out", str(tmp_path / "a.txt")], "path must end in one of"),
    ):
        assert main(["diagnose", *words]) == 2
        assert message in capsys.readouterr().err
