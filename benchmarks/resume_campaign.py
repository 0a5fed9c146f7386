"""Trainings that are stopped at random moments and resumed: do they end, to the last bit, like the one
that never stopped?

    python benchmarks/resume_campaign.py --out benchmarks/results/resume_campaign.json

There are three parts. `stops`: for each task and number of workers, one training runs through; then
others are stopped at random moments, by SIGTERM or by SIGKILL, are resumed once, and must end with
the same weights, averages, optimizer state and metrics, compared bit by bit. `kills`: one training
that saves after every step is killed again and again; each time the newest checkpoint, or the one
before, must open, and the end must again be the same. `damage`: a checkpoint is truncated at random
places, and single bits are flipped at others; each must be refused.

Every training runs in a process of its own, forked from this one, which has imported everything and
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
from typing import Any, NoReturn

import torch

from dgt.runs import load_recipe
from dgt.runs.checkpoints import latest_checkpoint, read_checkpoint, step_checkpoints
from dgt.tasks.classify import ClassificationMetrics
from dgt.tasks.segment import SegmentationMetrics
from dgt.training import fit
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
EVENTS = 3 * (6 * 4 + 4 * 2 + 2)  # that a Bomb counts in one of these trainings
COMPARED = ("model", "model_ema", "optimizer", "loss_sums")


# Events are the start and end of each: a step, its backward pass, a batch of validation, an epoch's end.
PLACES = ((Training, "train_step"), (Training, "backward"), (Training, "end_epoch"))
PLACES += ((ClassificationMetrics, "update"), (SegmentationMetrics, "update"))  # type: ignore[assignment]


class Bomb:
    """Sends this process a signal shortly after a number of events, so that the moment is random
    whatever the speed of the machine.

    Args:
        event: how many events come before.
        delay: seconds after the last of them.
        number: the signal.
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

    Returns:
        Its exit status, or minus the number of the signal that ended it.
    """
    child = os.fork()
    if child == 0:
        train_here(recipe, resume, bomb)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def train_here(
    recipe: Any, resume: bool, bomb: tuple[int, float, signal.Signals] | None
) -> NoReturn:
    """Train in this process, which writes to a log, and end it."""
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


def final_state(out: Path) -> dict[str, Any]:
    """The state with which a finished run ended, and its metrics, by name."""
    stored = read_checkpoint(step_checkpoints(out)[0])
    metrics = json.loads((out / "results.json").read_text())["metrics"]
    return leaves({key: stored[key] for key in COMPARED if key in stored}) | {"metrics": metrics}


def leaves(tree: Any) -> dict[str, Any]:
    """The leaves of nested containers, by their paths."""
    found, _ = torch.utils._pytree.tree_flatten_with_path(tree)
    return {torch.utils._pytree.keystr(path): leaf for path, leaf in found}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether all tensors have the same bits and everything else is equal."""
    return first.keys() == second.keys() and all(
        equal_values(value, second[key]) for key, value in first.items()
    )


def equal_values(one: Any, other: Any) -> bool:
    """Whether two values are equal, for tensors in all elements."""
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def train_whole(recipe: Any) -> None:
    """Train without a stop; raise RuntimeError, with the end of the log, if that fails."""
    if train(recipe, resume=False) != 0:
        log = Path(f"{recipe.out}.log").read_text()
        raise RuntimeError(f"the whole training failed:\n{log[-2000:]}")


def stop_once(
    task: str, workers: int, number: signal.Signals, folder: Path, draw: random.Random
) -> dict[str, Any]:
    """Stop a training of a task at a random moment, resume it, and compare its end with that of
    `folder`/whole.
    """
    name, keys = TASKS[task]
    words = [*keys, f"--data.num_workers={workers}"]
    whole, out = folder / "whole", folder / "stopped"
    if not whole.exists():
        train_whole(load_recipe(name, [*words, f"--out={whole}"]))
    recipe = load_recipe(name, [*words, f"--out={out}"])
    event, delay = draw.randrange(EVENTS), draw.uniform(0, 0.05)
    first = train(recipe, resume=True, bomb=(event, delay, number))
    is_unfinished = out.exists() and not (out / "results.json").exists()
    place = latest_checkpoint(out) if is_unfinished else None
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
    """Stop each task, with each number of workers, by each signal, ``count`` times in turns."""
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
    train_whole(load_recipe(name, [*words, f"--out={whole}"]))
    recipe = load_recipe(name, [*words, f"--out={out}"])
    steps, opened = [0], 0
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
    """Truncate a checkpoint, and flip single bits of it, and count how often each is refused."""
    whole, path, sound = source.read_bytes(), folder / "damaged.ckpt", read_checkpoint(source)
    found = {"truncated_refused": 0, "bits_refused": 0, "bits_without_meaning": 0, "unnoticed": 0}
    for kind in ("truncated", "bits") * count:
        offset = draw.randrange(len(whole))
        changed = bytearray(whole[:offset] if kind == "truncated" else whole)
        if kind == "bits":
            changed[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            same = equal(leaves(sound), leaves(read_checkpoint(path)))
            found["bits_without_meaning" if same else "unnoticed"] += 1
        except ValueError:
            found[f"{kind}_refused"] += 1
    return {"each": count, "bytes": len(whole), **found}


class Record:
    """The results of all parts so far, which are written as they come.

    Args:
        path: of the JSON file.
        seed: of all that is drawn.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.start = time.perf_counter()
        processor = platform.processor() or platform.machine()
        self.content: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "seed": seed,
            "machine": {"processor": processor, "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }

    def add(self, part: str, result: dict[str, Any]) -> None:
        """Add or replace the result of a part, and write everything."""
        self.content[part] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(time.perf_counter() - self.start)
        text = json.dumps({**self.content, "seconds": seconds}, indent=1)
        self.path.write_text(text + "\n")


def run_stops(
    options: argparse.Namespace, folder: Path, draw: random.Random, record: Record
) -> None:
    """Record every stop as soon as it is done."""
    rows = []
    for row in stops(options.stops, options.tasks, folder, draw):
        rows.append(row)
        print(json.dumps(row), flush=True)
        good = sum(each["bit_equal"] for each in rows)
        record.add("stops", {"count": len(rows), "bit_equal": good, "rows": rows})


def run_kills(
    options: argparse.Namespace, folder: Path, draw: random.Random, record: Record
) -> None:
    """Record the kills of one training."""
    place = folder / "kills"
    place.mkdir()
    record.add("kills", kills(options.kills, place, draw))


def run_damage(
    options: argparse.Namespace, folder: Path, draw: random.Random, record: Record
) -> None:
    """Record the damages of a checkpoint."""
    out = folder / "damage" / "run"
    out.parent.mkdir()
    train_whole(load_recipe("scenes", [*TASKS["classify"][1], f"--out={out}"]))
    record.add("damage", damage(options.damages, step_checkpoints(out)[0], folder, draw))


PARTS = {"stops": run_stops, "kills": run_kills, "damage": run_damage}


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="of the stops"
    )
    parser.add_argument(
        "--stops", type=int, default=20, help="for each task, number of workers and signal"
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--damages", type=int, default=50, help="truncations, and as many flipped bits"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/resume_campaign.json"))
    return parser.parse_args()


def main() -> None:
    """Run the parts asked for, and write what came out."""
    options = parse_arguments()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    record = Record(options.out, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name, run in PARTS.items():
            if name in options.parts:
                run(options, Path(folder), draw, record)
    print(json.dumps({key: value for key, value in record.content.items() if key != "stops"}))


if __name__ == "__main__":
    main()
