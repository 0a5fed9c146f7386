"""Writing shards from class folders: in parallel, resumable, the same bytes every time, and checked afterwards.

Files are copied as they are. Unless told not to, every image is decoded once on the way; those that fail are kept, so
that the numbering is that of the folders, and listed, as everywhere.
"""

import hashlib
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dgt.data.decoding import BrokenImage, BrokenImages, try_decode, write_broken_images
from dgt.data.images import ImageFolder, folder_names
from dgt.utils.seeding import generator
from dgt.data.shards import ENTRY, MANIFEST, SHARD_FORMAT, ShardIndex, check_size, read_index, read_manifest

BROKEN_IMAGES = "broken_images.txt"


@dataclass(frozen=True)
class Sharded:
    """What `write_shards` did.

    Args:
        written: shards written.
        kept: shards that an earlier run had finished.
        images: images in all shards.
        broken: images that do not decode, listed in `broken_images.txt`; None where nobody looked.
    """

    written: int
    kept: int
    images: int
    broken: int | None

    def text(self) -> str:
        """One line for people."""
        kept = f" ({self.kept} were there already)" if self.kept else ""
        found = "not checked" if self.broken is None else f"{self.broken} of them broken"
        listed = f", listed in {BROKEN_IMAGES}" if self.broken else ""
        return f"{self.images} images in {self.written + self.kept} shards{kept}; {found}{listed}"


@dataclass(frozen=True)
class _Job:
    """One shard to write: its tar, and its images as (number, path, name, label)."""

    tar: Path
    images: list[tuple[int, str, str, int]]
    plan: str


def write_shards(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    samples: int = 4096,
    workers: int | None = None,
    check: bool = True,
    report: Callable[[str], None] = print,
) -> Sharded:
    """Write class folders as shards; run again after an interruption, it goes on where it was.

    Args:
        source: folder with `SPLIT/CLASS/` folders of images; every split that holds class folders is written.
        out: folder of the shards.
        samples: images in a shard.
        workers: shards written at a time; None for the number of cores.
        check: decode every image, to list those that fail.
        report: told a line for every finished shard.

    Raises:
        FileNotFoundError, ValueError: `source` is not such a folder; a count below 1; `out` lies in `source` or holds
            shards of other images.
        OSError: an image cannot be read, or a shard cannot be written; the shards finished so far stay.
    """
    for name, value in (("samples", samples), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    source, out = Path(source), Path(out)
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"out must lie outside the folder of the images, got {out} in {source}")
    splits = _open_splits(source)
    jobs = {split: _plan(split, images, source, out, samples) for split, images in splits.items()}
    todo = [job for split in jobs.values() for job in split if not _is_finished(job, check)]
    out.mkdir(parents=True, exist_ok=True)
    for left_behind in out.glob(".*.part"):
        left_behind.unlink()
    _write_all(todo, workers or os.cpu_count() or 1, check, report)
    broken = _describe(out, splits, jobs)
    total = sum(len(split) for split in jobs.values())
    images = sum(len(split) for split in splits.values())
    return Sharded(len(todo), total - len(todo), images, broken)


def verify_shards(root: str | os.PathLike[str], report: Callable[[str], None] = print) -> list[Path]:
    """Read every shard and compare its checksum with the one it was written with.

    Args:
        root: the folder of the shards.
        report: told a line for every damaged shard.

    Returns:
        The damaged or missing tars. Deleting one and running `dgt shard` again writes it anew.

    Raises:
        FileNotFoundError, ValueError: there are no finished shards in `root`.
    """
    root, damaged = Path(root), []
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder of shards {root}")
    for split in read_manifest(root)["splits"].values():
        for shard in split["shards"]:
            tar = root / shard["file"]
            try:
                check_size(tar, shard["bytes"])
                read_index(tar, shard["index"])
                if _sha256(tar) != shard["sha256"]:
                    raise ValueError(f"{tar} is damaged: its checksum is not the one in {MANIFEST}")
            except (FileNotFoundError, ValueError) as error:
                damaged.append(tar)
                report(str(error))
    return damaged


def _open_splits(source: Path) -> dict[str, ImageFolder]:
    """Every split of a folder, with the classes of the training split."""
    if not source.is_dir():
        raise FileNotFoundError(f"there is no folder {source} with SPLIT/CLASS/ folders of images")
    names = [name for name in folder_names(source) if folder_names(source / name)]
    if not names:
        raise ValueError(f"expected SPLIT/CLASS/ folders of images in {source}, found no folder in a folder")
    first = next((name for name in ("train", "training") if name in names), names[0])
    classes = ImageFolder(source, first).class_names
    return {name: ImageFolder(source, name, classes) for name in names}


