"""The command line of studies, and differences between selectors with their intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dgt.tasks.segment import segmentation_scores
from dgt.utils.errors import UserError
from studies.command import run_study
from studies.replacement_pairs import pair, scores


def test_a_study_prints_its_table_and_where_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[str], int, str | None]] = []

    def measure(words: Sequence[str], seeds: int, out: str | None) -> Path:
        asked.append((list(words), seeds, out))
        (tmp_path / "mine.json").write_text(json.dumps({"rows": [1]}))
        (tmp_path / "mine.md").write_text("| a table |\n")
        return tmp_path

    words = ["--run", "runs/demo", "--seeds", "2", "--out", str(tmp_path), "--data.root=images"]
    assert run_study("mine", "What it is about.", measure, arguments=words) == 0
    assert asked == [(["--run", "runs/demo", "--data.root=images"], 2, str(tmp_path))]
    assert capsys.readouterr().out == f"| a table |\n\n{tmp_path / 'mine.json'}\n"


@pytest.mark.parametrize(
    "error", [UserError("give --run RUN"), FileNotFoundError("there is no run")]
)
def test_wrong_words_are_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(*_: object) -> Path:
        raise error

    assert run_study("mine", "What it is about.", measure, arguments=[]) == 2
    assert capsys.readouterr().err == f"mine: error: {error}\n"


def test_a_difference_has_the_interval_of_a_jackknife() -> None:
    """With equal images nothing varies; the first score is over all images, the others leave one out."""
    counts = torch.randint(1, 50, (5, 3, 3), generator=torch.Generator().manual_seed(0))
    found = scores(counts)
    assert found.shape == (6,)
    torch.testing.assert_close(found[0], segmentation_scores(counts.sum(0))["miou"])
    torch.testing.assert_close(found[3], segmentation_scores(counts.sum(0) - counts[2])["miou"])
    same = pair(found + 0.25, found)
    assert same["ahead"] == pytest.approx(0.25)
    assert same["half"] == pytest.approx(0, abs=1e-6)
    varied = pair(found + torch.tensor([0.0, 0.1, -0.1, 0.0, 0.1, -0.1]), found)
    spread = (sum(x * x for x in (0.1, -0.1, 0.0, 0.1, -0.1)) / 4 / 5) ** 0.5
    assert varied["half"] == pytest.approx(4 * 2.78 * spread)
