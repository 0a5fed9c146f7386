"""Trains recipes one after another in processes requested by `test_parallel.py`, each forked after the imports.

A line of JSON on standard input requests processes that train together: `folder` with the recipes,
    their `names`, and their `environments`, as set by torchrun. Each run is written to the
    subfolder NAME, and the output of process RANK to `said-RANK.txt`. When all have ended, a line
    on standard output gives their exit statuses, negative for signals. At the end they merge their
    reports of broken images, measure a network whose buffers differ, and take the gradient of a
    step of images of which one has more labeled pixels.
BatchNorm is synchronized over all processes, like torch's SyncBatchNorm, which only supports GPUs.
If the environment has DIES_AFTER, the process kills itself at the start of the step after that one.
A run named NAME-stopped is stopped after its third step, as by SIGTERM, and resumed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from step_gradient import OneWeightPerClass, label_batches, step_gradient
from torch import Tensor, nn

from dgt.data.image_io import BrokenImage, BrokenImages
from dgt.runs import load_recipe
from dgt.training import fit
from dgt.training.evaluation import measure
from dgt.training.loop import Objective, Preempted, Training, join_broken_images
from dgt.utils.distributed import rank, world_size


class SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes; so is its gradient."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return SumOverProcesses.forward(_, gradient)


class SummedBatchNorm(nn.BatchNorm2d):
    """BatchNorm with training statistics over the batches of all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (B, C, H, W) by the mean and variance of each channel."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        count = input.new_tensor([input.numel() / input.shape[1]])
        sums = SumOverProcesses.apply(torch.cat([input.sum((0, 2, 3)), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - mean.view(1, -1, 1, 1)
        variance = SumOverProcesses.apply(centred.square().sum((0, 2, 3))) / total
        kept: Any = self
        with torch.no_grad():
            kept.num_batches_tracked += 1
            kept.running_mean.lerp_(mean.to(kept.running_mean), kept.momentum)
            kept.running_var.lerp_(
                (variance * total / (total - 1)).to(kept.running_var), kept.momentum
            )
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class SummedObjective(Objective):
    """The loop's objective with every BatchNorm converted in place."""

    def __init__(self, network: nn.Module, losses: Any) -> None:
        for module in network.modules():
            if type(module).__name__.startswith("BatchNorm"):
                assert type(module) is nn.BatchNorm2d
                module.__class__ = SummedBatchNorm
        super().__init__(network, losses)


class Batches(list[Any]):
    """A loader without batches."""


class MortalTraining(Training):
    """A training loop whose process kills itself before a step."""

    def train_step(self, *arguments: Any, **keys: Any) -> Any:
        """The next step, unless the process dies first."""
        if self.progress.step == int(os.environ["DIES_AFTER"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(*arguments, **keys)


class StoppedTraining(Training):
    """A training loop that receives a signal in its third step, in every process."""

    def train_step(self, *arguments: Any, **keys: Any) -> Any:
        """The next step."""
        self.stops += [signal.SIGTERM] * (self.progress.step == 2)
        return super().train_step(*arguments, **keys)


def train(folder: Path, names: list[str]) -> None:
    """Train all named recipes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fitting: Any = importlib.import_module("dgt.training.fit")
    fitting.Objective = SummedObjective
    for name in names:
        recipe = load_recipe(folder / f"{name}.yaml", [f"--out={folder / name}"])
        if name.endswith("-stopped"):
            fitting.Training = StoppedTraining
            with contextlib.suppress(Preempted):
                fit(recipe)
        fitting.Training = MortalTraining if "DIES_AFTER" in os.environ else Training
        fit(recipe, resume=True)
    number = rank()
    report = BrokenImages("train", 10, 1.0)
    report.record([BrokenImage(f"met by {number}", "why")])
    join_broken_images({"train": report})
    (folder / f"broken-{number}.txt").write_text(", ".join(sorted(report.broken)))
    norm = nn.BatchNorm2d(1, momentum=None)
    norm(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1) + number)
    measure(Fabric(accelerator="cpu", devices=1), None, norm, Batches())
    (folder / f"measured-{number}.txt").write_text(f"{norm.running_mean.item()}")
    two = ("--trainer.devices=2", "--trainer.strategy=ddp")
    batch = label_batches((1, 2))[number]
    gradient = step_gradient("camvid_nano", OneWeightPerClass(), [batch], *two)
    torch.save(gradient, folder / f"gradient-{number}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Process the requests on standard input."""
    # Or each process would import it when training.
    importlib.import_module("torch.utils.tensorboard")
    for line in sys.stdin:
        asked = json.loads(line)
        folder, processes = Path(asked["folder"]), list[int]()
        for environment in asked["environments"]:
            processes.append(os.fork())
            if processes[-1] == 0:
                os.environ |= environment
                with (folder / f"said-{environment['RANK']}.txt").open("wb") as said:
                    for stream in (sys.stdout, sys.stderr):
                        os.dup2(said.fileno(), stream.fileno())
                return train(folder, asked["names"])
        print(
            json.dumps([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes]),
            flush=True,
        )


if __name__ == "__main__":
    main()