def _plan(split: str, images: ImageFolder, source: Path, out: Path, samples: int) -> list[_Job]:
    """The shards of a split: its images in a fixed random order, cut in equal lengths.

    Raises:
        ValueError: a shard of other images has a place of theirs already.
    """
    names = [os.path.relpath(path, source / split) for path, _ in images.samples]
    plan = hashlib.sha256(json.dumps([samples, images.class_names, names]).encode()).hexdigest()
    order = generator("shards", split).permutation(len(names)).tolist()
    parts = [order[start : start + samples] for start in range(0, len(order), samples)]
    listed = [(i, path, name, label) for i, ((path, label), name) in enumerate(zip(images.samples, names, strict=True))]
    jobs = [
        _Job(out / f"{split}-{number:06d}.tar", [listed[i] for i in part], plan) for number, part in enumerate(parts)
    ]
    places = {job.tar.name for job in jobs}
    for tar in sorted(out.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9][0-9].tar")):
        index = _known_index(tar)
        if tar.name not in places or (index is not None and index.plan != plan):
            other = f"a shard of other images than those now in {source}, or of another number of them"
            raise ValueError(f"{tar} is {other}: give another folder, or the same --samples")
    return jobs


def _is_finished(job: _Job, check: bool) -> bool:
    """Whether an earlier run wrote a shard and its index, and looked at the images where this one would."""
    index = _known_index(job.tar) if job.tar.is_file() else None
    return index is not None and job.tar.stat().st_size == index.size and (index.checked or not check)


def _known_index(tar: Path) -> ShardIndex | None:
    """The index of a shard, or None where it is missing or damaged: such a shard is written anew."""
    try:
        return read_index(tar)
    except (FileNotFoundError, ValueError):
        return None


def _write_all(jobs: Sequence[_Job], workers: int, check: bool, report: Callable[[str], None]) -> None:
    """Write shards, several at a time: copying, checksums and decoders leave the interpreter's lock."""
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(_write, job, check): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(running), 1):
                size = future.result()
                job = running[future]
                report(f"{job.tar.name}  {len(job.images)} images  {size / 1e6:.1f} MB  ({done} of {len(jobs)})")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _write(job: _Job, check: bool) -> int:
    """Write one shard and then its index, each whole or not at all; return the bytes of the tar."""
    entries, broken = np.zeros(len(job.images), ENTRY), {}

    def blocks() -> Iterator[bytes]:
        offset = 0
        for place, (item, path, name, label) in enumerate(job.images):
            content = Path(path).read_bytes()
            image = _member(f"{item:09d}{Path(path).suffix.lower()}", content)
            entries[place] = (item, offset + tarfile.BLOCKSIZE, len(content), zlib.crc32(content), label)
            label_member = _member(f"{item:09d}.cls", str(label).encode())
            offset += len(image) + len(label_member)
            yield image
            yield label_member
            picture = try_decode(content, name) if check else None
            if isinstance(picture, BrokenImage):
                broken[name] = picture.reason
        yield bytes(2 * tarfile.BLOCKSIZE)

    size, sha256 = _write_flushed(job.tar, blocks())
    index = ShardIndex(entries, [name for _, _, name, _ in job.images], job.plan, size, sha256, broken, check)
    _write_flushed(job.tar.with_suffix(".index"), [index.to_bytes()])
    return size


def _member(name: str, content: bytes) -> bytes:
    """A file as a tar holds it: a header of one block, without times and owners so that the same images give the same
    bytes, and the content, filled up to whole blocks.
    """
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def _write_flushed(path: Path, blocks: Iterable[bytes]) -> tuple[int, str]:
    """Write a file under another name, flush it to the disk and give it its name; return its bytes and SHA-256."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    digest = hashlib.sha256()
    try:
        with os.fdopen(handle, "wb") as file:
            for block in blocks:
                digest.update(block)
                file.write(block)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return size, digest.hexdigest()


def _describe(out: Path, splits: dict[str, ImageFolder], jobs: dict[str, list[_Job]]) -> int | None:
    """Write `shards.json` and `broken_images.txt`; return the number of broken images, None where nobody looked."""
    ledgers, checked = [], True
    manifest: dict[str, Any] = {"format": SHARD_FORMAT, "class_names": [], "splits": {}}
    for split, images in splits.items():
        ledger = BrokenImages(split, len(images), 1.0)
        shards = []
        for job in jobs[split]:
            index = read_index(job.tar)
            checked = checked and index.checked
            ledger.record(BrokenImage(f"{job.tar}[{name}]", reason) for name, reason in index.broken.items())
            shards.append(
                {
                    "file": job.tar.name,
                    "samples": len(job.images),
                    "bytes": index.size,
                    "sha256": index.sha256,
                    "index": _sha256(job.tar.with_suffix(".index")),
                }
            )
        manifest["class_names"] = list(images.class_names)
        manifest["splits"][split] = {"samples": len(images), "shards": shards}
        ledgers.append(ledger)
    broken = write_broken_images(out / BROKEN_IMAGES, ledgers) if checked else None
    content = json.dumps(manifest, indent=1).encode()
    _write_flushed(out / MANIFEST, [content])
    return broken


def _sha256(path: Path) -> str:
    """The checksum of a file, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
