"""Two processes under DistributedDataParallel get the same centroids as one process on the joint batch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

SCRIPT = Path(__file__).with_name("data_parallel_run.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"


# Ways to train, explained in the script.
JOINED = ("one batch", "no_sync", "two batches", "ZeRO", "fully_shard", "flat")
OTHERS = ("local", "uneven", "own models", "first alone")
STEPS = 4

State = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def states(tmp_path_factory, load_script) -> list[State]:
    """The final state of this process alone, then of each of two ranks."""
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    folder = tmp_path_factory.mktemp("data_parallel")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), "2", str(folder), *JOINED, *OTHERS]
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        script = load_script(SCRIPT)
        alone = {way: script.train(0, 1, way) for way in (*JOINED, *OTHERS)}
        _, errors = process.communicate(timeout=800)
        assert process.returncode == 0, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return [alone, *(torch.load(folder / f"{rank}.pt") for rank in range(2))]


@pytest.mark.parametrize("way", JOINED)
def test_two_joined_processes_equal_one(way, states) -> None:
    alone, first, second = (state[way] for state in states)
    assert {"first.centroids", "second.centroids"} <= first.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"ranks differ in {name}"
        torch.testing.assert_close(
            value.float(), alone[name].float(), rtol=0, atol=1e-5, msg=f"{name} differs"
        )
    assert alone["first.num_updates"] == first["first.num_updates"] == STEPS
    assert alone["first.centroids"].diff(dim=1).abs().max() > 0.1


def test_models_without_ddp_stay_apart(states, load_script) -> None:
    script = load_script(SCRIPT)
    for rank, of_rank in enumerate(states[1:]):
        alone = script.train(rank, 1, "own models")
        for name, value in of_rank["own models"].items():
            assert torch.equal(value, alone[name]), f"{name} of rank {rank} differs"


def test_ranks_need_not_make_the_same_steps(states) -> None:
    _, first, second = states
    assert first["uneven"]["first.num_updates"] == STEPS
    assert first["first alone"]["first.num_updates"] == STEPS
    assert second["first alone"]["first.num_updates"] == 0


def test_without_joining_each_process_counts_its_own_batches(states) -> None:
    """As with BatchNorm, the last step's are not copied to the others."""
    _, first, second = (state["local"] for state in states)
    assert first["first.num_updates"] == second["first.num_updates"] == STEPS
    assert not torch.equal(first["first.centroids"], second["first.centroids"])
