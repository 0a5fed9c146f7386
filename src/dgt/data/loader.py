"""The data loader of all tasks: the order of images in batches, worker processes, and the last step on the device.

The sampler hands out keys (epoch, batch, item), so that workers, even persistent ones, know which
epoch they augment for, and a run resumes in the middle of an epoch without decoding what it has
seen: every random choice is a function of (seed, epoch, index). Workers send bytes; what turns them
into floats happens on the loader's device.
"""

import math
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from dgt.data.image_io import BrokenImage, BrokenImagesError
from dgt.utils.distributed import rank, world_size
from dgt.utils.errors import LOGGER
from dgt.utils.seeding import generator, reseed, seeded

# What asks a training to stop; Windows has no SIGUSR1.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)


class Key(NamedTuple):
    """Which image, in which batch of which epoch."""

    epoch: int
    batch: int
    item: int


class Drawn(NamedTuple):
    """One batch: its first key, the samples that could be read, which the loader collates, and what
    could not.
    """

    key: Key
    samples: Any
    broken: list[BrokenImage]


class SeededDataset(Dataset[Any]):
    """The samples at some `indices` of a reader, tuples or `BrokenImage` by index, through a transform.

    The transform may draw from the global random generators: what it draws is a function of (seed,
    epoch, item). With `cache`, every sample is read once, into memory.
    """

    def __init__(
        self,
        reader: Any,
        transform: Callable[[Any], Any],
        seed: int,
        indices: Sequence[int],
        cache: bool = False,
    ) -> None:
        self.reader = reader
        self.transform = transform
        self.seed = seed
        self.indices = indices
        self.cached = [reader[index] for index in indices] if cache else None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Key) -> Any:
        drawn = self.__getitems__([key])
        return (drawn.samples or drawn.broken)[0]

    def __getitems__(self, keys: Sequence[Key]) -> Drawn:
        """The samples of a batch."""
        drawn = Drawn(keys[0], [], [])
        with seeded("augment", self.seed):
            for key in keys:
                sample = (
                    self.cached[key.item] if self.cached else self.reader[self.indices[key.item]]
                )
                if isinstance(sample, BrokenImage):
                    drawn.broken.append(sample)
                else:
                    reseed("augment", self.seed, key.epoch, key.item)
                    drawn.samples.append(self.transform(sample))
        return drawn


class EpochBatches(Sampler[list[Key]]):
    """The batches of one process, epoch after epoch.

    In training, the order is a permutation drawn from (seed, epoch), the same in every process;
    batch b of all of them together is its b-th stretch of `world_size * batch_size` images, each
    process's batch a stretch of that; what does not fill a last batch is left out. In evaluation,
    the order is that of the data, each image is seen by one process, and the last batch may be
    smaller. Every pass moves on to the next epoch; `epoch` and `first_batch` say its start.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        *,
        training: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.training = training
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first_batch = 0

    def __len__(self) -> int:
        if self.training:
            return self.length // (self.batch_size * self.world_size)
        return math.ceil(len(range(self.rank, self.length, self.world_size)) / self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first_batch = self.epoch, self.first_batch
        self.epoch, self.first_batch = epoch + 1, 0
        mine = np.arange(self.rank, self.length, self.world_size)
        # the processes' batches, one after another, are the batch of one process with all of them
        if self.training:
            order = generator("order", self.seed, epoch).permutation(self.length)
            order = order[: len(self) * self.world_size * self.batch_size]
            mine = order.reshape(-1, self.world_size, self.batch_size)[:, self.rank].ravel()
        for batch in range(first_batch, len(self)):
            chosen = mine[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [Key(epoch, batch, int(index)) for index in chosen]


def _leave_stopping_to_the_main_process(_: int) -> None:
    """In a worker: signals that a scheduler or Ctrl-C sends to the whole group are for the main process, which
    ends its workers.

    Of SIGTERM only the parent's counts: at its own exit it sends one and waits.
    """

    def end_with_the_main_process() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    for number in STOP_SIGNALS[1:]:
        signal.signal(number, signal.SIG_IGN)
    # macOS does not report the sender: there SIGTERM always ends a worker
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=end_with_the_main_process, daemon=True).start()


class Failure(NamedTuple):
    """An error in a worker, which is raised in the main process: PyTorch would only quote it."""

    error: Exception
    place: str


class CollatedDataset(Dataset[Any]):
    """A dataset that gives a batch collated, or a `Failure` in its place."""

    def __init__(self, dataset: SeededDataset, collate: Callable[..., tuple[Any, Any]]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Drawn | Failure:
        """The collated samples of a batch, in shared memory if this is a worker."""
        try:
            drawn = self.dataset.__getitems__(keys)
            drawn = drawn._replace(samples=self.collate(drawn.key, drawn.samples))
            if get_worker_info() is not None:
                # here, where a failure is reported: PyTorch would do it in a thread and lose it
                tree_map_only(torch.Tensor, torch.Tensor.share_memory_, drawn.samples)
            return drawn
        except Exception as error:
            return _failure(error)


def _failure(error: Exception) -> Failure:
    """An error with its traceback; one that cannot be sent to another process as a RuntimeError."""
    place = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error, place)


def _until_a_worker_is_lost(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; a connection that a worker's end has cut raises what PyTorch raises for its end."""
    try:
        yield from batches
    except (EOFError, ConnectionError) as error:
        raise RuntimeError(f"DataLoader worker (pid unknown) is gone: {error!r}") from error


