"""The state of a training: what a checkpoint holds, how it is written and read, and which one a training resumes from.

A checkpoint is a zip of tensors and plain values as `torch.save` writes it, opened without running code and refused
where a part does not have its checksum, which `torch.load` alone does not look at. A run has the newest
`checkpoint.keep` of them, `step-00001234.ckpt` after so many optimizer steps, and the best validation's, `best.ckpt`.
"""

from __future__ import annotations

import io
import pickle
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from lightning.fabric import Fabric
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from dgt.training.recipe import CheckpointSettings
from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import LOGGER, UserError

FORMAT = 2  # of checkpoints
RECORD_KEY = "dgt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Progress:
    """How far a training is. No random state: every choice is a function of (seed, epoch, index)."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches of the current epoch that this process has seen
    step: int = 0  # optimizer steps taken, the skipped ones among them
    skipped: int = 0  # steps that were not finite
    skipped_in_a_row: int = 0
    best: float | None = None  # best value of the task's headline metric so far
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    seconds: float = 0.0  # trained so far, over all processes that took turns


@dataclass
class TrainingState:
    """All that a training is: resumed from it, it is the same to the last bit as one that never stopped."""

    fabric: Fabric
    objective: Any  # the network with its losses, as Fabric set it up
    network: nn.Module  # the network in it
    average: ModelEmaV3 | None  # of its weights
    optimizer: Any  # as Fabric set it up
    data: Any  # the data module, which knows the unreadable images
    global_batch: int  # images of an optimizer step, over all processes
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.loss_sums = torch.zeros(2, device=self.fabric.device)  # of this epoch, and images

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated and exported: the average, where there is one."""
        return self.network if self.average is None else self.average.module

    @property
    def sharded(self) -> bool:
        """Whether each process holds a share of the weights alone."""
        return isinstance(self.network, FSDPModule)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds; a matter of all processes, of which the first gets shared-out weights."""
        weights, optimizer = self.network.state_dict(), self.optimizer.state_dict()
        if self.sharded:
            weights, optimizer = get_state_dict(self.network, self.optimizer.optimizer, options=WHOLE)
        return {
            "format": FORMAT,
            "progress": asdict(self.progress),
            "loss_sums": self.fabric.all_reduce(self.loss_sums.clone(), reduce_op="sum"),
            "precision": self.fabric.strategy.precision.state_dict(),
            "broken_images": self.data.state_dict(),
            "world_size": self.fabric.world_size,
            "training_weights": weights,
            "state_dict": weights if self.average is None else self.average.module.state_dict(),
            "optimizer": optimizer,
        }

    def load(self, path: Path, stored: dict[str, Any]) -> None:
        """Go to where a checkpoint was taken, from what `latest_checkpoint` returned; a matter of all processes.

        UserError for another number of processes, which would share out the images in another way, and for weights that
        are shared out now and were not, or the other way round: the optimizer's state is kept by name only there.
        """
        before, now = stored["world_size"], self.fabric.world_size
        if before != now:
            hint = "set trainer.devices and trainer.num_nodes as before"
            raise UserError(f"{path} was trained by {before} processes, now there are {now}: {hint}")
        if self.sharded != isinstance(stored["optimizer"]["param_groups"][0]["params"][0], str):
            hint = "trainer.strategy must be fsdp2 where it was, and must not be where it was not"
            raise UserError(f"{path} does not fit this run's strategy: {hint}")
        self.progress = Progress(**stored["progress"])
        if self.fabric.is_global_zero:  # goes on from the sum of all processes
            self.loss_sums.copy_(stored["loss_sums"])
        self.fabric.strategy.precision.load_state_dict(stored["precision"])
        self.data.load_state_dict(stored["broken_images"])
        weights, optimizer = stored["training_weights"], stored["optimizer"]
        if self.sharded:
            states = {"model_state_dict": weights, "optim_state_dict": optimizer}
            set_state_dict(self.network, self.optimizer.optimizer, **states, options=WHOLE)
            return
        self.network.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        if self.average is not None:
            self.average.module.load_state_dict(stored["state_dict"])


class Checkpoints:
    """Writes checkpoints, each with `record` (recipe and class names), when they are due, and keeps the newest.

    A write that fails is told and kept in `failure`, not raised: a full disk costs a checkpoint, not the training.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, record: dict[str, Any]) -> None:
        self.folder, self.settings, self.record = folder / "checkpoints", settings, record
        self.failure: OSError | None = None
        self.saved_at = time.monotonic()

    def is_due(self, step: int, epoch: int | None = None) -> bool:
        """Whether steps, minutes or, at the end of an epoch (counted from 1), epochs ask for a checkpoint now."""
        epochs, steps, minutes = self.settings.every_epochs, self.settings.every_steps, self.settings.every_minutes
        late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        return late or bool((steps and step % steps == 0) or (epoch and epochs and epoch % epochs == 0))

    def save(self, state: TrainingState) -> None:
        """Write the newest checkpoint and remove those that are too many; a matter of all processes."""
        path = self.folder / f"step-{state.progress.step:08d}.ckpt"
        self.write(state, path)
        self.saved_at = time.monotonic()
        if state.fabric.is_global_zero and self.failure is None:
            for old in step_checkpoints(self.folder.parent)[self.settings.keep :]:
                with suppress(OSError):  # the next one tries again, and tells if there is no room
                    old.unlink()

    def write(self, state: TrainingState, path: Path) -> None:
        """Write one checkpoint whole or not at all; a matter of all processes."""
        content, buffer = {RECORD_KEY: self.record, **state.state_dict()}, io.BytesIO()
        if not state.fabric.is_global_zero:
            return
        torch.save(content, buffer)
        try:
            atomic_write(path, buffer.getbuffer())
            self.failure = None
        except OSError as error:
            self.failure = error
            LOGGER.warning(f"the checkpoint {path} could not be written: {error.strerror or error}")


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder that a training can resume from, the newest first."""
    return sorted((folder / "checkpoints").glob("step-*.ckpt"), reverse=True)


def latest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint of a run, and what it holds; None where there is none, UserError if none is whole."""
    paths = step_checkpoints(folder)
    for path in paths:
        try:
            stored = read_checkpoint(path)
            if stored.get("format") != FORMAT:
                raise UserError(f"it has format {stored.get('format')}, this version reads {FORMAT}")
            return path, stored
        except (UserError, OSError) as error:
            LOGGER.warning(f"{path.name} cannot be used, trying the one before: {error}")
    if not paths:
        return None
    what = f"all {len(paths)} checkpoints in {folder / 'checkpoints'} are damaged or of another version"
    raise UserError(f"{what}: remove it to begin again")


def read_checkpoint(source: Path) -> dict[str, Any]:
    """What a checkpoint holds, tensors on the CPU.

    OSError where the file cannot be opened; UserError, naming it, where it is cut off, damaged, or not of `dgt train`.
    """
    content = io.BytesIO(source.read_bytes())  # read first: torch.load's OSError would look like a missing permission
    stored = None
    with suppress(RuntimeError, EOFError, OSError, ValueError, BadZipFile, zlib.error, pickle.UnpicklingError):
        if ZipFile(content).testzip() is None:  # no part that does not have its checksum
            content.seek(0)
            stored = torch.load(content, map_location="cpu", weights_only=True)
    if not isinstance(stored, dict):
        raise UserError(f"{source} is cut off or damaged ({len(content.getbuffer())} bytes), or holds Python objects")
    return stored
