"""The log and the curves of a training, on a disk that is full for a while."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from dgt.training import fit, load_recipe
from dgt.training.log import MetricsLog, RunLog, read_metrics
from dgt.utils.errors import LOGGER

FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: Any, **__: Any) -> None:
    raise FULL


def test_rows_wait_for_room_and_half_ones_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path)
    log.write({"step": 0, "loss": 3.0})
    whole = Path.open

    class Half:
        """A file on a disk that takes a few bytes more."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def writelines(self, lines: list[str]) -> None:
            self.file.write(lines[0][:7])
            raise FULL

    with monkeypatch.context() as patch, RunLog(None):
        patch.setattr(
            Path,
            "open",
            lambda path, mode="r", **keys: (
                Half(whole(path, mode, **keys)) if mode == "a" else whole(path, mode, **keys)
            ),
        )
        for step in (1, 2):
            log.write({"step": step, "loss": 2.0, "top1": 0.5})
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 3.0}]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    assert capsys.readouterr().err.count("metrics could not be written") == 1
    log.write({"step": 3, "loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
    log.close()


def test_resuming_takes_back_what_lies_beyond(tmp_path: Path) -> None:
    rows = [{"step": 2, "loss": 3.0}, {"step": 4, "epoch": 1, "mean": 2.0}, {"step": 4, "epoch": 2}, {"step": 6}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 8, "lo')
    MetricsLog(tmp_path, step=4, epoch=1)
    assert read_metrics(tmp_path) == rows[:2]


def test_curves_that_were_lost_go_on_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path)
    log.write({"step": 0, "loss": 3.0})
    with monkeypatch.context() as patch, RunLog(None):
        patch.setattr(SummaryWriter, "add_scalar", fail)
        log.write({"step": 1, "loss": 2.0})
    assert "events could not be written, training goes on: [Errno 28]" in capsys.readouterr().err
    log.write({"step": 2, "loss": 1.0})
    log.add_image("image", np.zeros((4, 4, 3), np.uint8), 2)
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(0, 3.0), (2, 1.0)]
    assert len(events.Images("image")) == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]


def test_other_mistakes_are_still_told(tmp_path: Path) -> None:
    with pytest.raises((TypeError, NotImplementedError)):
        MetricsLog(tmp_path).write({"step": 0, "loss": object()})


def test_a_log_that_cannot_be_written_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").mkdir()
    with RunLog(tmp_path):
        LOGGER.info("epoch 1")
    printed = capsys.readouterr()
    assert printed.out == "epoch 1\n"
    assert "dgt: warning: the log could not be written" in printed.err


def test_a_training_outlives_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    monkeypatch.setattr(MetricsLog, "_append", fail)
    keys = ["--data.train_size=8", "--data.val_size=4", "--data.batch_size=4", "--data.image_size=32"]
    keys += ["--schedule.epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=1", f"--out={tmp_path / 'run'}"]
    result = fit(load_recipe("scenes", keys))
    assert result.epochs == 1
    assert (result.folder / "results.json").is_file()
