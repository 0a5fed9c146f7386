"""What the data modules of all tasks share: two splits, their loaders, and the account of unreadable images.

The loaders share the work among the processes of a distributed run by themselves; Lightning's
`use_distributed_sampler` is harmless with them, on or off. Unreadable images are left out, counted and listed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import lightning
import torch.distributed

from dgt.data.decoding import BrokenImages, write_broken_images
from dgt.data.loading import Batch, EpochBatches, Key, Loader, Prepared
from dgt.utils.seeding import generator


class SplitDataset(Protocol):
    """One split: samples by key, each a function of (seed, epoch, item) alone, or a `BrokenImage`."""

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, key: Key) -> Any: ...


def check_at_least(lowest: int, **values: int | None) -> None:
    """Raise ValueError, naming the argument, for a value below `lowest`; None is none."""
    for name, value in values.items():
        if value is not None and value < lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {value}")


def subset_indices(part: str, split: str, total: int, size: int | None) -> list[int] | None:
    """Which images of a split a subset holds: the first of one permutation that depends on the split's name alone.

    Args:
        part: "train" or "val", for the error.
        split: the split's name.
        total: images in the split.
        size: images wanted; None for all.

    Returns:
        Indices, or None for the whole split.

    Raises:
        ValueError: more are wanted than there are.
    """
    if size is not None and size > total:
        raise ValueError(f"{part}_size: expected at most {total}, the images of split {split!r}, got {size}")
    return None if size in (None, total) else generator("subset", split).permutation(total)[:size].tolist()


class ImageData(lightning.LightningDataModule, ABC):
    """Images for training and validation; a subclass says what a split is and how its samples make a batch.

    Args:
        batch_size: images per batch and process.
        num_workers: processes that prepare images; 0 for none beside the main one. Changes nothing but the speed.
        seed: order and augmentation are functions of it.
        max_broken_share: share of unreadable images, of those in a split, above which the run stops.

    Raises:
        ValueError: a value out of its range.
    """

    root_holds = "the folder of the images"  # what the argument `root` of a subclass is, for people

    def __init__(self, batch_size: int, num_workers: int, seed: int, max_broken_share: float) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, num_workers=num_workers, seed=seed)
        if not 0 <= max_broken_share <= 1:
            raise ValueError(f"max_broken_share must lie in [0, 1], got {max_broken_share}")
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.max_broken_share = max_broken_share
        self.datasets: dict[str, SplitDataset] = {}
        self.ledgers: dict[str, BrokenImages] = {}

    @abstractmethod
    def open_part(self, part: str) -> tuple[SplitDataset, str]:
        """Open "train" or "val".

        Returns:
            The dataset, and the name of its split for messages.

        Raises:
            FileNotFoundError, ValueError: nothing readable there.
        """

    @abstractmethod
    def collate(self, part: str) -> Callable[[Any], Batch | Prepared]:
        """What makes a `Batch` of the samples and `BrokenImage`s of "train" or "val", or prepares it; it must pickle.

        It gets a list of what the dataset gives for each key, or what the dataset's `__getitems__` gives for all.
        """

    def setup(self, stage: str | None = None) -> None:
        """Open the splits that `stage` needs: both for "fit" or None, else the validation split.

        Raises:
            FileNotFoundError, ValueError: as `open_part` does.
        """
        for part in ("train", "val") if stage in ("fit", None) else ("val",):
            if part not in self.datasets:
                self.datasets[part], split = self.open_part(part)
                self.ledgers[part] = BrokenImages(split, len(self.datasets[part]), self.max_broken_share)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in the order of their labels; after `setup`."""
        if not self.datasets:
            raise RuntimeError("call setup() first: the classes are known once the data is open")
        return next(iter(self.datasets.values())).class_names

    @property
    def num_classes(self) -> int:
        """Number of classes; after `setup`."""
        return len(self.class_names)

    def train_dataloader(self) -> Loader:
        """Shuffled, augmented, full batches; another order in each epoch.

        Raises:
            ValueError: fewer images than one batch of all processes.
        """
        loader = self._loader("train")
        if len(loader) == 0:
            world_size = loader.sampler.world_size
            raise ValueError(
                f"batch_size: {len(self.datasets['train'])} training images do not fill one batch of "
                f"{self.batch_size} on each of {world_size} processes"
            )
        return loader

    def val_dataloader(self) -> Loader:
        """Every validation image once, in order."""
        return self._loader("val")

    def state_dict(self) -> dict[str, Any]:
        """What goes into checkpoints: the unreadable images met so far."""
        return {"broken": {part: dict(ledger.broken) for part, ledger in self.ledgers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the unreadable images of a checkpoint."""
        for part, broken in state_dict["broken"].items():
            self.ledgers[part].broken.update(broken)

    def write_broken_images(self, path: str | os.PathLike[str]) -> int:
        """List the unreadable images met so far in a file, a line each; return how many there are."""
        return write_broken_images(path, self.ledgers.values())

    def _loader(self, part: str) -> Loader:
        rank, world_size = process()
        dataset = self.datasets[part]
        sampler = EpochBatches(
            len(dataset), self.batch_size, self.seed, training=part == "train", rank=rank, world_size=world_size
        )
        return Loader(dataset, sampler, self.collate(part), self.ledgers[part], self.num_workers)


def process() -> tuple[int, int]:
    """Rank and number of processes of a distributed run; (0, 1) outside one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
