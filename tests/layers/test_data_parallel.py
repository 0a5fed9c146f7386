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


WAYS = ("no", "no_sync", "plain")  # ways to accumulate, explained in the script

State = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def states(tmp_path_factory, load_script) -> list[State]:
    """The final state of this process alone, then of each of two ranks."""
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    folder = tmp_path_factory.mktemp("data_parallel")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), "2", str(folder), *WAYS]
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        script = load_script(SCRIPT)
        alone = {way: script.train(0, 1, way).state_dict() for way in WAYS}
        _, errors = process.communicate(timeout=800)
        assert process.returncode == 0, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return [alone, *(torch.load(folder / f"{rank}.pt") for rank in range(2))]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_equal_one(way, states) -> None:
    alone, first, second = (state[way] for state in states)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), f"ranks differ in {name}"
        torch.testing.assert_close(
            first[name].float(), expected.float(), rtol=0, atol=1e-5, msg=f"{name} differs"
        )
    assert alone["first.num_updates"] == 5
    assert alone["first.centroids"].diff(dim=1).abs().max() > 0.1
