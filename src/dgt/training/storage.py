"""Checkpoint files: written whole and read back, opened without running code, and damage found before it is used.

A checkpoint is a zip of tensors and plain values as `torch.save` writes it. `torch.load` does not look at the zip's
checksums; here they are compared at every reading, so that a changed byte is told as well as a missing one.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from dgt.training.files import write_whole


def read_checkpoint(source: Path) -> dict[str, Any]:
    """Read a checkpoint of a training.

    Args:
        source: the file.

    Returns:
        What the file holds, tensors on the CPU.

    Raises:
        OSError: the file cannot be opened.
        ValueError: naming the file: cut off, damaged, Python objects inside, or not a mapping.
    """
    content = io.BytesIO(source.read_bytes())  # read first: torch.load's OSError would look like a missing permission
    size = len(content.getbuffer())
    try:
        if size and zipfile.is_zipfile(content):
            _check_sums(content)
        content.seek(0)
        stored = torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = "it is cut off or damaged" if not zipfile.is_zipfile(source) else "it holds Python objects"
        raise ValueError(f"{source} ({size} bytes) is not a checkpoint of `dgt train`: {reason}") from error
    except (RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{source} is cut off or damaged ({size} bytes)") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{source} was not written by `dgt train`: it holds no mapping")
    return stored


class SafeCheckpointIO(CheckpointIO):
    """How Lightning writes and reads checkpoints here.

    A write that fails is told on standard error and kept in `failure`, not raised: a full disk costs a checkpoint,
    not the training, and the older file is as it was. A later write that succeeds sets `failure` back to None.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint whole, read it back, and only then let it take the place of an older one."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        try:
            write_whole(Path(path), content.getbuffer(), verify=True)
            self.failure = None
        except OSError as error:
            self.failure = error
            print(
                f"dgt: warning: the checkpoint {path} could not be written: {error.strerror or error}",
                file=sys.stderr,
                flush=True,
            )

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As `read_checkpoint`; never runs code, whatever `weights_only` says."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, if it is there."""
        Path(path).unlink(missing_ok=True)


def _check_sums(content: io.BytesIO) -> None:
    """Raise ValueError for a zip whose parts do not have their checksums."""
    content.seek(0)
    with zipfile.ZipFile(content) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} does not have its checksum")
