"""The state of a training: the contents of checkpoints, when they are written, and how to resume from them."""

from __future__ import annotations

import io
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from dgt.runs.checkpoints import FORMAT, MODEL, MODEL_EMA, RECORD_KEY, Progress, step_checkpoints
from dgt.runs.recipe import CheckpointSettings, Recipe
from dgt.training.average import WeightAverage
from dgt.utils.atomic_write import atomic_write
from dgt.utils.class_names import changes
from dgt.utils.errors import LOGGER, UserError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class TrainingState:
    """The complete state of a training; a training resumed from it is bit-identical to one that never
    stopped.
    """

    fabric: Fabric
    objective: Any  # the network with its losses, as Fabric set it up
    network: nn.Module  # the network in it
    average: WeightAverage | None  # of its weights
    optimizer: Any  # as Fabric set it up
    data: Any  # the data module, which knows the unreadable images
    global_batch: int  # images of an optimizer step, over all processes
    frozen: list[str] = field(
        default_factory=list
    )  # names of the network's modules that hold still
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.loss_sums = torch.zeros(2, device=self.fabric.device)  # of this epoch, and weights

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated and exported: the average, if there is one, in the type of
        the trained weights.
        """
        return self.network if self.average is None else self.average.like(self.network)

    @property
    def sharded(self) -> bool:
        """Whether each process holds only a shard of the weights."""
        return isinstance(self.network, FSDPModule)

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint. All processes must call this; the first one gets sharded
        weights in full.
        """
        weights, optimizer = self._weights_and_optimizer()
        stored = {
            "format": FORMAT,
            "progress": asdict(self.progress),
            "loss_sums": self.fabric.all_reduce(self.loss_sums.clone(), reduce_op="sum"),
            "precision": self.fabric.strategy.precision.state_dict(),
            "data": self.data.state_dict(),
            "world_size": self.fabric.world_size,
            MODEL: weights,
            "optimizer": optimizer,
        }
        if self.average is not None:
            stored[MODEL_EMA] = self.average.module.state_dict()
        return stored

    def evaluated_weights(self) -> dict[str, Any]:
        """The weights of the final model. All processes must call this; the first one gets sharded
        weights in full.
        """
        if self.average is not None:
            return dict(self.average.module.state_dict())
        return self._weights_and_optimizer()[0]

    def _weights_and_optimizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.sharded:
            weights, optimizer = get_state_dict(
                self.network, self.optimizer.optimizer, options=WHOLE
            )
            return weights, dict(optimizer)
        return self.network.state_dict(), self.optimizer.state_dict()

    def load(self, path: Path, stored: dict[str, Any]) -> None:
        """Continue from a checkpoint. All processes must call this.

        Args:
            path: the checkpoint, for messages.
            stored: its content, as `latest_checkpoint` returns it.

        Raises:
            UserError: another number of processes, which would share out the images in another way;
                weights that are sharded now and were not, or the reverse: the optimizer's state is
                kept by name only under fsdp2.
        """
        before = stored["world_size"]
        now = self.fabric.world_size
        if before != now:
            hint = "set trainer.devices and trainer.num_nodes as before"
            raise UserError(
                f"{path} was trained with {before} processes, now there are {now}: {hint}"
            )
        was_sharded = isinstance(stored["optimizer"]["param_groups"][0]["params"][0], str)
        if self.sharded != was_sharded:
            hint = "resume fsdp2 runs with trainer.strategy fsdp2, and other runs without it"
            raise UserError(f"{path} does not match this run's strategy: {hint}")
        self.progress = Progress(**stored["progress"])
        if self.fabric.is_global_zero:  # continues from the sum of all processes
            self.loss_sums.copy_(stored["loss_sums"])
        self.fabric.strategy.precision.load_state_dict(stored["precision"])
        self.data.load_state_dict(stored["data"])
        if self.sharded:
            set_state_dict(
                self.network,
                self.optimizer.optimizer,
                model_state_dict=stored[MODEL],
                optim_state_dict=stored["optimizer"],
                options=WHOLE,
            )
            return
        self.network.load_state_dict(stored[MODEL])
        self.optimizer.load_state_dict(stored["optimizer"])
        if self.average is not None:
            self.average.module.load_state_dict(stored[MODEL_EMA])


def compare_data(path: Path, stored: dict[str, Any], recipe: Recipe, data: Any) -> list[str]:
    """What changed in the data since a checkpoint was written and may change, in sentences.

    Args:
        path: the checkpoint, for messages.
        stored: its content.
        recipe: of the training that resumes from it.
        data: its data module, set up.

    Raises:
        UserError: the classes are others, or in another order.
    """
    record, remarks = stored[RECORD_KEY], []
    before, now = record["class_names"], list(data.class_names)
    if changes(before, now):
        raise UserError(
            f"{path} was trained on other classes ({changes(before, now)}): resume with those that it "
            "knows, or train in another folder with model.init_from, which keeps what it learned of "
            "classes of the same names"
        )
    root_before, root = record["recipe"]["data"]["root"], recipe.data.root
    if root_before != root:
        remarks.append(f"resumes with data.root {root}, which was {root_before}")
    for part, count_before in stored["data"]["images"].items():
        count = len(data.datasets[part])
        if count != count_before:
            remarks.append(
                f"resumes with {count} {part} images, which were {count_before}: their order and the "
                "steps of an epoch are others"
            )
    return remarks


class Checkpoints:
    """Writes checkpoints, each with `record` (recipe and class names), when they are due, and keeps
    the newest.

    A failed write is logged and kept in `failure`, not raised: a full disk loses a checkpoint, not
    the training.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, record: dict[str, Any]) -> None:
        self.folder, self.settings, self.record = folder / "checkpoints", settings, record
        self.failure: OSError | None = None
        self.saved_at = time.monotonic()

    def is_due(self, step: int, epoch: int | None = None) -> bool:
        """Whether steps, minutes or, at the end of an epoch (counted from 1), epochs ask for a
        checkpoint now.
        """
        epochs = self.settings.every_epochs
        steps = self.settings.every_steps
        minutes = self.settings.every_minutes
        late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        return late or bool(
            (steps and step % steps == 0) or (epoch and epochs and epoch % epochs == 0)
        )

    def save(self, state: TrainingState) -> None:
        """Write the newest checkpoint and remove the oldest of the others; all processes must call this."""
        path = self.folder / f"step-{state.progress.step:08d}.ckpt"
        self.write(state, path)
        self.saved_at = time.monotonic()
        if state.fabric.is_global_zero and self.failure is None:
            # of higher steps are those that could not be read when this training resumed
            others = [each for each in step_checkpoints(self.folder.parent) if each != path]
            for old in others[self.settings.keep - 1 :]:
                with suppress(OSError):  # the next one tries again, and reports a full disk
                    old.unlink()

    def write(self, state: TrainingState, path: Path) -> None:
        """Write one checkpoint whole or not at all; all processes must call it."""
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
