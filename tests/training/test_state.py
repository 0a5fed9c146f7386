"""Checkpoint files: written atomically, and never trusted without verification."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgt.runs.checkpoints import Progress, read_checkpoint
from dgt.runs.recipe import CheckpointSettings
from dgt.training.log import Report
from dgt.training.state import Checkpoints

CONTENT = {"weights": torch.arange(4096.0), "step": 3}


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 1, exclude_max=True), st.none() | st.integers(0, 7))
def test_cut_off_or_changed_in_one_bit(share: float, bit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.ckpt"
        torch.save(CONTENT, path)
        whole = bytearray(path.read_bytes())
        offset = int(share * len(whole))
        if bit is None:
            path.write_bytes(whole[:offset])
            with pytest.raises(ValueError, match=r"step\.ckpt .*truncated or damaged"):
                read_checkpoint(path)
            return
        whole[offset] ^= 1 << bit
        path.write_bytes(whole)
        try:
            stored = read_checkpoint(path)
        except ValueError:
            return
        assert torch.equal(stored["weights"], CONTENT["weights"])  # type: ignore[arg-type]  # a bit that does not matter
        assert stored["step"] == 3


def test_a_checkpoint_is_due_by_steps_epochs_or_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("dgt.training.state.time", SimpleNamespace(monotonic=lambda: clock[0]))
    often = Checkpoints(
        tmp_path, CheckpointSettings(every_epochs=2, every_steps=5, every_minutes=1.5), {}
    )
    never = Checkpoints(tmp_path, CheckpointSettings(every_epochs=None, every_minutes=None), {})
    assert [step for step in range(1, 12) if often.is_due(step)] == [5, 10]
    assert [epoch for epoch in range(1, 6) if often.is_due(1, epoch)] == [2, 4]
    clock[0] = 89.0
    assert not often.is_due(1)
    clock[0] = 90.0
    assert often.is_due(1)
    fabric = SimpleNamespace(is_global_zero=True)
    state: Any = SimpleNamespace(state_dict=dict, fabric=fabric, progress=Progress(step=1))
    often.save(state)
    assert not often.is_due(1)
    assert not any(never.is_due(step, step) for step in range(1, 12))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_write_that_fails_is_reported_and_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointSettings(), {})
    content: dict[str, Any] = {"step": 3}
    state: Any = SimpleNamespace(
        state_dict=lambda: content, fabric=SimpleNamespace(is_global_zero=True)
    )
    checkpoints.write(state, tmp_path / "step.ckpt")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, Report(None):
        patch.setattr(os, "fsync" if number == errno.ENOSPC else "replace", fail)
        content = {"step": 4}
        checkpoints.write(state, tmp_path / "step.ckpt")
    assert checkpoints.failure is not None
    assert (
        f"warning: the checkpoint {tmp_path / 'step.ckpt'} could not be written"
        in capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["step.ckpt"]
    assert read_checkpoint(tmp_path / "step.ckpt")["step"] == 3
    content = {"step": 5}
    checkpoints.write(state, tmp_path / "step.ckpt")
    assert checkpoints.failure is None


def test_an_older_checkpoint_that_cannot_be_removed_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    progress, fabric = SimpleNamespace(step=3), SimpleNamespace(is_global_zero=True)
    state: Any = SimpleNamespace(state_dict=lambda: {"step": 3}, fabric=fabric, progress=progress)
    checkpoints = Checkpoints(tmp_path, CheckpointSettings(keep=1), {})
    checkpoints.save(state)
    progress.step, whole = 4, Path.unlink
    with monkeypatch.context() as patch, Report(None):
        patch.setattr(
            Path,
            "unlink",
            lambda path, **keys: (refuse if path.name.startswith("step") else whole)(path, **keys),
        )
        checkpoints.save(state)
    assert len(list(tmp_path.glob("checkpoints/step-*.ckpt"))) == 2
    checkpoints.save(state)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000004.ckpt"]


def test_the_newest_checkpoint_is_kept_beside_a_damaged_one_of_a_higher_step(
    tmp_path: Path,
) -> None:
    """As after a resumption from `best.ckpt`, where the only other one could not be read."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000009.ckpt").write_bytes(b"damaged")
    progress, fabric = SimpleNamespace(step=3), SimpleNamespace(is_global_zero=True)
    state: Any = SimpleNamespace(state_dict=lambda: {"step": 3}, fabric=fabric, progress=progress)
    Checkpoints(tmp_path, CheckpointSettings(keep=1), {}).save(state)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003.ckpt"]
