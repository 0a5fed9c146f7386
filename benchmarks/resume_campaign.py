"""Trainings that are stopped at random moments and go on: are they, to the last bit, the one that
never stopped?

    python benchmarks/resume_campaign.py --out benchmarks/results/resume_campaign.json

Three parts. `stops`: for each task and number of workers, one training runs through; then others
are stopped at random moments, by SIGTERM or by SIGKILL, go on once, and must end with the same
weights, averages, optimizer state and metrics, compared bit by bit. `kills`: one training that
saves after every step is killed again and again; each time the newest checkpoint, or the one
before, must open, and the end must again be the same. `damage`: a checkpoint is cut off at random
places, and has single bits changed at others; each must be refused.

Every training is a process of its own, forked from this one, which has imported everything and
computed nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dgt.runs.checkpoints import latest_checkpoint, read_checkpoint, step_checkpoints
from dgt.tasks.classify import ClassificationMetrics
from dgt.tasks.segment import SegmentationMetrics
from dgt.training import fit, load_recipe
from dgt.training.loop import Training

SMALL = (
    "{stem_width: 8, dims: [16, 32, 64, 64], num_heads: [1, 2, 2, 2], depths: [1, 1, 1, 1], "
    "num_groups: 4, top_k: 8}"
)
COMMON = (
    "--model.name=dgt_nano",
    f"--model.args={SMALL}",
    "--model.drop_path_rate=0.3",
    "--data.train_size=48",
    "--data.val_size=16",
    "--data.batch_size=4",
    "--schedule.epochs=3",
    "--schedule.warmup_epochs=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.accumulate=2",
    "--trainer.deterministic=true",
    "--checkpoint.every_steps=2",
)
TASKS = {
    "classify": (
        "scenes",
        (*COMMON, "--ema.decay=1e-9", "--data.image_size=32", "--data.augmentation.mixup=0.8"),
    ),
    "segment": ("scenes_segment", (*COMMON, "--ema.decay=1e-9", "--data.image_size=64")),
}
EVENTS = 3 * (6 * 4 + 4 * 2 + 2)  # of a Bomb, in one of these trainings
COMPARED = ("model", "model_ema", "optimizer", "loss_sums")


# Before and after each: a step, its forward and backward, a validation's batch, an epoch's end.
PLACES = ((Training, "train_step"), (Training, "backward"), (Training, "end_epoch"))
PLACES += ((ClassificationMetrics, "update"), (SegmentationMetrics, "update"))  # type: ignore[assignment]


class Bomb:
    """Sends this process a signal a moment after a number of events: random, whatever the speed of
    the machine.
    """

    def __init__(self, event: int, delay: float, number: signal.Signals) -> None:
        self.events = event
        self.timer = threading.Timer(delay, os.kill, (os.getpid(), number))
        self.timer.daemon = True

    def arm(self) -> None:
        """Count the events of the training that this process will run."""
        for owner, name in PLACES:
            setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, method: Any) -> Any:
        def counted(*arguments: Any, **keys: Any) -> Any:
            self._count()
            found = method(*arguments, **keys)
            self._count()
            return found

        return counted

    def _count(self) -> None:
        if self.events == 0:
            self.timer.start()
        self.events -= 1


def train(recipe: Any, resume: bool, bomb: tuple[int, float, signal.Signals] | None = None) -> int:
    """Train in a forked process.

    Returns its exit status, minus the signal's number where one ended it.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with Path(f"{recipe.out}.log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if bomb is not None:
                Bomb(*bomb).arm()
            fit(recipe, resume=resume)
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        except BaseException as error:  # to the log, not up into the campaign
            print(repr(error), flush=True)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def final_state(out: Path) -> dict[str, Any]:
    """What a finished run ended with, by name."""
    stored = read_checkpoint(step_checkpoints(out)[0])
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(
        {key: stored[key] for key in COMPARED if key in stored}
    )
    metrics = json.loads((out / "results.json").read_text())["metrics"]
    return {**{torch.utils._pytree.keystr(path): leaf for path, leaf in leaves}, "metrics": metrics}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether all tensors have the same bits and all else is equal."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        for key, value in first.items()
    )


def stop_once(
    task: str, workers: int, number: signal.Signals, folder: Path, draw: random.Random
) -> dict[str, Any]:
    """Stop a training of a task at a random moment, let it go on, and compare its end with that of
    `folder`/whole.
    """
    name, keys = TASKS[task]
    words, whole, out = (
        [*keys, f"--data.num_workers={workers}"],
        folder / "whole",
        folder / "stopped",
    )
    if (
        not whole.exists()
        and train(load_recipe(name, [*words, f"--out={whole}"]), resume=False) != 0
    ):
        raise RuntimeError(
            f"the whole training failed:\n{Path(f'{whole}.log').read_text()[-2000:]}"
        )
    recipe = load_recipe(name, [*words, f"--out={out}"])
    event, delay = draw.randrange(EVENTS), draw.uniform(0, 0.05)
    first = train(recipe, resume=True, bomb=(event, delay, number))
    begun = out.exists() and not (out / "results.json").exists()
    place = latest_checkpoint(out) if begun else None
    same = train(recipe, resume=True) == 0 and equal(final_state(whole), final_state(out))
    shutil.rmtree(out, ignore_errors=True)
    row = {
        "task": task,
        "workers": workers,
        "signal": number.name,
        "event": event,
        "delay": round(delay, 3),
    }
    return {
        **row,
        "status": first,
        "resumed_after_step": place and place[1]["progress"]["step"],
        "bit_equal": same,
    }


