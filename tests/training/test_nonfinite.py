"""Nonfinite steps are skipped without a trace; if there are only such steps, training stops and names the layer."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import Tensor

from dgt import DGAttention
from dgt.training.loop import Training
from dgt.training.nonfinite import all_finite

from .test_resume import same, state, train

FEW = ("--schedule.epochs=1", "--model.drop_path_rate=0", "--optimizer.clip_grad=1")


class Spoil:
    """Modifies the images or gradients of some steps."""

    def __init__(
        self,
        steps: tuple[int, ...],
        images: Callable[[Tensor], None] | None,
        gradient: bool = False,
    ) -> None:
        self.steps, self.images, self.gradient = steps, images, gradient

    def put(self, patch: pytest.MonkeyPatch) -> None:
        whole = Training.backward

        def backward(training: Training, batches: Any) -> Any:
            chosen = training.progress.step in self.steps
            if chosen and self.images is not None:
                self.images(batches[0].images)
            losses = whole(training, batches)
            if chosen and self.gradient:
                next(training.state.network.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            return losses

        patch.setattr(Training, "backward", backward)


class Snapshot:
    """The whole state before a step and after it."""

    def __init__(self, step: int) -> None:
        self.step, self.before, self.after = step, {}, {}

    def put(self, patch: pytest.MonkeyPatch) -> None:
        whole = Training.train_step

        def train_step(training: Training, batches: Any) -> None:
            if training.progress.step == self.step:
                self.before = look(training)
            if training.progress.step == self.step + 1:
                self.after = look(training)
            whole(training, batches)

        patch.setattr(Training, "train_step", train_step)


def look(training: Training) -> dict[str, Any]:
    """Copies of weights, buffers, the average, the optimizer's moments and the centroids' statistics."""
    kept: dict[str, Any] = training.state.state_dict()
    for counted in ("progress", "loss_sums"):
        del kept[counted]
    for group in kept["optimizer"]["param_groups"]:
        del group["lr"]  # the schedule goes by steps
    for module in training.state.network.modules():
        if isinstance(module, DGAttention):
            kept[str(id(module))] = (module.observed.sums, module.observed.counts)
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(kept)
    return {
        torch.utils._pytree.keystr(path): leaf.clone() if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves
    }


def numbers(out: Path) -> list[Tensor]:
    """All floating-point numbers in a run's final state."""
    return [
        value
        for value in state(out).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


SPOILT: dict[str, tuple[int, Callable[[Tensor], Any] | None, bool]] = {
    "NaN in the first batch": (0, lambda images: images.fill_(torch.nan), False),
    "NaN in one pixel": (2, lambda images: images[0, 0, 0].fill_(torch.nan), False),
    "a gradient": (2, None, True),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_step_that_is_not_finite_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    step, images, gradient = SPOILT[case]
    snapshot, spoil = Snapshot(step), Spoil((step,), images, gradient)
    train(tmp_path / "run", *FEW, poke=[snapshot, spoil], monkeypatch=monkeypatch)
    assert snapshot.before
    assert same(snapshot.before, snapshot.after)
    assert all_finite(numbers(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "results.json").read_text())["skipped_steps"] == 1
    kind = "gradient, or a running statistic," if gradient else "loss"
    assert (
        f"step {step + 1} (epoch 1, batch {step + 1}) was skipped: its {kind} is not finite"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("steps", "most"), [((1, 2, 3), 2), ((0, 1, 2, 3, 4), 10)], ids=["three", "a whole epoch"]
)
def test_too_many_in_a_row_stop_the_training_and_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], most: int
) -> None:
    spoil, last = Spoil(steps, lambda images: images.mul_(1e30)), steps[-1] + 1
    told = rf"{len(steps)} steps in a row .* up to step {last} \(epoch 1, batch {last}\); .* First non-finite: the "
    with pytest.raises(FloatingPointError, match=told + "(output of|buffer) net"):
        train(
            tmp_path / "run",
            *FEW,
            f"--trainer.max_skipped={most}",
            poke=[spoil],
            monkeypatch=monkeypatch,
        )


def test_the_guard_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil = Spoil((1,), None, gradient=True)
    keys = ("--trainer.max_skipped=null", "--optimizer.clip_grad=null")
    with pytest.raises(FloatingPointError, match="diverged: NaN or infinity in the weights"):
        train(tmp_path / "run", *FEW, *keys, poke=[spoil], monkeypatch=monkeypatch)


def scale_losses(patch: pytest.MonkeyPatch, scale: float) -> None:
    """Train in float16 with this initial loss scale, and 2^-16 of it after a gradient overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-16)
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
    )
    patch.setattr(importlib.import_module("dgt.training.fit"), "build_fabric", lambda *_: fabric)


def test_a_scale_of_float16_that_is_too_large_falls_and_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_losses(monkeypatch, 2.0**40)
    train(tmp_path / "run", *FEW, "--trainer.max_skipped=0", monkeypatch=monkeypatch)
    assert 1 <= json.loads((tmp_path / "run" / "results.json").read_text())["skipped_steps"] <= 3
    assert all_finite(numbers(tmp_path / "run"))


def test_the_scale_of_float16_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[list[Tensor]] = []
    for scale in (1.0, 256.0):
        scale_losses(monkeypatch, scale)
        keys = ("--schedule.steps=1", "--schedule.warmup_steps=0", "--optimizer.clip_grad=null")
        found = train(tmp_path / str(scale), *keys, monkeypatch=monkeypatch)
        moments.append([value for name, value in found.items() if name.endswith("['exp_avg']")])
    assert all(torch.allclose(*pair, rtol=0.05, atol=1e-4) for pair in zip(*moments, strict=True))
    assert max(float(value.abs().max()) for value in moments[0]) > 1e-2


def test_finite_at_any_size() -> None:
    assert all_finite([torch.full((4,), 3e38), torch.zeros(0), torch.ones(2, dtype=torch.float16)])
    assert all_finite([])
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not all_finite([torch.zeros(3), torch.tensor([1.0, bad])])
