"""The log and the curves of a training run on a disk that is temporarily full."""

from __future__ import annotations

import errno
import io
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from dgt.runs import load_recipe
from dgt.runs.checkpoints import Progress
from dgt.training import fit
from dgt.training.log import Report
from dgt.utils.errors import LOGGER

from .conftest import read_metrics

FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: Any, **__: Any) -> None:
    raise FULL


class Half:
    """A file on a disk with room for a few more bytes."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        self.file.write(text[:7])
        raise FULL


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Allow only a few more bytes to be appended to the metrics."""
    whole = Path.open

    def opened(path: Path, mode: str = "r", **keys: Any) -> Any:
        file = whole(path, mode, **keys)
        return Half(file) if (path.name, mode) == ("metrics.jsonl", "a") else file

    patch.setattr(Path, "open", opened)


@contextmanager
def begun(folder: Path, step: int = 0, epoch: int = 0) -> Iterator[Report]:
    """The report of a run that continues there, inside its `with` block."""
    with Report(folder) as report:
        report.begin(Progress(step=step, epoch=epoch), steps=8, epochs=2, images=4)
        yield report


def test_rows_go_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with begun(tmp_path) as report:
        report.write_row({"step": 0, "loss": 3.0})
        with monkeypatch.context() as patch:
            fill_disk(patch)
            for step in (1, 2):
                report.write_row({"step": step, "loss": 2.0, "top1": 0.5})
        assert read_metrics(tmp_path) == [{"step": 0, "loss": 3.0}]
        assert capsys.readouterr().err.count("metrics could not be written") == 1
        report.write_row({"step": 3, "loss": math.nan})
        report.write_row({"step": 4, "loss": 1.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [
        (0, 3.0),
        (3, None),
        (4, 1.0),
    ]


def test_curves_that_cannot_be_written_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with begun(tmp_path) as report:
        report.write_row({"step": 0, "loss": 3.0})
        with monkeypatch.context() as patch:
            patch.setattr(SummaryWriter, "add_scalar", fail)
            report.write_row({"step": 1, "loss": 2.0})
            report.write_row({"step": 2, "loss": 2.0})
        told = capsys.readouterr().err
        assert told.count("events could not be written, training continues: [Errno 28]") == 1
        report.write_image("image", np.zeros((4, 4, 3), np.uint8))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(0, 3.0)]
    assert len(events.Images("image")) == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_folder_whose_name_is_no_utf8_has_all_but_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    with begun(folder) as report:
        report.write_row({"step": 0, "loss": 3.0})
    assert "events could not be written, training continues" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(folder)] == [0]


def test_steps_that_are_trained_again_are_drawn_once(tmp_path: Path) -> None:
    """Killed after its third step, a run resumes from the checkpoint of its first."""
    with begun(tmp_path) as report:
        for step in (1, 2, 3):
            report.write_row({"step": step, "loss": 3.0})
    with begun(tmp_path, step=1) as report:
        report.write_row({"step": 2, "loss": 1.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 3.0), (2, 1.0)]


def test_curves_that_cannot_be_opened_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SummaryWriter, "__init__", fail)
    with begun(tmp_path) as report:
        report.write_row({"step": 0, "loss": 3.0})
        report.write_image("image", np.zeros((4, 4, 3), np.uint8))
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 3.0}]


def test_a_log_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").mkdir()
    with Report(tmp_path):
        LOGGER.info("epoch 1")
    printed = capsys.readouterr()
    assert printed.out == "epoch 1\n"
    assert printed.err.count("the log could not be written, training continues") == 1


class Full(io.StringIO):
    """A stream on a full disk, or of a terminal that is gone."""

    def write(self, text: str) -> int:
        raise FULL

    def isatty(self) -> bool:
        return True


def test_what_cannot_be_printed_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    for stream in (Full(), None):
        monkeypatch.setattr(sys, "stdout", stream)
        with begun(tmp_path) as report:
            LOGGER.info("epoch 1")
            LOGGER.warning("careful")
            report.begin_epoch()
            report.step({"loss": torch.tensor(1.0)}, 0.1, every=1)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("epoch 1") == log.count("careful") == 2
    assert log.count("standard output could not be written") == 1


def test_a_training_outlives_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    monkeypatch.setattr(sys, "stdout", Full())
    fill_disk(monkeypatch)
    keys = [
        "--data.train_size=8",
        "--data.val_size=4",
        "--data.batch_size=4",
        "--data.image_size=32",
    ]
    keys += [
        "--schedule.epochs=1",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        f"--out={tmp_path / 'run'}",
    ]
    result = fit(load_recipe("scenes", keys))
    assert result.epochs == 1
    assert (result.folder / "results.json").is_file()
