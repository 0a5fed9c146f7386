"""Checkpoints as files: how they are named, read and checked, and which one a training resumes
from.

A checkpoint is a zip of tensors and plain values as `torch.save` writes it. It is opened without
running code, and refused if any part fails its checksum, which `torch.load` alone does not check. A
run keeps the newest `checkpoint.keep` of them, `step-00001234.ckpt` after that many optimizer
steps, and the best validation's, `best.ckpt`.
"""

from __future__ import annotations

import io
import pickle
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from dgt.utils.errors import LOGGER, UserError

FORMAT = 4
RECORD_KEY = "dgt"
BEST = "best.ckpt"
MODEL = "model"
"""Key of the weights that the optimizer steps."""
MODEL_EMA = "model_ema"
"""Key of their exponential moving average; missing in a training without one."""


@dataclass
class Progress:
    """How far a training is.

    No random state: every choice is a function of (seed, epoch, index).
    """

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches of the current epoch that this process has seen
    step: int = 0  # optimizer steps taken, including skipped ones
    skipped: int = 0  # steps whose loss or gradients were not finite
    skipped_in_a_row: int = 0
    best: float | None = None  # best value of the task's headline metric so far
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    seconds: float = 0.0  # trained so far, over all processes that took turns


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder that a training can resume from, newest first."""
    return sorted((folder / "checkpoints").glob("step-*.ckpt"), reverse=True)


def latest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Find the newest intact checkpoint of a run; the best validation's where there is no other.

    Returns:
        Its path and content; None if the run has no checkpoint.

    Raises:
        UserError: there are checkpoints, and none is intact.
    """
    paths = step_checkpoints(folder)
    best = folder / "checkpoints" / BEST
    if best.is_file():
        paths.append(best)
    for path in paths:
        try:
            stored = read_checkpoint(path)
            if stored.get("format") != FORMAT:
                raise UserError(
                    f"it has format {stored.get('format')}, this version reads {FORMAT}"
                )
            return path, stored
        except (UserError, OSError) as error:
            LOGGER.warning(f"{path.name} cannot be used, trying the one before: {error}")
    if not paths:
        return None
    what = f"all {len(paths)} checkpoints in {folder / 'checkpoints'} are damaged or from another version"
    raise UserError(f"{what}: remove that folder to start over")


def read_checkpoint(source: Path) -> dict[str, Any]:
    """Read a checkpoint, with tensors on the CPU.

    Raises:
        OSError: the file cannot be opened.
        UserError: the file is cut off, damaged, or was not written by `dgt train`.
    """
    import torch  # only here: the names of checkpoints are read without

    # read first: torch.load's OSError would look like a missing permission
    content = io.BytesIO(source.read_bytes())
    stored = None
    with suppress(
        RuntimeError, EOFError, OSError, ValueError, BadZipFile, zlib.error, pickle.UnpicklingError
    ):
        if ZipFile(content).testzip() is None:  # every part has its checksum
            content.seek(0)
            stored = torch.load(content, map_location="cpu", weights_only=True)
    if not isinstance(stored, dict):
        raise UserError(
            f"{source} is truncated or damaged ({len(content.getbuffer())} bytes), or contains Python objects"
        )
    return stored


def evaluated_weights(stored: dict[str, Any]) -> Any:
    """The weights in a checkpoint that are evaluated: the average if there is one; None where both are missing."""
    return stored.get(MODEL_EMA, stored.get(MODEL))
