"""A training that was stopped and goes on is, to the last bit, the one that never stopped."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from dgt.training import fit, load_recipe
from dgt.training.resuming import Place, go_on, newest_place, run_to_resume
from dgt.training.saving import step_checkpoints
from dgt.training.signals import Interrupted, Preempted
from dgt.training.trainer import add_callbacks, build_trainer

SMALL_DGT = "{stem_width: 8, dims: [16, 32, 64, 64], num_heads: [1, 2, 2, 2], depths: [1, 1, 1, 1], num_groups: 4}"
KEYS = (
    "--model.name=dgt_nano",
    f"--model.args={SMALL_DGT}",
    "--model.drop_path_rate=0.3",
    "--data.image_size=32",
    "--data.batch_size=4",
    "--data.train_size=20",
    "--data.val_size=8",
    "--data.augmentation.mixup=0.8",
    "--data.augmentation.erasing=0.25",
    "--schedule.epochs=2",
    "--schedule.warmup_epochs=0.5",
    "--ema.decay=1e-9",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.deterministic=true",
)


class Poke(Callback):
    """Calls a function at one hook, the first time that a condition holds there."""

    def __init__(self, hook: str, when: Callable[[Trainer], bool], act: Callable[[], None]) -> None:
        def poke(trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
            if not self.done and trainer.state.fn == "fit" and when(trainer):
                self.done = True
                act()

        self.done = False
        setattr(self, hook, poke)


def train(
    out: Path, *keys: str, poke: Sequence[Callback] = (), monkeypatch: pytest.MonkeyPatch, resume: bool = False
) -> dict[str, Any]:
    """Train, or go on, with some callbacks more; returns what the last checkpoint holds."""

    def build(*arguments: Any) -> Any:
        trainer, batch = build_trainer(*arguments)
        add_callbacks(trainer, poke)
        return trainer, batch

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["dgt.training.fit"], "build_trainer", build)  # the package has the function
        fit(load_recipe("scenes", [*KEYS, *keys, f"--out={out}"]), resume=resume)
    return state(out)


def state(out: Path) -> dict[str, Any]:
    """Weights, averages, optimizer, schedule and metrics at the end, by name."""
    stored = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    kept = {key: stored[key] for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers")}
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(kept)
    return {torch.utils._pytree.keystr(path): leaf for path, leaf in leaves}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether all tensors have the same bits and all else is equal."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        for key, value in first.items()
    )


def terminate() -> None:
    """What a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(load_recipe("scenes", [*KEYS, f"--out={out}"]))
    return out


STOPS: dict[str, tuple[str, Callable[[Trainer], bool], tuple[str, ...]]] = {
    "in the middle of an epoch": ("on_train_batch_end", lambda trainer: trainer.global_step == 7, ()),
    "with workers": ("on_train_batch_start", lambda trainer: trainer.global_step == 2, ("--data.num_workers=2",)),
    "in a validation": ("on_validation_batch_end", lambda trainer: True, ()),
    "at the end of an epoch": ("on_train_epoch_end", lambda trainer: True, ()),
}


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_by_a_signal(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    hook, when, keys = STOPS[stop]
    with pytest.raises(Preempted) as raised:
        train(tmp_path / "run", *keys, poke=[Poke(hook, when, terminate)], monkeypatch=monkeypatch)
    assert raised.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = train(tmp_path / "run", *keys, monkeypatch=monkeypatch, resume=True)
    assert same(resumed, state(whole))
    results = [json.loads((out / "results.json").read_text()) for out in (whole, tmp_path / "run")]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["best"] == results[1]["best"]
    tables = [list(csv.DictReader((out / "metrics.csv").open())) for out in (whole, tmp_path / "run")]
    assert [row["train/loss_epoch"] for row in tables[0]] == [row["train/loss_epoch"] for row in tables[1]]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "stopped by SIGTERM after step" in log
    assert "resumed after step" in log.partition("stopped by SIGTERM")[2]
    assert "lr nan" not in log


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as raised:
        train(tmp_path / "run", poke=[Poke("on_after_backward", lambda trainer: True, twice)], monkeypatch=monkeypatch)
    assert raised.value.code == 130
    assert "interrupted at once" in (tmp_path / "run" / "log.txt").read_text()


def test_an_error_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the roof leaks")

    with pytest.raises(RuntimeError, match="the roof leaks"):
        train(tmp_path / "run", poke=[Poke("on_after_backward", lambda _: True, fail)], monkeypatch=monkeypatch)
    assert "failed: the roof leaks" in (tmp_path / "run" / "log.txt").read_text()


KILLED = """
import os, signal, sys
import pytest, torch
sys.path.insert(0, sys.argv[1])
from test_resume import Path, Poke, train
torch.set_num_threads(int(sys.argv[3]))
die = Poke("on_after_backward", lambda trainer: trainer.global_step == 8, lambda: os.kill(os.getpid(), signal.SIGKILL))
train(Path(sys.argv[2]), *sys.argv[4:], poke=[die], monkeypatch=pytest.MonkeyPatch())
"""


def test_an_error_before_the_first_batch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no way in")

    with pytest.raises(RuntimeError, match="no way in"):
        train(tmp_path / "run", poke=[Poke("setup", lambda _: True, fail)], monkeypatch=monkeypatch)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["error"], status["epochs"]) == ("failed", "no way in", 0)


