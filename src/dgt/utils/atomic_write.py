"""Files that are whole or not there: written beside their place under another name, flushed, then renamed onto it.

The only module of the package that renames files into place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a name beside `path` to write a file or a folder at; it takes the place of `path` if the block succeeds.

    Args:
        path: file or folder to write or replace; the folder it lies in is made if it is missing.

    Raises:
        OSError: the folder cannot be written to or the disk is full, naming `path`; what was there is as it was.
    """
    path = Path(path)
    partial, old = (path.with_name(f".{path.name}.{os.getpid()}.{word}") for word in ("partial", "old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.is_dir() and path.exists():  # no system replaces a folder that holds files in one step
            os.replace(path, old)
        elif partial.is_file():
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
        _flush_folder(path.parent)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            raise type(error)(error.errno, error.strerror, str(path)) from error  # else a full disk names no file
        raise
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        for leftover in (partial, old):
            _remove(leftover)


def atomic_write(path: str | Path, content: str | bytes | memoryview) -> None:
    """Write a file so that a reader, a crash or a power cut never meets half of it.

    Args:
        path: file to write or replace; its folder is made if it is missing.
        content: text (stored as UTF-8) or bytes.

    Raises:
        OSError: as :func:`replacing`.
    """
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: str | Path, value: Any) -> None:
    """Write plain values as indented JSON, whole or not at all."""
    atomic_write(path, json.dumps(value, indent=2) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Remove what writes that were killed half-way left in a folder; only this process may be writing there."""
    for word in ("partial", "old"):
        for path in folder.glob(f".*.*.{word}"):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system can."""
    with suppress(OSError):  # a folder cannot be opened on Windows, nor flushed on some network file systems
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
