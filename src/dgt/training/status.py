"""`dgt status`: how a run stands, from the files in its folder alone; the training itself is not asked."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dgt.training.log import LOG, STATUS, duration
from dgt.training.run import finished_results, is_run, read_json
from dgt.training.state import step_checkpoints

NEEDED = (
    *("state", "error", "time", "pid", "host", "epoch", "epochs", "step", "steps", "loss", "metrics"),
    *("images_per_second", "memory_bytes", "seconds"),
)
SILENT_AFTER = 300.0  # seconds without a sign of life: a step, or a validation's batch, may take long


def run_status(folder: str | Path) -> dict[str, Any]:
    """What is known of a run: what `status.json` holds, and `folder`, `age`, `checkpoints` (newest first) and `log`.

    `state` is "begun" (no step yet), "training", "validating", "finished", "stopped" (asked to), "failed" (see
    `error`), "killed" (its process is gone) or "silent" (no sign of life).

    Raises:
        FileNotFoundError: not the folder of a run.
        UserError: a file in it is damaged.
    """
    folder, now = Path(folder), time.time()
    if not is_run(folder):
        raise FileNotFoundError(f"{str(folder)!r} is not the folder of a run: it has no recipe.yaml")
    status: dict[str, Any] = {"state": "begun", "time": None}
    if (folder / STATUS).is_file():
        status = read_json(folder / STATUS, NEEDED)
    status |= {"folder": str(folder), "age": status["time"] and now - status["time"]}
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
    """`run_status` in human-readable lines."""
    state, ago = status["state"], "" if status["age"] is None else f" {duration(status['age'])}"
    after = {
        **dict.fromkeys(("training", "validating"), f", {duration(status.get('seconds_left') or 0.0)} left"),
        **dict.fromkeys(("stopped", "killed"), f"{ago} ago; the same command with `--resume auto` goes on"),
        **{"silent": f": no sign of life for{ago}", "failed": f"{ago} ago: {status.get('error')}", "begun": ""},
    }
    lines = [f"{status['folder']}: {state}{after.get(state, f'{ago} ago')}"]
    if "step" in status:
        place = f"epoch {status['epoch']}/{status['epochs']}, step {status['step']}/{status['steps']}"
        loss = "" if status["loss"] is None else f", loss {status['loss']:.4f}"
        speed = f"{status['images_per_second']:.0f} images/s, {status['memory_bytes'] / 2**30:.2f} GiB"
        lines += [f"  {place}{loss}, {speed}, trained for {duration(status['seconds'])}"]
        lines += ["  " + "  ".join(f"{name} {value:.4f}" for name, value in status["metrics"].items())]
    for checkpoint in status["checkpoints"][:1]:
        size = checkpoint["bytes"] / 2**20
        lines += [f"  last checkpoint {checkpoint['name']}, {duration(checkpoint['age'])} ago, {size:.1f} MiB"]
    return "\n".join([line for line in [*lines, *(f"  {line}" for line in status["log"])] if line.strip()])


def _alive(status: dict[str, Any]) -> str:
    """The state, unless its process is gone, which only its own machine knows, or has said nothing for long."""
    if status["host"] == socket.gethostname():
        with suppress(PermissionError):  # somebody else's: it is there
            try:
                os.kill(status["pid"], 0)
            except ProcessLookupError:
                return "killed"
    return "silent" if status["age"] > SILENT_AFTER else str(status["state"])
