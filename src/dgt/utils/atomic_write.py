"""Atomic writes: files are written next to their destination under another name, flushed, then renamed.

And folders in which one process alone writes. The only module of the package that renames files
into place.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dgt.utils.errors import UserError

LEFTOVERS = ("partial", "old")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a name beside `path` to write a file or a folder at; it takes the place of `path` if the
    block succeeds.

    The folder that `path` lies in is made if it is missing. Where the block fails, what was there
    is as it was. A link stays, and what it leads to is replaced; a device or a pipe, such as
    `/dev/null`, is written to itself.

    Raises OSError, naming `path`, where the folder cannot be written to or the disk is full.
    """
    path = Path(path)
    if _is_special(path):
        yield path
        return
    if path.is_symlink():
        path = path.resolve()
    partial, old = (path.with_name(f".{path.name}.{os.getpid()}.{word}") for word in LEFTOVERS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        # no system replaces a folder that holds files in one step
        if partial.is_dir() and path.exists():
            os.replace(path, old)
        elif partial.is_file():
            _flush(partial)
        os.replace(partial, path)
        with suppress(OSError):  # Windows opens no folder, some network file systems flush none
            _flush(path.parent)
    except OSError as error:
        if error.errno is not None and error.filename in (None, partial, str(partial)):
            # else a full disk names no file
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        _remove(partial, old)


def check_writable(path: str | Path, what: str) -> None:
    """Raise UserError, naming `what`, for a file that cannot be written: before the work whose result
    it is to hold.
    """
    place = Path(path)
    above = next(folder for folder in place.absolute().parents if folder.exists())
    if place.is_dir():
        raise UserError(f"{what} {str(path)!r} cannot be written: it is a folder")
    if _is_special(place):
        return
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(
            f"{what} {str(path)!r} cannot be written: no file can be created in {str(above)!r}"
        )


def _is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def atomic_write(path: str | Path, content: str | bytes | memoryview) -> None:
    """Write text (as UTF-8) or bytes so that a reader, a crash or a power cut never meets half of a
    file.

    Raises OSError as :func:`replacing`.
    """
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: str | Path, value: Any) -> None:
    """Write plain values as indented JSON, atomically."""
    atomic_write(path, json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """Plain values as JSON; null stands for NaN and infinities, which it does not have."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Make the folder and keep a second process, which would take what is unfinished for left over,
    out of it.

    However this one ends, the system lets go of its lock at once: no child of it, as a loader's
    worker is one, has it. Where there are no such locks (Windows, some file systems of networks),
    nobody is kept out.

    Raises FileExistsError where another process is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            import fcntl

            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise FileExistsError(f"another process is using {folder}") from error
        except (ImportError, OSError):
            pass
        yield


def remove_leftovers(folder: Path) -> None:
    """Remove what writes that were killed half-way left in a folder.

    Only this process may be writing there.
    """
    for word in LEFTOVERS:
        _remove(*folder.glob(f".*.*.{word}"))


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Make a file's content, or renames in a folder, last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
