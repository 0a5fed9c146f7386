"""Files that are whole or not there: written beside their place under another name, flushed, then renamed onto it."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

CHUNK = 1 << 22


def write_whole(path: Path, content: str | bytes | memoryview, verify: bool = False) -> None:
    """Write a file so that a reader, a crash or a power cut never meets half of it.

    Args:
        path: file to write or replace; its folder is made if it is missing.
        content: text (stored as UTF-8) or bytes.
        verify: read the bytes back, from the disk where the system allows, before they take the old file's place.

    Raises:
        OSError: the folder cannot be written to, the disk is full, or it gives back other bytes than were written; an
            older file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = memoryview(content.encode("utf-8") if isinstance(content, str) else content)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if verify:
            _check_written(Path(temporary), data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise type(error)(error.errno, error.strerror, str(path)) from error  # else a full disk names no file
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system can."""
    with suppress(OSError):  # a folder cannot be opened on Windows, nor flushed on some network file systems
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove what writes that were killed half-way left in a folder; only this process may be writing there."""
    for path in folder.glob(".*.*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write plain values as indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def _check_written(path: Path, data: memoryview) -> None:
    """Raise OSError unless a file holds these bytes."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # else the answer comes from memory and says nothing of the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    if path.stat().st_size != len(data) or checksum != zlib.crc32(data):
        raise OSError(f"{path.parent} gave back other bytes than were written to it")
