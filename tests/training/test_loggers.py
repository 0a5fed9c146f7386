"""The curves on a disk that is full for a while."""

from __future__ import annotations

import csv
import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dgt.training import fit, load_recipe
from dgt.training.loggers import Board, MetricsTable, quiet_writer_threads

FULL = OSError(errno.ENOSPC, "No space left on device")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_wait_for_room_and_half_ones_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = MetricsTable(tmp_path, "", "")
    table.log_metrics({"loss": 3.0}, 0)
    table.save()

    def half(_: CSVLogger) -> None:
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("2.0")
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(CSVLogger, "save", half)
        for step in (1, 2):
            table.log_metrics({"loss": 2.0, "top1": 0.5}, step)
            table.save()
    assert [row["loss"] for row in rows(tmp_path)] == ["3.0"]
    assert capsys.readouterr().err.count("metrics.csv could not be written") == 1
    table.save()
    assert [(row["loss"], row["top1"], row["step"]) for row in rows(tmp_path)] == [
        ("3.0", "", "0"),
        ("2.0", "0.5", "1"),
        ("2.0", "0.5", "2"),
    ]


def test_a_first_table_that_failed_begins_with_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = MetricsTable(tmp_path, "", "")
    table.log_metrics({"loss": 3.0}, 0)

    def nothing(_: CSVLogger) -> None:
        (tmp_path / "metrics.csv").write_text("lo")
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(CSVLogger, "save", nothing)
        table.save()
    table.save()
    assert rows(tmp_path) == [{"loss": "3.0", "step": "0"}]


def break_writer(board: Any) -> None:
    """What TensorBoard's thread leaves when it meets a full disk."""
    board.experiment.file_writer.event_writer._async_writer._worker.exception = FULL


def test_a_board_that_was_lost_begins_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = Board(tmp_path, "", "", purge_step=0)
    board.log_metrics({"loss": 3.0}, 0)
    board.save()
    break_writer(board)
    board.log_metrics({"loss": 2.0}, 1)
    assert "events could not be written, some are missing: [Errno 28]" in capsys.readouterr().err
    board.log_metrics({"loss": 1.0}, 2)
    board.add_image("picture", np.zeros((4, 4, 3), np.uint8), 2)
    board.finalize("failed")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(0, 3.0), (2, 1.0)]
    assert len(events.Images("picture")) == 1


def test_other_mistakes_are_still_told(tmp_path: Path) -> None:
    board = Board(tmp_path, "", "")
    with pytest.raises(ValueError, match="currently not supported"):
        board.log_metrics({"loss": object()}, 0)
    board.finalize("failed")


def test_only_the_writer_s_thread_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise FULL

    seen: list[str] = []
    usual, threading.excepthook = threading.excepthook, lambda failure: seen.append(type(failure.thread).__name__)
    try:
        with quiet_writer_threads():
            for kind in (type("_AsyncWriterThread", (threading.Thread,), {}), threading.Thread):
                thread = kind(target=fail)
                thread.start()
                thread.join()
    finally:
        threading.excepthook = usual
    assert seen == ["Thread"]


def test_a_training_outlives_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Board.save

    def failing(board: Board) -> None:
        break_writer(board)
        usual(board)

    monkeypatch.setattr(Board, "save", failing)
    monkeypatch.setattr(CSVLogger, "save", lambda _: (_ for _ in ()).throw(FULL))
    keys = ["--data.train_size=8", "--data.val_size=4", "--data.batch_size=4", "--data.image_size=32"]
    keys += ["--schedule.epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=1", f"--out={tmp_path / 'run'}"]
    result = fit(load_recipe("scenes", keys))
    assert result.epochs == 1
    assert (result.folder / "results.json").is_file()
