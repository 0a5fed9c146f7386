"""From labelled images to batches whose every random choice is a function of (seed, epoch, index).

The sampler hands out not indices but keys (epoch, batch, item), so that workers, even persistent ones, know which epoch
they augment for. The same keys let a run resume in the middle of an epoch without decoding what it has seen.
"""

import math
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from dgt.data.decoding import BrokenImage, BrokenImages, BrokenImagesError
from dgt.data.images import Labelled, LabelledImages
from dgt.utils.seeding import generator, reseed, seeded
from dgt.data.transforms import BatchTargets, Mix, Patch, Transform, mix_images

HUGE = 1 << 22  # bytes from which huge pages pay


class Key(NamedTuple):
    """Which image, in which batch of which epoch."""

    epoch: int
    batch: int
    item: int


class Sample(NamedTuple):
    """A transformed image (3, S, S) with its label."""

    image: Tensor
    label: int
    key: Key


class Batch(NamedTuple):
    """What a worker sends: images, their targets, and what could not be read.

    In classification (B, 3, S, S) with (B,) labels or (B, classes) distributions; other tasks have their own, a list of
    images of several sizes among them. `len(images)` is 0 where nothing could be read.
    """

    images: Any
    targets: Any
    broken: list[BrokenImage]


class SubsetImages:
    """Some of the images of a reader, in the order of `indices`."""

    def __init__(self, images: LabelledImages, indices: Sequence[int]) -> None:
        self.images, self.indices = images, indices
        self.class_names = images.class_names

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Labelled:
        return self.images[int(self.indices[index])]


class CachedImages:
    """All images of a reader, decoded once and kept in memory at full size, 3 bytes a pixel."""

    def __init__(self, images: LabelledImages) -> None:
        self.class_names = images.class_names
        self.items = [
            (picture if isinstance(picture, BrokenImage) else np.asarray(picture), label)
            for picture, label in (images[index] for index in range(len(images)))
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Labelled:
        pixels, label = self.items[index]
        return (pixels if isinstance(pixels, BrokenImage) else Image.fromarray(pixels)), label


class Prepared:
    """A batch on its way to the main process: bytes instead of floats, every random choice made.

    Args:
        pixels: uint8 (N, H, W, 3), the images that could be read.
        patches: for each of them, what random erasing fills.
        labels: int64 (N,).
        keys: where they stand.
        broken: what could not be read.
        transform: whose second half turns pixels into images.
    """

    def __init__(
        self,
        pixels: Tensor,
        patches: list[list[Patch]],
        labels: Tensor,
        keys: list[Key],
        broken: list[BrokenImage],
        transform: Transform,
    ) -> None:
        self.pixels, self.patches, self.labels, self.keys = pixels, patches, labels, keys
        self.broken, self.transform = broken, transform
        self.targets, self.mix = labels, None

    mix: Mix | None

    def finish(self) -> Batch:
        """The batch of float images."""
        pixels = self.pixels[: len(self.targets)]
        images = empty_images((len(pixels), 3, *pixels.shape[1:3]))
        for image, one, patches in zip(images, pixels, self.patches, strict=False):
            self.transform.finish(one, patches, image)
        if self.mix is not None:
            mix_images(images, self.mix)
        return Batch(images, self.targets, self.broken)

    def pin_memory(self) -> Batch:
        """The batch in pinned memory: what the loader's thread calls where there is a GPU."""
        images, targets, broken = self.finish()
        return Batch(images.pin_memory(), targets.pin_memory(), broken)


def empty_images(shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor to fill, where the system has them in huge pages: small ones cost more than filling them."""
    size = 4 * math.prod(shape)
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


class TransformedImages(Dataset[Sample | BrokenImage]):
    """A reader's images through a transform whose random choices belong to (seed, epoch, index)."""

    def __init__(self, images: LabelledImages, transform: Transform, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed
        self.class_names = images.class_names

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Sample | BrokenImage:
        prepared = self.__getitems__([key])
        if prepared.broken:
            return prepared.broken[0]
        return Sample(prepared.finish().images[0], int(prepared.labels[0]), key)

    def __getitems__(self, keys: Sequence[Key]) -> Prepared:
        """The images of a batch, as far as they can be read."""
        pixels, patches, labels, read, broken = [], [], [], [], []
        with seeded("augment", self.seed):
            for key in keys:
                picture, label = self.images[key.item]
                if isinstance(picture, BrokenImage):
                    broken.append(picture)
                    continue
                reseed("augment", self.seed, key.epoch, key.item)
                one, erased = self.transform.prepare(picture)
                pixels.append(one)
                patches.append(erased)
                labels.append(label)
                read.append(key)
        stacked = default_collate(pixels) if pixels else torch.empty(0)  # into shared memory, in a worker
        return Prepared(stacked, patches, torch.tensor(labels), read, broken, self.transform)


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


class Collate:
    """Gives a `Prepared` batch its targets: `targets` smooths them in training, and says how to mix the images."""

    def __init__(self, targets: BatchTargets | None, seed: int, rank: int = 0) -> None:
        self.targets, self.seed, self.rank = targets, seed, rank

    def __call__(self, prepared: Prepared) -> Prepared:
        if self.targets is not None and prepared.keys:
            key, pixels = prepared.keys[0], prepared.pixels
            shape = (len(pixels), 3, *pixels.shape[1:3])
            place = (self.seed, key.epoch, key.batch, self.rank)
            prepared.mix, prepared.targets = self.targets(shape, prepared.labels, place)
        return prepared


def _leave_stopping_to_the_main_process(_: int) -> None:
    """In a worker: what a scheduler or Ctrl-C tells the whole group is for the main process, which ends its workers."""
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS tells no sender: there SIGTERM ends a worker, whoever sent it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told_by_the_main_process, daemon=True).start()


def _end_when_told_by_the_main_process() -> None:
    """End this worker at a SIGTERM of its parent, which at its own exit sends one and waits; ignore any other's."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class Loader:
    """Iterates batches `(images, targets)` and keeps the ledger of broken images in the main process.

    `len()` is the number of batches of a whole epoch. `state_dict` tells the place in the epoch; after
    `load_state_dict`, the loader's next pass gives the batches that were still to come.

    Raises (while iterating):
        BrokenImagesError: too many images are unreadable, or all those of a training batch.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: EpochBatches,
        collate: Callable[[Any], Batch | Prepared],
        ledger: BrokenImages,
        num_workers: int,
    ) -> None:
        self.sampler, self.ledger = sampler, ledger
        self.batch_sampler = sampler  # where Lightning looks for what shuffles
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
        for arrived in self._batches:
            batch = arrived.finish() if isinstance(arrived, Prepared) else arrived
            self._batch += 1
            self.ledger.record(batch.broken)
            if len(batch.images):
                yield batch.images, batch.targets
            elif self.sampler.training:
                reasons = "\n".join(f"  {path}: {reason}" for path, reason in batch.broken[:5])
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
