"""One wrapper for the data sets of all tasks: a reader's samples through a transform whose every random choice is a
function of (seed, epoch, index).
"""

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
    """The samples of one batch before they are collated: the first key, what could be read, and what could not."""

    key: Key
    samples: list[Any]
    broken: list[BrokenImage]


class Reader(Protocol):
    """What is wrapped: samples as tuples, or a `BrokenImage`, by index."""

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class SeededDataset(Dataset[Any]):
    """Some samples of a reader through a transform.

    Args:
        reader: gives the samples.
        transform: makes a transformed sample of the parts of one; may draw from the global random generators.
        seed: what it draws is a function of (seed, epoch, item).
        indices: which of the reader's samples, in this order.
        cache: read every sample once, into memory.
    """

    def __init__(
        self, reader: Reader, transform: Callable[..., Any], seed: int, indices: Sequence[int], cache: bool = False
    ) -> None:
        self.reader, self.transform, self.seed, self.indices = reader, transform, seed, indices
        self.class_names = reader.class_names
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