def test_killed(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["--checkpoint.every_steps=2"]
    words = [Path(__file__).parent, tmp_path / "run", torch.get_num_threads(), *keys]
    process = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in step_checkpoints(tmp_path / "run")] == ["step-00000008.ckpt", "step-00000006.ckpt"]
    assert same(train(tmp_path / "run", *keys, monkeypatch=monkeypatch, resume=True), state(whole))


def test_an_error_in_a_step_leaves_the_step_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the device fell off")

    poke = Poke("on_after_backward", lambda trainer: trainer.global_step == 8, fail)
    with pytest.raises(RuntimeError, match="the device fell off"):
        train(tmp_path / "run", poke=[poke], monkeypatch=monkeypatch)
    assert newest_place(tmp_path / "run") == Place(
        tmp_path / "run" / "checkpoints" / "step-00000008.ckpt", step=8, epoch=1, world_size=1
    )
    assert same(train(tmp_path / "run", monkeypatch=monkeypatch, resume=True), state(whole))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    newest, before = step_checkpoints(tmp_path / "run")
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert same(train(tmp_path / "run", monkeypatch=monkeypatch, resume=True), state(whole))
    assert f"{newest.name} cannot be used, trying the one before: {newest} is cut off" in capsys.readouterr().err
    for path in (newest, before):
        path.write_bytes(b"")
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(ValueError, match=r"all 2 checkpoints in .* are damaged: remove that folder to begin again"):
        train(tmp_path / "run", monkeypatch=monkeypatch, resume=True)


def test_resuming_begins_where_nothing_is_and_leaves_alone_what_is_finished(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert newest_place(tmp_path) is None
    stamp = (whole / "results.json").stat().st_mtime_ns
    assert train(whole, monkeypatch=monkeypatch, resume=True).keys() == state(whole).keys()
    assert (whole / "results.json").stat().st_mtime_ns == stamp
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(whole, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "--optimizer.lr=0.5",
            r"was begun with optimizer\.lr 0\.002, now 0\.5 is asked for: give the same",
        ),
        ("--seed=3", "was begun with seed 0, now 3 is asked for"),
        ("--model.drop_path_rate=0.1", r"was begun with model\.drop_path_rate 0\.3"),
    ],
)
def test_another_recipe_is_refused(whole: Path, change: str, sentence: str) -> None:
    with pytest.raises(FileExistsError, match=sentence):
        fit(load_recipe("scenes", [*KEYS, f"--out={whole}", change]), resume=True)


def test_what_the_weights_do_not_depend_on_may_change(whole: Path) -> None:
    free = ["--data.num_workers=3", "--checkpoint.keep=7", "--trainer.max_skipped=null", "--name=other"]
    assert run_to_resume(load_recipe("scenes", [*KEYS, *free, f"--out={whole}"])) == whole


def test_another_number_of_processes_is_refused(whole: Path) -> None:
    place = newest_place(whole)
    assert place is not None
    with pytest.raises(ValueError, match="was trained by 8 processes, now there are 1"):
        go_on(Trainer(accelerator="cpu", devices=1, logger=False), replace(place, world_size=8), whole, print)
