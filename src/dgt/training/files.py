"""Files that are whole or not there: written beside their place under another name, flushed, then renamed onto it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, never meets half of it.

    Args:
        path: file to write or replace; its folder is made if it is missing.
        content: text (stored as UTF-8) or bytes.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write plain values as indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2) + "\n")
