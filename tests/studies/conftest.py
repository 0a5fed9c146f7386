"""Shared by the tests of studies: the one line with which a study refuses bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

Refuses = Callable[[ModuleType, Sequence[str]], str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refuses:
    """A function that runs a study's command, which must fail, and returns its message, one line."""

    def run(study: ModuleType, words: Sequence[str]) -> str:
        assert study.main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    return run


@pytest.fixture
def check_folders(
    refusal: Refuses, tmp_path: Path
) -> Callable[[ModuleType, Sequence[str], Path, Path], None]:
    """A function that tries what every study of paired trainings must refuse.

    Its arguments: the study, words that are right, the folder of a finished study, and the first
    folder that is missing in an empty `--data`.
    """

    def check(study: ModuleType, words: Sequence[str], done: Path, missing: Path) -> None:
        out = tmp_path / "out"
        message = refusal(study, [*words, "--data", str(tmp_path), "--out", str(out)])
        assert message.endswith(f"{tmp_path / missing} is missing")
        assert not out.exists()
        assert "now" in refusal(study, [*words, "--out", str(done), "--epochs", "2"])
        other = tmp_path / "other"
        other.mkdir()
        (other / "notes.txt").write_text("mine")
        assert "not this study's" in refusal(study, [*words, "--out", str(other)])
        assert "is a file" in refusal(study, [*words, "--out", str(other / "notes.txt")])

    return check
