"""`dgt status`: how a run stands, from the files in its folder alone; the training itself is not asked."""

from __future__ import annotations

import os
import socket
import time
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
    status: dict[str, Any] = {"state": "begun", "time": (folder / "recipe.yaml").stat().st_mtime}
    if (folder / STATUS).is_file():
        status = read_json(folder / STATUS, NEEDED)
    status |= {"folder": str(folder), "age": now - status["time"]}
    if finished_results(folder) is not None:
        status["state"] = "finished"
    elif status["state"] in ("training", "validating"):
        gone = status["host"] == socket.gethostname() and not _is_alive(status["pid"])
        status["state"] = "killed" if gone else "silent" if status["age"] > SILENT_AFTER else status["state"]
    files = [(path.name, path.stat()) for path in step_checkpoints(folder)]
    status["checkpoints"] = [{"name": name, "age": now - at.st_mtime, "bytes": at.st_size} for name, at in files]
    log = folder / LOG
    status["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if log.is_file() else []
    return status


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # somebody else's
    return True


def status_text(status: dict[str, Any]) -> str:
    """`run_status` in human-readable lines."""
    ago = f" {duration(status['age'])}"
    after = {
        **dict.fromkeys(("training", "validating"), f", {duration(status.get('seconds_left') or 0.0)} left"),
        **dict.fromkeys(("stopped", "killed"), f"{ago} ago; the same command with `--resume auto` resumes"),
        **{"silent": f": no sign of life for{ago}", "failed": f"{ago} ago: {status.get('error')}"},
    }
    lines = [f"{status['folder']}: {status['state']}{after.get(status['state'], f'{ago} ago')}"]
    if "step" in status:
        lines += [f"  epoch {status['epoch']}/{status['epochs']}, step {status['step']}/{status['steps']}"]
        lines[-1] += "" if status["loss"] is None else f", loss {status['loss']:.4f}"
        lines[-1] += f", {status['images_per_second']:.0f} images/s, {status['memory_bytes'] / 2**30:.2f} GiB"
        lines[-1] += f", trained for {duration(status['seconds'])}"
        lines += ["  " + "  ".join(f"{name} {value:.4f}" for name, value in status["metrics"].items())]
    for last in status["checkpoints"][:1]:
        lines += [f"  last checkpoint {last['name']}, {duration(last['age'])} ago, {last['bytes'] / 2**20:.1f} MiB"]
    return "\n".join([line for line in [*lines, *(f"  {line}" for line in status["log"])] if line.strip()])
