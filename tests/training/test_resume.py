"""A training run that was stopped and resumed is bit-identical to one that never stopped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric

from dgt.data.image_io import BrokenImage, BrokenImagesError
from dgt.layers import DGAttention
from dgt.runs import load_recipe, load_run
from dgt.runs.checkpoints import latest_checkpoint, read_checkpoint, step_checkpoints
from dgt.runs.folder import run_folder
from dgt.runs.status import run_status
from dgt.tasks.classify import ClassificationMetrics
from dgt.training import fit
from dgt.training.log import Report
from dgt.training.loop import Preempted, Training
from dgt.training.state import TrainingState

from .conftest import read_metrics

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


When = Callable[[Training], bool]
HOOKS: dict[str, tuple[type, str, bool]] = {  # class, method, whether after it
    "before a step": (Training, "train_step", False),
    "after backward": (Training, "backward", True),
    "after a step": (Training, "train_step", True),
    "in a validation": (ClassificationMetrics, "update", True),
    "at an epoch's end": (Report, "epoch", True),
    "before the first batch": (Training, "__init__", False),
}


class Poke:
    """Calls a function at one point in the loop, the first time that a condition holds there."""

    def __init__(self, hook: str, when: When, act: Callable[[], None]) -> None:
        self.hook, self.when, self.act = hook, when, act
        self.done = False

    def put(self, patch: pytest.MonkeyPatch) -> None:
        owner, name, after = HOOKS[self.hook]
        whole = getattr(owner, name)

        def poked(one: Any, *arguments: Any, **keys: Any) -> Any:
            found = whole(one, *arguments, **keys) if after else None
            if not self.done and self.when(one):
                self.done = True
                self.act()
            return found if after else whole(one, *arguments, **keys)

        patch.setattr(owner, name, poked)


def train(
    out: Path,
    *keys: str,
    poke: Sequence[Any] = (),
    monkeypatch: pytest.MonkeyPatch,
    resume: bool = False,
) -> dict[str, Any]:
    """Train or resume, with interruptions at some points; returns the contents of the last checkpoint."""
    with monkeypatch.context() as patch:
        for each in poke:
            each.put(patch)
        fit(load_recipe("scenes", [*KEYS, *keys, f"--out={out}"]), resume=resume)
    return state(out)


def state(out: Path) -> dict[str, Any]:
    """Weights, averages, optimizer and metrics at the end, by name."""
    stored = read_checkpoint(step_checkpoints(out)[0])
    stored["progress"].pop("seconds")
    kept = {key: stored[key] for key in ("model", "optimizer", "progress", "loss_sums")}
    if "model_ema" in stored:
        kept["model_ema"] = stored["model_ema"]
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(kept)
    return {torch.utils._pytree.keystr(path): leaf for path, leaf in leaves}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether all tensors are bit-identical and everything else is equal."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        for key, value in first.items()
    )


def terminate() -> None:
    """What a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(load_recipe("scenes", [*KEYS, f"--out={out}"]))
    return out


