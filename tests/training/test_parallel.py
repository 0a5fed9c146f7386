"""Two processes that train together: same as one, sharded or not; broken images of both; a lost process is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import distributed

from dgt.runs.checkpoints import step_checkpoints
from dgt.runs.model import load_run
from dgt.runs.recipe import TrainerSettings, load_recipe, parse_recipe
from dgt.training.fabric import build_fabric
from dgt.training.fit import build_state, explaining, fit

from .conftest import read_metrics
from .step_gradient import OneWeightPerClass, label_batches, step_gradient

SCRIPT = Path(__file__).with_name("parallel_run.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"
STEPS = 8
STORES: list[distributed.TCPStore] = []  # kept alive as long as the processes that use them
SHORT = {"steps": 5}  # an epoch has four
SMALL = {"stem_width": 8, "dims": [16, 32], "num_heads": [1, 2], "depths": [1, 1], "head_width": 64}
RECIPE = {
    "model": {"name": "dgt_nano", "args": {**SMALL, "num_groups": 8, "top_k": 16}},
    "data": {
        "dataset": "scenes",
        "image_size": 32,
        "batch_size": 8,
        "num_workers": 0,
        "train_size": 64,
        "val_size": 16,
        "augmentation": {"rand_augment": None, "mixup": 0.0, "cutmix": 0.0, "erasing": 0.0},
    },
    "optimizer": {"lr": 1.0e-3, "lr_batch": 16},
    "schedule": {"steps": STEPS, "warmup_steps": 2},
    "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp"},
}
pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this build of torch has no torch.distributed"
)


def write_recipe(folder: Path, name: str, **changes: dict[str, object]) -> None:
    """RECIPE with changed values in some of its sections."""
    values = {
        section: {**RECIPE.get(section, {}), **changes.get(section, {})}
        for section in {**RECIPE, **changes}
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


class Processes:
    """Pairs of processes that train together on request, forked by one process that has imported everything."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # a crashing process prints where
        }
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(SCRIPT)]
        self.parent = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def start(self, folder: Path, names: list[str], second_dies: bool = False) -> None:
        """Train recipes; the processes use a store in this process, as under torchrun, on a port chosen by the system.

        A process that should die kills itself in its fourth step.
        """
        STORES.append(distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        torchrun = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": STORES[-1].host,
            "MASTER_PORT": str(STORES[-1].port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        each = [{**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        each[1] |= {"DIES_AFTER": "3"} if second_dies else {}
        self.parent.stdin.write(
            json.dumps({"folder": str(folder), "names": names, "environments": each}) + "\n"
        )
        self.parent.stdin.flush()

    def wait(self) -> list[int]:
        """The exit statuses of the two most recently started processes."""
        return json.loads(self.parent.stdout.readline() or "null")

    def kill(self) -> None:
        """Terminate all of them."""
        os.killpg(self.parent.pid, signal.SIGKILL)
        self.parent.communicate()


def said(folder: Path) -> list[str]:
    """The output of each of two processes."""
    return [(folder / f"said-{rank}.txt").read_text() for rank in range(2)]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The model at the end of a run."""
    return load_file(folder / name / "model" / "model.safetensors")


def epoch_losses(folder: Path, name: str) -> list[float]:
    """The mean loss of every epoch of a run, over both processes' images."""
    return [
        row["train/loss_epoch"] for row in read_metrics(folder / name) if "train/loss_epoch" in row
    ]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Two that train together."""
    started = Processes()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Path:
    """One process in float64 ("alone"), two in float64 ("both"); two in float32 under DDP and FSDP2."""
    folder = tmp_path_factory.mktemp("parallel")
    exact = {"precision": "64-true"}
    one = {"devices": 1, "strategy": "auto", **exact}
    write_recipe(folder, "both", trainer=exact)
    write_recipe(folder, "ddp", schedule=SHORT)
    # one process has a batch of validation images more than the other
    uneven = {"val_size": 17}
    write_recipe(folder, "fsdp2", data=uneven, schedule=SHORT, trainer={"strategy": "fsdp2"})
    alone = tmp_path_factory.mktemp("alone")
    write_recipe(alone, "alone", data={"batch_size": 16}, trainer=one)
    write_recipe(folder, "fsdp2-stopped", schedule=SHORT, trainer={"strategy": "fsdp2"})
    processes.start(folder, ["both", "ddp", "fsdp2", "fsdp2-stopped"])
    fit(load_recipe(alone / "alone.yaml", [f"--out={alone / 'alone'}"]))
    assert processes.wait() == [0, 0], said(folder)
    (alone / "alone").rename(folder / "alone")
    return folder


class TestTwoProcesses:
    def test_are_one_with_their_batches_joined(self, runs: Path) -> None:
        alone, both = weights(runs, "alone"), weights(runs, "both")
        moved = 0.0
        for name, expected in alone.items():
            torch.testing.assert_close(
                both[name], expected, rtol=0, atol=1e-5, msg=f"{name} differs"
            )
            moved = max(moved, float(expected.double().abs().max()))
        assert moved > 0.1
        assert int(alone["stages.0.blocks.0.attn.num_updates"]) == STEPS

    def test_shared_out_weights_train_as_whole_ones(self, runs: Path) -> None:
        whole, shared = weights(runs, "ddp"), weights(runs, "fsdp2")
        assert whole.keys() == shared.keys()
        for name, expected in whole.items():
            torch.testing.assert_close(
                shared[name], expected, rtol=0, atol=1e-4, msg=f"{name} differs"
            )

    def test_shared_out_weights_resume_to_the_bit(self, runs: Path) -> None:
        assert "stopped by SIGTERM after step 3" in (runs / "fsdp2-stopped" / "log.txt").read_text()
        whole, resumed = weights(runs, "fsdp2"), weights(runs, "fsdp2-stopped")
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())

    def test_a_sharded_checkpoint_is_whole_weights_in_one_file(self, runs: Path) -> None:
        newest, whole = step_checkpoints(runs / "fsdp2")[0], weights(runs, "fsdp2")
        stored = load_run(newest).network.state_dict()
        assert all(torch.equal(value, stored[name]) for name, value in whole.items())

    def test_know_the_broken_images_of_each_other(self, runs: Path) -> None:
        assert [(runs / f"broken-{rank}.txt").read_text() for rank in range(2)] == [
            "met by 0, met by 1"
        ] * 2

    def test_measure_the_running_statistics_of_the_first(self, runs: Path) -> None:
        assert [(runs / f"measured-{rank}.txt").read_text() for rank in range(2)] == ["2.0"] * 2

    def test_count_every_labeled_pixel_alike(self, runs: Path) -> None:
        alone = step_gradient("camvid_nano", OneWeightPerClass(), label_batches((3,)))
        for rank in range(2):
            torch.testing.assert_close(torch.load(runs / f"gradient-{rank}.pt"), alone)


def test_a_lost_process_ends_the_training_and_it_goes_on(runs: Path, processes: Processes) -> None:
    write_recipe(runs, "killed", schedule=SHORT, checkpoint={"every_steps": 2})
    processes.start(runs, ["killed"], second_dies=True)
    first, second = processes.wait()
    assert first > 0
    assert "process 0 of 2 lost another process" in said(runs)[0]
    assert second == -signal.SIGKILL
    assert (runs / "killed" / "checkpoints" / "step-00000002.ckpt").exists()
    processes.start(runs, ["killed"])
    assert processes.wait() == [0, 0], said(runs)
    expected = weights(runs, "ddp")
    assert all(
        torch.equal(value, expected[name]) for name, value in weights(runs, "killed").items()
    )
    assert epoch_losses(runs, "killed") == pytest.approx(epoch_losses(runs, "ddp"), rel=1e-5)


def test_batchnorm_over_all_processes_needs_gpus() -> None:
    recipe = parse_recipe(
        {"data": {"dataset": "scenes"}, "trainer": {"accelerator": "cpu", "sync_batchnorm": True}}
    )
    fabric: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"trainer\.sync_batchnorm must be false without GPUs"):
        build_state(recipe, fabric, SimpleNamespace(num_classes=8, batch_size=4), fresh=True)


def test_shared_out_weights_have_no_average() -> None:
    with pytest.raises(ValueError, match=r"ema.decay must be null with trainer.strategy fsdp2"):
        parse_recipe(
            {"data": {"dataset": "scenes"}, "ema": {"decay": 0.9}, "trainer": {"strategy": "fsdp2"}}
        )


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match=r"^gloo is down$"), explaining(Path(), None):
        raise RuntimeError("gloo is down")


@pytest.mark.parametrize("settings", [{"devices": "many"}, {"accelerator": "gpu"}])
def test_devices_that_are_not_there_are_reported(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="recipe section 'trainer' does not fit this machine"):
        build_fabric(TrainerSettings(**{"accelerator": "cpu", **settings}))
