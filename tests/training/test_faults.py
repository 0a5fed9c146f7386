"""What machines and people do to a training is told in sentences, and the log holds the reason."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dgt.data.scenes import Scenes
from dgt.runs import load_recipe, predict
from dgt.runs.model import export_model, make_record
from dgt.tasks import TASKS
from dgt.training import evaluate, fit
from dgt.training.loop import Training
from dgt.utils.errors import UserError
from dgt.utils.faults import explain

from .conftest import SMALL

WORKERS = ["--data.num_workers=2", "--data.cache=false"]


def train(folder: Path, *words: str) -> Any:
    return fit(load_recipe("scenes", [*SMALL, f"--out={folder}", *words]))


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_the_system_ends(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Training.train_step

    def step(self: Training, batches: Any) -> None:
        usual(self, batches)
        if self.progress.step == 2:
            os.kill(self.loader._batches._iterator._workers[0].pid, number)

    monkeypatch.setattr(Training, "train_step", step)
    with pytest.raises(OSError, match=r"data\.num_workers.*`--resume auto` resumes"):
        train(tmp_path / "run", *WORKERS)
    assert "num_workers" in json.loads((tmp_path / "run" / "status.json").read_text())["error"]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.ckpt"))


def test_shared_memory_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(OSError, match=r"shared memory \(/dev/shm\) is full.*data\.num_workers"):
        train(tmp_path / "run", *WORKERS)
    assert "failed: shared memory (/dev/shm) is full" in log_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "expected", "sentence"),
    [
        (UserError("the label is 7, of 3 classes"), UserError, "^the label is 7, of 3 classes$"),
        (
            OSError(errno.EIO, "Input/output error", "a.png"),
            OSError,
            r"Input/output error: 'a\.png'",
        ),
        (KeyError("mean"), KeyError, "mean"),
    ],
)
def test_the_log_has_the_reason_that_a_worker_gave(
    error: Exception,
    expected: type[Exception],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Scenes, "__getitem__", fail)
    with pytest.raises(expected, match=sentence):
        train(tmp_path / "run", *WORKERS)
    log = log_of(tmp_path / "run")
    assert f"failed: {error}" in log
    assert "in fail" in log  # where in the worker
    assert not multiprocessing.active_children()


def test_one_value_for_batchnorm(tmp_path: Path) -> None:
    words = ["--data.batch_size=1", "--data.image_size=32", "--model.name=resnet10t"]
    words += ["--data.augmentation.mixup=0", "--data.augmentation.cutmix=0"]
    with pytest.raises(UserError, match=r"BatchNorm needs more than one .*raise data\.batch_size"):
        train(tmp_path / "run", *words, "--model.drop_path_rate=null")


@pytest.mark.parametrize(("model", "channels"), [("dgt_nano", 1), ("resnet10t", 4)])
def test_channels_that_the_model_does_not_take(model: str, channels: int, tmp_path: Path) -> None:
    words = [f"--model.name={model}", f"--model.args={{in_chans: {channels}}}"]
    sentence = rf"takes images of {channels} channels?, and they have 3|\(B, {channels}, H, W\)"
    with pytest.raises(UserError, match=sentence):
        train(tmp_path / "run", *words, "--model.drop_path_rate=null")
    scenes = Scenes("test", 1, 32)
    recipe = load_recipe("scenes", [*SMALL, *words])
    network = TASKS["classify"].build(recipe.model, len(scenes.class_names), 32)
    export_model(tmp_path / "model", network, make_record(recipe, scenes.class_names))
    with pytest.raises(UserError, match=sentence):
        evaluate(tmp_path / "model")
    image = tmp_path / "image.png"
    scenes[0].to_pil().save(image)
    assert re.search(sentence, str(predict(tmp_path / "model", [image])[0].error))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RuntimeError("unable to allocate shared memory(shm) for file </torch_1>"),
            "shared memory",
        ),
        (RuntimeError("unable to open shared memory object </torch_1>"), "shared memory"),
        (RuntimeError("received 0 items of ancdata"), "too many files are open"),
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory ran out"),
        (MemoryError(), "memory ran out"),
    ],
)
def test_other_limits_of_a_machine(error: Exception, sentence: str) -> None:
    assert str(explain(error)).startswith(sentence)


def test_an_operation_without_a_deterministic_form() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    better = explain(raised.value)
    assert isinstance(better, UserError)
    assert str(better).startswith("trainer.deterministic must be false here: put_ of this model")


def test_a_bug_is_not_explained() -> None:
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert explain(KeyError("out of memory")) is None


@pytest.mark.parametrize(
    ("asked", "units", "used"),
    [
        ("bf16-mixed", {"avx512_bf16": True, "amx_bf16": False}, "bf16-mixed"),
        ("bf16-mixed", {"avx512_bf16": False, "amx_bf16": True}, "bf16-mixed"),
        ("bf16-mixed", {}, "32-true"),
        ("16-mixed", {"avx512_bf16": True}, "32-true"),
    ],
)
def test_half_precision_without_units_is_float32_and_said(
    asked: str,
    units: dict[str, bool],
    used: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    train(tmp_path / "run", f"--trainer.precision={asked}")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["precision"] == used
    said = f"trainer.precision {asked} is 32-true here" in log_of(tmp_path / "run")
    assert said == (used == "32-true")


def test_a_step_of_more_batches_than_an_epoch_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.accumulate must be at most \d+, the batches"):
        train(tmp_path / "run", "--trainer.accumulate=100")