STOPS: dict[str, tuple[str, When, tuple[str, ...]]] = {
    "in the middle of an epoch": ("after a step", lambda training: training.progress.step == 7, ()),
    "with workers": (
        "before a step",
        lambda training: training.progress.step == 2,
        ("--data.num_workers=2",),
    ),
    "after the last step": (
        "after a step",
        lambda training: training.progress.step == training.steps,
        (),
    ),
    "in a validation": ("in a validation", lambda _: True, ()),
    "at the end of an epoch": ("at an epoch's end", lambda _: True, ()),
}


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_by_a_signal(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
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
    assert read_metrics(tmp_path / "run") == read_metrics(whole)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "stopped by SIGTERM after step" in log
    assert "resumed after step" in log.partition("stopped by SIGTERM")[2]
    assert "lr nan" not in log


OPTIMIZERS = {
    "muon, with layer decay": ("--optimizer.name=muon", "--optimizer.layer_decay=0.7"),
    "sgd, with parts of their own": (
        "--optimizer.name=sgd",
        "--optimizer.lr=1",
        "--optimizer.lr_scale={stem: 0.5, head: 3}",
        "--optimizer.args.nesterov=false",
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_resumes_and_frozen_parts_hold_still(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    frozen = ("stem", "stages.1")
    keys = (*OPTIMIZERS[optimizer], f"--model.init_from={whole}", "--model.freeze=[stem, stages.1]")
    ended = train(tmp_path / "whole", *keys, monkeypatch=monkeypatch)
    stop = Poke("after a step", lambda training: training.progress.step == 7, terminate)
    with pytest.raises(Preempted):
        train(tmp_path / "run", *keys, poke=[stop], monkeypatch=monkeypatch)
    assert same(train(tmp_path / "run", *keys, monkeypatch=monkeypatch, resume=True), ended)
    first = load_run(whole).network.state_dict()
    last = read_checkpoint(step_checkpoints(tmp_path / "run")[0])
    exported = load_run(tmp_path / "run").network.state_dict()
    still = {name for name in first if name.startswith(tuple(f"{part}." for part in frozen))}
    assert any(name.endswith("centroids") for name in still)
    assert any(name.endswith("running_mean") for name in still)
    for name in first:
        for weights in (last["model"], exported):
            moved = not torch.equal(first[name], weights[name])
            assert moved == (name not in still), name


def test_annealed_keys_are_a_function_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of annealing, the weights equal those of an uninterrupted run."""
    keys = (
        "--model.top_k_schedule=0.7",
        "--model.args.top_k=2",
        "--model.args.stem_stride=1",
        "--schedule.epochs=1",
    )
    keys += (
        "--model.top_k_start=100",
        "--data.batch_size=2",
        "--data.train_size=10",
        "--data.val_size=2",
    )
    ctrl_c = partial(signal.raise_signal, signal.SIGINT)
    stop = Poke("after a step", lambda training: training.progress.step == 2, ctrl_c)
    with pytest.raises(Preempted) as raised:
        train(tmp_path / "run", *keys, poke=[stop], monkeypatch=monkeypatch)
    assert raised.value.code == 130
    resumed = train(tmp_path / "run", *keys, monkeypatch=monkeypatch, resume=True)
    seen: list[tuple[bool, int]] = []
    attend = DGAttention.forward

    def watched(
        layer: DGAttention, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[1] == 16:  # the second stage: 256 tokens
            seen.append((layer.training, layer.top_k))
        return attend(layer, x, mask)

    monkeypatch.setattr(DGAttention, "forward", watched)
    assert same(resumed, train(tmp_path / "whole", *keys, monkeypatch=monkeypatch))
    expected = [max(2, round(100 * (1 - step / 5 / 0.7))) for step in range(5)]
    assert [top_k for training, top_k in seen if training] == expected
    assert {top_k for training, top_k in seen if not training} == {2}


def test_a_state_that_cannot_be_saved_is_reported_by_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dgt.training.state.atomic_write", full)
    with pytest.raises(Preempted) as raised:
        train(
            tmp_path / "run",
            poke=[Poke("after a step", lambda _: True, terminate)],
            monkeypatch=monkeypatch,
        )
    assert raised.value.code == 1
    assert "its state could NOT be saved" in capsys.readouterr().out


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # which the command turns into status 130
        train(
            tmp_path / "run",
            poke=[Poke("after backward", lambda _: True, twice)],
            monkeypatch=monkeypatch,
        )
    assert "stopped: KeyboardInterrupt" in (tmp_path / "run" / "log.txt").read_text()


def test_an_error_before_the_first_batch_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no way in")

    with pytest.raises(RuntimeError, match="no way in"):
        train(
            tmp_path / "run",
            poke=[Poke("before the first batch", lambda _: True, fail)],
            monkeypatch=monkeypatch,
        )
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["error"], status["epochs"]) == ("failed", "no way in", 0)


KILLED = """
import os, signal, sys
import pytest, torch
sys.path.insert(0, sys.argv[1])
from training.test_resume import Path, Poke, train
torch.set_num_threads(int(sys.argv[3]))
die = Poke("after backward", lambda training: training.progress.step == 8, lambda: os.kill(os.getpid(), signal.SIGKILL))
train(Path(sys.argv[2]), *sys.argv[4:], poke=[die], monkeypatch=pytest.MonkeyPatch())
"""


def test_killed(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["--checkpoint.every_steps=2"]
    words = [Path(__file__).parents[1], tmp_path / "run", torch.get_num_threads(), *keys]
    process = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in step_checkpoints(tmp_path / "run")] == [
        "step-00000008.ckpt",
        "step-00000006.ckpt",
    ]
    half = tmp_path / "run" / "checkpoints" / ".step-00000010.ckpt.12.partial"
    half.touch()
    seen: list[str] = []
    look = Poke(
        "in a validation",
        lambda _: True,
        lambda: seen.append(run_status(tmp_path / "run")["state"]),
    )
    resumed = train(tmp_path / "run", *keys, poke=[look], monkeypatch=monkeypatch, resume=True)
    assert same(resumed, state(whole))
    assert (seen, half.exists()) == (["validating"], False)


def test_an_error_in_a_step_leaves_the_step_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the device fell off")

    poke = Poke("after backward", lambda training: training.progress.step == 8, fail)
    with pytest.raises(RuntimeError, match="the device fell off"):
        train(tmp_path / "run", poke=[poke], monkeypatch=monkeypatch)
    path, stored = latest_checkpoint(tmp_path / "run") or (Path(), {})
    assert (path.name, stored["world_size"]) == ("step-00000008.ckpt", 1)
    assert (stored["progress"]["step"], stored["progress"]["epoch"]) == (8, 1)
    assert stored["loss_sums"][1] == 3 * 4  # images of the three full steps in this epoch
    assert "failed: the device fell off" in (tmp_path / "run" / "log.txt").read_text()
    assert same(train(tmp_path / "run", monkeypatch=monkeypatch, resume=True), state(whole))


def test_too_many_broken_images_leave_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Training.train_step

    def train_step(training: Training, batches: Any) -> None:
        if training.progress.step == 3:
            training.data.broken_images["train"].record([BrokenImage("a.png", "why")])
        whole(training, batches)

    monkeypatch.setattr(Training, "train_step", train_step)
    with pytest.raises(BrokenImagesError, match="1 of the 20 images of split 'train' cannot"):
        train(tmp_path / "run", monkeypatch=monkeypatch)
    assert [path.name for path in step_checkpoints(tmp_path / "run")] == ["step-00000003.ckpt"]


def test_the_last_step_of_an_epoch_takes_the_batches_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    usual = Training.backward

    def backward(self: Training, batches: Any) -> Any:
        taken.append(len(batches))
        return usual(self, batches)

    monkeypatch.setattr(Training, "backward", backward)
    keys = ("--data.train_size=12", "--trainer.accumulate=2")
    train(tmp_path / "run", *keys, monkeypatch=monkeypatch)
    assert taken == [2, 1] * 2


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    newest, before = step_checkpoints(tmp_path / "run")
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert same(train(tmp_path / "run", monkeypatch=monkeypatch, resume=True), state(whole))
    assert (
        f"{newest.name} cannot be used, trying the one before: {newest} is truncated"
        in capsys.readouterr().err
    )
    for path in (newest, before):
        path.write_bytes(b"")
    (tmp_path / "run" / "results.json").unlink()
    assert same(train(tmp_path / "run", monkeypatch=monkeypatch, resume=True), state(whole))
    assert "from best.ckpt" in capsys.readouterr().out
    for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt"):
        path.write_bytes(b"")
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(ValueError, match=r"all 3 checkpoints .* damaged .*: remove that folder"):
        train(tmp_path / "run", monkeypatch=monkeypatch, resume=True)


def test_resuming_begins_where_nothing_is_and_leaves_alone_what_is_finished(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert latest_checkpoint(tmp_path) is None
    said = "there is no checkpoint to resume from"
    few = ("--schedule.epochs=1", "--data.train_size=4", "--data.val_size=2")
    train(tmp_path / "new", *few, monkeypatch=monkeypatch, resume=True)
    assert said in (tmp_path / "new" / "log.txt").read_text()
    assert said not in (whole / "log.txt").read_text()
    stamp = (whole / "results.json").stat().st_mtime_ns
    assert train(whole, monkeypatch=monkeypatch, resume=True).keys() == state(whole).keys()
    assert (whole / "results.json").stat().st_mtime_ns == stamp
    with pytest.raises(FileExistsError, match="already contains a run"):
        train(whole, monkeypatch=monkeypatch)


def test_a_second_training_in_a_folder_is_refused_and_changes_nothing(
    whole: Path, tmp_path: Path, at_work: Callable[[Path], int]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("[!.]*")}
    at_work(tmp_path / "run")
    with pytest.raises(FileExistsError, match=f"another process is using {tmp_path / 'run'}"):
        fit(load_recipe("scenes", [*KEYS, f"--out={tmp_path / 'run'}"]), resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("[!.]*")}


def test_killed_before_the_recipe_was_written_the_folder_serves_again(tmp_path: Path) -> None:
    for name in (".lock", ".recipe.yaml.12.partial"):
        (tmp_path / name).touch()
    assert run_folder(load_recipe("scenes", [f"--out={tmp_path}"])) == tmp_path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "--optimizer.lr=0.5",
            r"was started with optimizer\.lr 0\.002, but now optimizer\.lr is 0\.5: choose another folder",
        ),
        ("--seed=3", "was started with seed 0, but now seed is 3"),
    ],
)
def test_another_recipe_is_refused(whole: Path, change: str, sentence: str) -> None:
    with pytest.raises(FileExistsError, match=sentence):
        fit(load_recipe("scenes", [*KEYS, f"--out={whole}", change]), resume=True)


def test_what_the_weights_do_not_depend_on_may_change(whole: Path) -> None:
    free = [
        "--data.num_workers=3",
        "--checkpoint.keep=7",
        "--trainer.max_skipped=null",
        "--name=other",
    ]
    assert run_folder(load_recipe("scenes", [*KEYS, *free, f"--out={whole}"]), resume=True) == whole


def test_another_number_of_processes_is_refused(whole: Path) -> None:
    path, stored = latest_checkpoint(whole) or (Path(), {})
    fabric = Fabric(accelerator="cpu", devices=1)
    state = TrainingState(fabric, None, torch.nn.Identity(), None, None, None, 4)
    with pytest.raises(ValueError, match="was trained with 8 processes, now there are 1"):
        state.load(path, {**stored, "world_size": 8})


def test_weights_shared_out_stay_so(whole: Path) -> None:
    path, stored = latest_checkpoint(whole) or (Path(), {})
    groups = [{"params": ["head.weight"]}]  # as stored under `fsdp2`
    state = TrainingState(
        Fabric(accelerator="cpu", devices=1), None, torch.nn.Identity(), None, None, None, 4
    )
    with pytest.raises(ValueError, match=r"step-\d+\.ckpt does not .* strategy: resume fsdp2"):
        state.load(path, {**stored, "optimizer": {"state": {}, "param_groups": groups}})