def stops(
    count: int, tasks: Sequence[str], folder: Path, draw: random.Random
) -> Iterator[dict[str, Any]]:
    """As many stops of each task, with each number of workers, by each signal; in turns."""
    for _ in range(count):
        for task, workers, number in product(tasks, (0, 2), (signal.SIGTERM, signal.SIGKILL)):
            place = folder / f"{task}-{workers}"
            place.mkdir(exist_ok=True)
            yield stop_once(task, workers, number, place, draw)


def kills(count: int, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Kill one training again and again while it saves after every step."""
    name, keys = TASKS["classify"]
    words = [
        *keys,
        "--checkpoint.every_steps=1",
        "--trainer.accumulate=1",
        f"--schedule.epochs={count // 12 + 4}",
    ]
    whole, out = folder / "whole", folder / "killed"
    train(load_recipe(name, [*words, f"--out={whole}"]), resume=False)
    recipe, steps, opened = load_recipe(name, [*words, f"--out={out}"]), [0], 0
    for _ in range(count):
        # a step's end: the write comes next
        event, delay = 4 * draw.randrange(1, 3) - 1, draw.uniform(0, 0.03)
        status = train(recipe, resume=True, bomb=(event, delay, signal.SIGKILL))
        place = latest_checkpoint(out)
        opened += place is not None or not (out / "checkpoints").is_dir()
        steps.append(place[1]["progress"]["step"] if place else 0)
        if status == 0:
            break
    status = train(recipe, resume=True)
    return {
        "kills": len(steps) - 1,
        "opened": opened,
        "steps_never_fell": steps == sorted(steps),
        "last_step": steps[-1],
        "bit_equal": status == 0 and equal(final_state(whole), final_state(out)),
    }


def damage(count: int, source: Path, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Cut a checkpoint off, and change single bits of it."""
    whole, path, sound = source.read_bytes(), folder / "damaged.ckpt", read_checkpoint(source)
    found = {"truncated_refused": 0, "bits_refused": 0, "bits_without_meaning": 0, "unnoticed": 0}
    for kind in ("truncated", "bits") * count:
        offset = draw.randrange(len(whole))
        changed = bytearray(whole[:offset] if kind == "truncated" else whole)
        if kind == "bits":
            changed[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            same = equal_content(sound, read_checkpoint(path))
            found["bits_without_meaning" if same else "unnoticed"] += 1
        except ValueError:
            found[f"{kind}_refused"] += 1
    return {"each": count, "bytes": len(whole), **found}


def equal_content(first: Any, second: Any) -> bool:
    """Whether two checkpoints hold the same."""
    one, two = (torch.utils._pytree.tree_flatten_with_path(each)[0] for each in (first, second))
    return equal(
        *({torch.utils._pytree.keystr(path): leaf for path, leaf in each} for each in (one, two))
    )


def write(result: dict[str, Any], start: float, out: Path) -> None:
    """Write what is known so far."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({**result, "seconds": round(time.perf_counter() - start)}, indent=1) + "\n"
    )


def main() -> None:
    """Run the parts asked for, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--parts", nargs="+", default=["stops", "kills", "damage"], help="stops, kills, damage"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the stops")
    parser.add_argument(
        "--stops", type=int, default=20, help="for each task, number of workers and signal"
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--damages", type=int, default=50, help="truncations, and as many changed bits"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/resume_campaign.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, start = random.Random(options.seed), time.perf_counter()
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "seed": options.seed,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "stops" in options.parts:
            rows = []
            for row in stops(options.stops, options.tasks, folder, draw):
                rows.append(row)
                print(json.dumps(row), flush=True)
                good = sum(each["bit_equal"] for each in rows)
                result["stops"] = {"count": len(rows), "bit_equal": good, "rows": rows}
                write(result, start, options.out)
        if "kills" in options.parts:
            (folder / "kills").mkdir()
            result["kills"] = kills(options.kills, folder / "kills", draw)
            write(result, start, options.out)
        if "damage" in options.parts:
            out = folder / "damage" / "run"
            out.parent.mkdir()
            train(load_recipe("scenes", [*TASKS["classify"][1], f"--out={out}"]), resume=False)
            result["damage"] = damage(options.damages, step_checkpoints(out)[0], folder, draw)
            write(result, start, options.out)
    print(json.dumps({key: value for key, value in result.items() if key != "stops"}))


if __name__ == "__main__":
    main()
