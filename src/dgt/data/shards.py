"""Shards: a set of labelled images as a few large tar files in the WebDataset convention, read by offset.

```
SHARDS/shards.json           format, class names, and for every split its shards with their sizes and checksums
SHARDS/train-000000.tar      pairs of members, 000000042.jpeg with the file's own bytes and 000000042.cls with its label
SHARDS/train-000000.index    for every image of the tar: its number, place, length, checksum, label and old name
```

The number of an image is its place in the folder that the shards were made of, so that a training meets the same images
in the same order, with the same augmentation, from shards as from folders, and resumes as exactly. Within the tars the
images lie in a fixed random order, for programs that stream them. `dgt.data.sharding` writes all this.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dgt.data.decoding import BrokenImage, try_decode

MANIFEST = "shards.json"
SHARD_FORMAT = 1
OPEN_FILES = 256  # tars that one process keeps open
ENTRY = np.dtype([("item", "<i8"), ("offset", "<i8"), ("size", "<i8"), ("crc", "<u4"), ("label", "<i4")])


@dataclass(frozen=True)
class ShardIndex:
    """What the `.index` file of one shard tells.

    Args:
        entries: one `ENTRY` for each image, in the order of the tar.
        names: the images' paths below the folder of their split.
        plan: checksum of the whole list of images and classes that the shard is a part of.
        size: bytes of the tar.
        sha256: checksum of the tar.
        broken: why images did not decode when the shard was written, by name.
        checked: whether decoding was tried at all.
    """

    entries: NDArray[np.void]
    names: list[str]
    plan: str
    size: int
    sha256: str
    broken: dict[str, str]
    checked: bool

    def to_bytes(self) -> bytes:
        """The content of the file, an `.npz`."""
        about = {key: value for key, value in vars(self).items() if key != "entries"}
        buffer = io.BytesIO()
        np.savez(buffer, entries=self.entries, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> "ShardIndex":
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: naming `path`, where it is something else.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                entries, about = arrays["entries"], json.loads(arrays["about"].tobytes())
            if entries.dtype != ENTRY or len(entries) != len(about["names"]):
                raise ValueError("its parts contradict each other")
            return cls(entries, **about)
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is not the index of a shard, or is damaged ({error})") from error


def is_sharded(root: Path) -> bool:
    """Whether a folder holds shards, finished or not."""
    return (root / MANIFEST).is_file() or next(root.glob("*-[0-9][0-9][0-9][0-9][0-9][0-9].index"), None) is not None


def read_manifest(root: Path) -> dict[str, Any]:
    """The content of `shards.json`.

    Raises:
        ValueError: the shards are not finished, or the file is damaged or of another version.
    """
    path = root / MANIFEST
    if not path.is_file():
        raise ValueError(f"there is no {path}: no folder of shards, or one that `dgt shard` has yet to finish")
    try:
        manifest = json.loads(path.read_bytes())
        version, splits, names = manifest["format"], manifest["splits"], manifest["class_names"]
        shards = [shard for split in splits.values() for shard in split["shards"]]
        sizes = {shard["file"]: (shard["samples"], shard["bytes"], shard["sha256"], shard["index"]) for shard in shards}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not describe shards, or is damaged ({type(error).__name__}: {error})") from error
    if version != SHARD_FORMAT or not names or not sizes:
        raise ValueError(f"{path}: expected format {SHARD_FORMAT} with classes and shards, got format {version!r}")
    return dict(manifest)


def shard_splits(root: Path) -> tuple[str, ...]:
    """Names of the splits of a folder of shards, sorted.

    Raises:
        ValueError: as `read_manifest` does.
    """
    return tuple(sorted(read_manifest(root)["splits"]))


def read_index(tar: Path, sha256: str | None = None) -> ShardIndex:
    """The index beside a tar.

    Args:
        tar: the shard.
        sha256: what the checksum of the index must be.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    path = tar.with_suffix(".index")
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}, the index of {tar.name}")
    content = path.read_bytes()
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} is damaged: its checksum is not the one in {MANIFEST}")
    return ShardIndex.from_bytes(content, path)


class ShardImages:
    """The images of one split of a folder of shards, numbered as in the folder that the shards were made of.

    An image whose bytes do not have their checksum any more is a `BrokenImage`, as one that does not decode.

    Args:
        root: the folder with `shards.json`.
        split: name of the split.

    Raises:
        FileNotFoundError: a shard or its index is missing.
        ValueError: no such split; shards that are unfinished, cut off or contradict their description.
    """

    def __init__(self, root: str | os.PathLike[str], split: str = "train") -> None:
        self.root, self.split = Path(root), split
        manifest = read_manifest(self.root)
        if split not in manifest["splits"]:
            raise ValueError(f"split: {split!r} is not in {root}; splits found there: {', '.join(manifest['splits'])}")
        self.class_names: tuple[str, ...] = tuple(manifest["class_names"])
        shards = manifest["splits"][split]["shards"]
        self.tars = [self.root / shard["file"] for shard in shards]
        for tar, shard in zip(self.tars, shards, strict=True):
            check_size(tar, shard["bytes"])
        entries = [read_index(tar, shard["index"]).entries for tar, shard in zip(self.tars, shards, strict=True)]
        joined = np.concatenate(entries)
        order = np.argsort(joined["item"])
        if not np.array_equal(joined["item"][order], np.arange(len(order))):
            raise ValueError(f"the shards of split {split!r} in {root} do not hold every image once")
        self.entries = joined[order]
        self.shard_of = np.repeat(np.arange(len(entries)), [len(part) for part in entries])[order]
        self._files: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Image.Image | BrokenImage, int]:
        _, offset, size, crc, label = self.entries[index].item()
        shard = int(self.shard_of[index])
        content = os.pread(self._file(shard), size, offset)
        if len(content) == size and zlib.crc32(content) == crc:
            picture = try_decode(content, "")
            if not isinstance(picture, BrokenImage):
                return picture, label
            reason = picture.reason
        else:
            reason = f"{self.tars[shard].name} is damaged: the image's checksum differs"
        return BrokenImage(self.name(index), reason), label

    def name(self, index: int) -> str:
        """Where an image lies, for people: the tar, and the image's path before it came there."""
        index = range(len(self))[index]
        tar = self.tars[int(self.shard_of[index])]
        known = read_index(tar)
        place = int(np.flatnonzero(known.entries["item"] == index)[0])
        return f"{tar}[{known.names[place]}]"

    def _file(self, shard: int) -> int:
        """The open file of a shard; reads name their place, so that forked processes may share it."""
        if shard not in self._files:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[shard] = os.open(self.tars[shard], os.O_RDONLY)
        self._files.move_to_end(shard)
        return self._files[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def check_size(tar: Path, size: int) -> None:
    """Check that a shard is there with all its bytes.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it has another size.
    """
    if not tar.is_file():
        raise FileNotFoundError(f"there is no shard {tar}, which {MANIFEST} names")
    if tar.stat().st_size != size:
        raise ValueError(f"{tar} has {tar.stat().st_size} bytes, expected {size}: a copy that broke off?")
