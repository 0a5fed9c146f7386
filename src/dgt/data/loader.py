"""The loader of all tasks: which images make which batch, worker processes that prepare them, and their last step.

The sampler hands out not indices but keys (epoch, batch, item), so that workers, even persistent ones, know which epoch
they augment for. The same keys let a run resume in the middle of an epoch without decoding what it has seen. Workers
send bytes; what turns them into floats happens on the loader's device.
"""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from dgt.data.dataset import Key, SeededDataset
from dgt.data.image_io import BrokenImage, BrokenImages, BrokenImagesError
from dgt.utils.seeding import generator


class Batch(NamedTuple):
    """What a worker sends: 8-bit images, their targets, and what could not be read.

    In classification uint8 (B, 3, S, S) with (B,) labels or (B, classes) distributions; other tasks have their own, a
    list of images of several sizes among them. `len(images)` is 0 where too few could be read.
    """

    key: Key
    images: Any
    targets: Any
    broken: list[BrokenImage]


class EpochBatches(Sampler[list[Key]]):
    """The batches of one process, epoch after epoch.

    In training, the order is a permutation drawn from (seed, epoch), the same in every process; batch b of
    all processes together is its b-th stretch of `world_size * batch_size` images, of which each process takes its own
    stretch, and what does not fill a last batch is left out.
    In evaluation, the order is that of the data, each image is seen by one process, and the last batch may be smaller.
    Every pass moves on to the next epoch; `set_epoch` goes to any.
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, *, training: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        self.length, self.batch_size, self.seed, self.training = length, batch_size, seed, training
        self.rank, self.world_size = rank, world_size
        self.epoch, self.first_batch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; where the sampler is at that epoch already, it stays at its batch."""
        if epoch != self.epoch:
            self.epoch, self.first_batch = epoch, 0

    def __len__(self) -> int:
        if self.training:
            return self.length // (self.batch_size * self.world_size)
        return math.ceil(len(range(self.rank, self.length, self.world_size)) / self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first_batch = self.epoch, self.first_batch
        self.epoch, self.first_batch = epoch + 1, 0
        order = np.arange(self.length)
        if self.training:
            order = generator("order", self.seed, epoch).permutation(self.length)
            # The processes' batches, one after another, are the batch of one process with all of them, order and all.
            order = order[: len(self) * self.world_size * self.batch_size]
            mine = order.reshape(-1, self.world_size, self.batch_size)[:, self.rank].ravel()
        else:
            mine = order[self.rank :: self.world_size]
        for batch in range(first_batch, len(self)):
            chosen = mine[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [Key(epoch, batch, int(index)) for index in chosen]


def _leave_stopping_to_the_main_process(_: int) -> None:
    """In a worker: what a scheduler or Ctrl-C tells the whole group is for the main process, which ends its workers."""
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS does not say who sent it: there SIGTERM always ends a worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told_by_the_main_process, daemon=True).start()


def _end_when_told_by_the_main_process() -> None:
    """End this worker at a SIGTERM of its parent, which at its own exit sends one and waits; ignore any other's."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and those in lists, dicts and named tuples, on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    moved = [to_device(item, device) for item in value]
    return type(value)(*moved) if isinstance(value, tuple) else moved


class Loader:
    """Iterates batches `(images, targets)`, finished, and keeps the report of broken images in the main process.

    `len()` is the number of batches of a whole epoch. `state_dict` tells the place in the epoch; after
    `load_state_dict`, the loader's next pass gives the batches that were still to come.

    Args:
        dataset: samples by key.
        sampler: their order.
        collate: makes a batch of bytes, in a worker; it must pickle.
        finish: makes a batch's 8-bit images and its targets, moved to `device`, what the network takes.
        ledger: the report of broken images.
        num_workers: processes; 0 for none beside the main one.

    Raises (while iterating):
        BrokenImagesError: too many images are unreadable, or all those of a training batch.
    """

    def __init__(
        self,
        dataset: SeededDataset,
        sampler: EpochBatches,
        collate: Callable[[Any], Batch],
        finish: Callable[[Key, Any, Any], tuple[Any, Any]],
        ledger: BrokenImages,
        num_workers: int,
    ) -> None:
        self.sampler, self.finish, self.ledger = sampler, finish, ledger
        self.device = torch.device("cpu")
        self._epoch, self._batch = sampler.epoch, sampler.first_batch
        self._batches: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, so that loading leaves the global random state alone
            worker_init_fn=_leave_stopping_to_the_main_process,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._epoch, self._batch = self.sampler.epoch, self.sampler.first_batch
        for key, images, targets, broken in self._batches:
            self._batch += 1
            self.ledger.record(broken)
            if len(images):
                yield self.finish(key, to_device(images, self.device), to_device(targets, self.device))
            elif self.sampler.training:
                reasons = "\n".join(f"  {path}: {reason}" for path, reason in broken[:5])
                raise BrokenImagesError(f"too few images of a training batch can be read; broken:\n{reasons}")

    def state_dict(self) -> dict[str, int]:
        """The epoch and the number of its batches handed out; at its end, the start of the next."""
        if self._batch >= len(self):
            return {"epoch": self._epoch + 1, "batch": 0}
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place that `state_dict` told."""
        self._epoch, self._batch = state["epoch"], state["batch"]
        self.sampler.epoch, self.sampler.first_batch = state["epoch"], state["batch"]