def _unchanged(batch: Any) -> Any:
    return batch


class Loader:
    """Iterates batches `(images, targets)`, finished on `device`, and keeps the report of broken
    images.

    `len()` is the number of batches of a whole epoch, which the processes of a distributed run
    share. `state_dict` gives the position in it; after `load_state_dict`, the next pass gives the
    batches that were still to come.

    Args:
        data: a data module, set up: its `collate` runs in the workers and must pickle, its `finish`
            in this process.
        part: "train" for shuffled, full batches, or "val".

    Iterating raises BrokenImagesError for too many unreadable images, or where a training batch has
    no others.
    """

    def __init__(self, data: Any, part: str) -> None:
        dataset = data.datasets[part]
        self.report = data.broken_images[part]
        self.device = torch.device("cpu")
        order: dict[str, Any] = {
            "training": part == "train",
            "rank": rank(),
            "world_size": world_size(),
        }
        self.sampler = EpochBatches(len(dataset), data.batch_size, data.seed, **order)
        self.finish = partial(data.finish, part)
        self._epoch = self._batch = 0
        self._batches: DataLoader[Any] = DataLoader(
            CollatedDataset(dataset, partial(data.collate, part)),
            batch_sampler=self.sampler,
            collate_fn=_unchanged,
            num_workers=data.num_workers,
            persistent_workers=data.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            # its own, so that loading leaves the global random state alone
            generator=torch.Generator(),
            worker_init_fn=_leave_stopping_to_the_main_process,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        # an extra: what predicts loads no batches
        from lightning_fabric.utilities import move_data_to_device

        with ExitStack() as later:
            # signals to the group are blocked until workers install handlers
            if hasattr(signal, "sigwaitinfo"):
                usual = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
                later.callback(signal.pthread_sigmask, signal.SIG_SETMASK, usual)
            # PyTorch's handler raises wherever a worker's end is met, in the middle of a step, too;
            # without it, the next batch does
            if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
                before = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
                later.callback(signal.signal, signal.SIGCHLD, before)
            batches = iter(self._batches)
        for batch in _until_a_worker_is_lost(batches):
            if isinstance(batch, Failure):
                LOGGER.debug("the worker's error:\n%s", batch.place)
                raise batch.error
            key, (images, targets), broken = batch
            self._epoch, self._batch = key.epoch, key.batch + 1
            self.report.record(broken)
            if len(images):
                yield self.finish(key, *move_data_to_device((images, targets), self.device))
            elif self.sampler.training:
                reasons = "\n".join(f"  {path}: {reason}" for path, reason in broken[:5])
                raise BrokenImagesError(
                    f"too few readable images in a training batch; broken:\n{reasons}"
                )

    def close(self) -> None:
        """End the workers, which the next pass starts again.

        Where an error keeps the loader alive until garbage is collected, PyTorch can no longer tell
        them to end, and waits five seconds for each.
        """
        workers, self._batches._iterator = self._batches._iterator, None
        if workers is not None:
            workers._shutdown_workers()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, int]:
        """The epoch and the number of its batches handed out; at its end, the start of the next."""
        ended = self._batch >= len(self)
        return {"epoch": self._epoch + ended, "batch": 0 if ended else self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position returned by `state_dict`."""
        self._epoch, self._batch = self.sampler.epoch, self.sampler.first_batch = (
            state["epoch"],
            state["batch"],
        )
