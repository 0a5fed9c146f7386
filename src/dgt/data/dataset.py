"""One wrapper for the data sets of all tasks, whose every random choice is a function of (seed, epoch, index)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset

from dgt.data.image_io import BrokenImage
from dgt.utils.seeding import reseed, seeded


class Key(NamedTuple):
    """Which image, in which batch of which epoch."""

    epoch: int
    batch: int
    item: int


class Drawn(NamedTuple):
    """One batch: its first key, the samples that could be read, which the loader collates, and what could not."""

    key: Key
    samples: Any
    broken: list[BrokenImage]


class Reader(Protocol):
    """What is wrapped: samples as tuples, or a `BrokenImage`, by index."""

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class SeededDataset(Dataset[Any]):
    """The samples at some `indices` of a reader, through a transform of their parts.

    The transform may draw from the global random generators: what it draws is a function of (seed, epoch, item).
    With `cache`, every sample is read once, into memory.
    """

    def __init__(
        self, reader: Reader, transform: Callable[..., Any], seed: int, indices: Sequence[int], cache: bool = False
    ) -> None:
        self.reader, self.transform, self.seed, self.indices = reader, transform, seed, indices
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
                sample = self.cached[key.item] if self.cached else self.reader[self.indices[key.item]]
                if isinstance(sample, BrokenImage):
                    drawn.broken.append(sample)
                else:
                    reseed("augment", self.seed, key.epoch, key.item)
                    drawn.samples.append(self.transform(*sample))
        return drawn
