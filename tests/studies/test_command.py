"""The command line of studies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dgt.utils.errors import UserError
from studies.command import run_study


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
