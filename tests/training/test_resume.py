"""A training that was stopped and goes on is, to the last bit, the one that never stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from dgt.training import fit, load_recipe
from dgt.training.signals import Preempted
from dgt.training.trainer import add_callbacks, build_trainer

KEYS = (
    "--model.name=dgt_nano",
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
        def poke(trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if not self.done and trainer.state.fn == "fit" and when(trainer):
                self.done = True
                act()

        self.done = False
        setattr(self, hook, poke)


def train(
    out: Path, *keys: str, poke: Poke | None = None, monkeypatch: pytest.MonkeyPatch, resume: bool = False
) -> dict[str, torch.Tensor]:
    """Train, or go on, with a callback more; returns what the last checkpoint holds."""

    def build(*arguments: Any) -> Any:
        trainer, batch = build_trainer(*arguments)
        if poke is not None:
            add_callbacks(trainer, [poke])
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


STOPS = {
    "after the first step": ("on_train_batch_end", lambda trainer: trainer.global_step == 1),
    "in the middle of an epoch": ("on_train_batch_start", lambda trainer: trainer.global_step == 7),
    "at the last batch of an epoch": ("on_train_batch_start", lambda trainer: trainer.global_step == 4),
    "in a validation": ("on_validation_batch_end", lambda trainer: True),
    "at the end of an epoch": ("on_train_epoch_end", lambda trainer: True),
    "at the very end": ("on_train_epoch_end", lambda trainer: trainer.current_epoch == 1),
}


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_by_a_signal(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    hook, when = STOPS[stop]
    with pytest.raises(Preempted) as raised:
        train(tmp_path / "run", poke=Poke(hook, when, terminate), monkeypatch=monkeypatch)
    assert raised.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = train(tmp_path / "run", monkeypatch=monkeypatch, resume=True)
    assert same(resumed, state(whole))
    metrics = [json.loads((out / "results.json").read_text())["metrics"] for out in (whole, tmp_path / "run")]
    assert metrics[0] == metrics[1]
