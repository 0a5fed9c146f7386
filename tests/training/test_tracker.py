"""Experiment trackers, by a module that stands in for them: both have the same three functions."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgt.runs import load_recipe
from dgt.training import fit

from .conftest import SMALL, read_metrics

WORDS = [*SMALL, "--data.train_size=32", "--data.val_size=8", "--schedule.epochs=1"]


class Recorder(SimpleNamespace):
    """A tracker that keeps what it is told."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__(__name__=name, begun=[], rows=[], finished=0, fails=fails)

    def init(self, **settings: Any) -> None:
        self.begun.append(settings)

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_recipe_and_the_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Recorder(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    words = [*WORDS, f"--trainer.tracker={name}", f"--out={tmp_path / 'run'}"]
    folder = fit(load_recipe("scenes", words)).folder
    (settings,) = tracker.begun
    assert settings["project"] == "scenes"
    assert settings["name"].startswith("run")
    assert settings["config"] == load_recipe(folder / "recipe.yaml").to_dict()
    rows = [{"step": step, **numbers} for step, numbers in tracker.rows]
    assert rows == read_metrics(folder)
    assert {"train/loss_step", "lr"} < rows[0].keys()
    assert "val/top1" in rows[-1]
    assert tracker.finished == 1
    assert any(folder.glob("events.*"))
    # resumed, the run goes on in the tracker's
    (folder / "results.json").unlink()
    fit(load_recipe("scenes", words), resume=True)
    again = tracker.begun[1]
    assert again == settings
    assert ("id" in again) == (name == "wandb")
    # another folder of the same name is another run
    fit(load_recipe("scenes", [*words, f"--out={tmp_path / 'other' / 'run'}"]))
    other = tracker.begun[2]
    assert other.get("id", other["name"]) != again.get("id", again["name"])


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Recorder("wandb", fails=True))
    words = [*WORDS, "--trainer.tracker=wandb", f"--out={tmp_path / 'run'}"]
    folder = fit(load_recipe("scenes", words)).folder
    log = (folder / "log.txt").read_text()
    assert log.count("the tracker wandb could not log, training continues without it") == 1
    assert (folder / "results.json").is_file()


@pytest.mark.parametrize("is_folder", [True, False])
def test_without_its_package_a_tracker_is_refused_before_anything_runs(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a folder of its name lies here, as it leaves one: Python imports that."""
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace() if is_folder else None)
    words = [*WORDS, "--trainer.tracker=trackio", f"--out={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"^trainer\.tracker trackio needs .* trackio: `pip"):
        fit(load_recipe("scenes", words))
    assert not (tmp_path / "run").exists()
