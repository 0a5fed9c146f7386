"""`dgt status`: how a run stands, from the files in its folder alone; the training itself is not asked."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dgt.training.log import LOG, STATUS, duration
from dgt.training.run import finished_results, is_run
from dgt.training.state import step_checkpoints
from dgt.utils.errors import UserError

NEEDED = {"state", "error", "time", "pid", "host", "epoch", "epochs", "step", "steps", "loss", "metrics"}
NEEDED |= {"images_per_second", "memory_bytes", "seconds"}
SILENT_AFTER = 300.0  # seconds without a sign of life: a step, or a validation's batch, may take long


def run_status(folder: str | Path) -> dict[str, Any]:
    """What is known of a run.

    Args:
        folder: the run's folder.

    Returns:
        What `status.json` holds, and `folder`, `age` (seconds since it was written), `checkpoints` (name, age in
        seconds and bytes, the newest first) and `log` (the last lines). `state` is one of "finished", "training",
        "validating", "stopped" (asked to), "failed" (see `error`), "killed" (its process is gone), "silent"
        (no sign of life) or "begun" (no step yet).

    Raises:
        FileNotFoundError: not the folder of a run.
        UserError: `status.json` is damaged.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise FileNotFoundError(f"{str(folder)!r} is not the folder of a run: it has no recipe.yaml")
    now, path = time.time(), folder / STATUS
    status: dict[str, Any] = _read(path) if path.is_file() else {"state": "begun"}
    status = {"folder": str(folder), **status, "age": now - status["time"] if "time" in status else None}
    if finished_results(folder) is not None:
        status["state"] = "finished"
    elif status["state"] in ("training", "validating"):
        status["state"] = _alive(status)
    files = [(path.name, path.stat()) for path in step_checkpoints(folder)]
    status["checkpoints"] = [{"name": name, "age": now - at.st_mtime, "bytes": at.st_size} for name, at in files]
    log = folder / LOG
    status["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if log.is_file() else []
    return status


def status_text(status: dict[str, Any]) -> str:
    """`run_status` in human-readable lines.

    Args:
        status: from `run_status`.
    """
    state, age = status["state"], "" if status["age"] is None else f" {duration(status['age'])} ago"
    after = {
        **dict.fromkeys(("training", "validating"), f", {duration(status.get('seconds_left') or 0.0)} left"),
        **dict.fromkeys(("stopped", "killed"), f"{age}; the same command with `--resume auto` goes on"),
        "silent": f": no sign of life for{age.removesuffix(' ago')}",
        "failed": f"{age}: {status.get('error')}",
    }
    lines = [f"{status['folder']}: {state}{after.get(state, age)}"]
    if "step" in status:
        place = f"epoch {status['epoch']}/{status['epochs']}, step {status['step']}/{status['steps']}"
        loss = "" if status["loss"] is None else f", loss {status['loss']:.4f}"
        speed = f"{status['images_per_second']:.0f} images/s, {status['memory_bytes'] / 2**30:.2f} GiB"
        lines += [f"  {place}{loss}, {speed}, trained for {duration(status['seconds'])}"]
        lines += ["  " + "  ".join(f"{name} {value:.4f}" for name, value in status["metrics"].items())]
    for checkpoint in status["checkpoints"][:1]:
        size = checkpoint["bytes"] / 2**20
        lines.append(f"  last checkpoint {checkpoint['name']}, {duration(checkpoint['age'])} ago, {size:.1f} MiB")
    return "\n".join([line for line in [*lines, *(f"  {line}" for line in status["log"])] if line.strip()])


def _read(path: Path) -> dict[str, Any]:
    """What `status.json` holds.

    Raises:
        UserError: the file is damaged.
    """
    try:
        status: Any = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    missing = NEEDED - set(status) if isinstance(status, dict) else NEEDED
    if missing:
        raise UserError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    return dict(status)


def _alive(status: dict[str, Any]) -> str:
    """The state, unless its process is gone, which only its own machine knows, or has said nothing for long."""
    if status["host"] == socket.gethostname():
        with suppress(PermissionError):  # somebody else's: it is there
            try:
                os.kill(status["pid"], 0)
            except ProcessLookupError:
                return "killed"
    return "silent" if status["age"] > SILENT_AFTER else str(status["state"])
