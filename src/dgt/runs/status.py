"""`status.json` of a run, read by `dgt status` during and after a training."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from dgt.runs.checkpoints import Progress, step_checkpoints
from dgt.utils.json_files import read_json

STATUS = "status.json"
RUNNING = ("begun", "training", "validating")
INITIAL_STATUS: dict[str, Any] = {
    "state": "unknown",
    "error": None,
    **asdict(Progress()),
    "epochs": 0,
    "steps": 0,
    "seconds_left": None,
    "loss": None,
    "images_per_second": 0.0,
    "time": 0.0,
    "pid": 0,
    "host": "",
}


def run_status(folder: str | Path) -> dict[str, Any]:
    """Read the status of a run.

    Args:
        folder: folder of the run.

    Returns:
        The content of `status.json`, with `folder`, `age` (seconds since it was written; 0 where it
        is dated in the future, and `clock` says so) and `checkpoints`, newest first. `state` is
        "begun", "training", "validating", "finished", "stopped" (on request), "failed" (see
        `error`) or "killed" (the process is gone).

    Raises:
        FileNotFoundError: this is not the folder of a run.
        UserError: the status is damaged.
    """
    folder = Path(folder)
    if not (folder / STATUS).is_file():
        raise FileNotFoundError(f"{str(folder)!r} is not a run folder: it has no {STATUS}")
    status = {**INITIAL_STATUS, **read_json(folder / STATUS)}
    status["folder"] = str(folder)
    age = time.time() - status["time"]
    status["age"] = max(0.0, age)
    if age < -1:
        status["clock"] = f"the status is dated {timedelta(seconds=round(-age))} in the future"
    status["checkpoints"] = [path.name for path in step_checkpoints(folder)]
    if status["state"] in RUNNING and status["host"] == socket.gethostname():
        try:
            with suppress(PermissionError):  # a process of another user
                os.kill(status["pid"], 0)
        except ProcessLookupError:
            status["state"] = "killed"
    return status


def status_text(status: dict[str, Any]) -> str:
    """Lay the result of `run_status` out as text, with times as `0:12:05` or `2 days, 4:00:00`."""
    times = {
        key: timedelta(seconds=round(status[key] or 0))
        for key in ("age", "seconds", "seconds_left")
    }
    shown = {
        key: value for key, value in {**status, **times}.items() if value not in (None, {}, [])
    }
    return "\n".join(f"{key:<20}{value}" for key, value in shown.items())
