"""What an experiment writes as it goes: a folder for one process alone, and its rows as JSON and Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dgt.experiments.tables import Row, Table
from dgt.models import cost
from dgt.tasks import TASKS
from dgt.training import load_run
from dgt.training.recipe import load_recipe
from dgt.training.run import RESULTS, read_json
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import UserError
from dgt.utils.records import markdown_table

DIAGNOSIS = "diagnosis.json"
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # half of a 95 % interval, by degrees of freedom
MEASURES = {  # of `diagnose`, means over the blocks where k is below the number of tokens
    "selected": "mass on selected keys",
    "random": "on random keys",
    "window": "on a window",
    "best_for_all": "best k for all",
    "best_for_group": "best k of the group",
    "best_for_query": "best k of the query",
    "perplexity": "perplexity of groups",
}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder and keep a second process out of it, which would take unfinished runs for left over.

    Raises:
        FileExistsError: another process is in it.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it however the process ends
        except BlockingIOError as error:
            raise FileExistsError(f"another process is at work in {folder}") from error
        yield


def stored(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What an experiment has written with these settings; None for nothing. Raises UserError for anything else."""
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        theirs = content["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold results of this experiment: move it, or give another --out") from error
    if theirs != settings:
        raise UserError(f"{path} has other settings, {theirs}, than {settings}: give another folder with --out")
    return content


def read_words(words: Sequence[str], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Options in the words of a command line, and the words that set a recipe's keys, `--data.KEY VALUE`.

    ``options`` are the defaults: a text, a whole number or a tuple of them. Raises UserError for any other word.
    """
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    keys: list[str] = []
    for word, value in zip_longest(parts[::2], parts[1::2], fillvalue=""):
        name = word.removeprefix("--")
        try:
            if name.startswith("data.") and name not in options:
                keys += [word, value]
            else:
                kind = type(options[name])
                options[name] = tuple(map(int, value.split(","))) if kind is tuple else kind(value)
        except (KeyError, ValueError) as error:
            known = ", ".join(f"--{name}" for name in options)
            raise UserError(
                f"expected {known} or --data.KEY, each with its value, got {word} {value}".rstrip()
            ) from error
    return options, keys


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """A cell with a number, or a dash for None."""
    return "-" if value is None else f"{factor * value:.{digits}f}"


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half of its 95 % interval by Student's t; None for a single value."""
    if (free := len(values) - 1) < 1:
        return values[0], None
    student = STUDENT[free - 1] if free <= len(STUDENT) else 1.96 + 2.37 / free + 2.8 / free**2
    return statistics.fmean(values), student * statistics.stdev(values) / len(values) ** 0.5


def write_table(folder: Path, table: Table, runs: Sequence[tuple[Row, Path]]) -> None:
    """Write `table.json` and `table.md`, each whole, of the finished runs: row and folder, in any order."""
    recipe = load_recipe(runs[0][1] / "recipe.yaml")
    metric, label = next(iter(TASKS[recipe.task].headline.items()))
    folders = {row.name: [place for other, place in runs if other == row] for row in table.rows}
    content = {
        **{"table": table.name, "title": table.title, "size": table.size, "recipe": table.recipe, "metric": metric},
        **{"paper": table.paper, "column": table.column},
        "rows": [_row(table, row, folders[row.name], metric) for row in table.rows if folders[row.name]],
    }
    write_json(folder / "table.json", content)
    atomic_write(folder / "table.md", markdown(content, label))


def _row(table: Table, row: Row, folders: Sequence[Path], metric: str) -> dict[str, Any]:
    """One row: its settings, one entry a seed, mean and spread over those that did not diverge."""
    done = [place for place in folders if (place / RESULTS).is_file()]
    results = [read_json(place / RESULTS) for place in done]
    values = [result["metrics"][metric] for result in results]
    return {
        "name": row.name,
        "model": load_recipe(folders[0] / "recipe.yaml").model.name,
        "changes": row.changes,
        "paper": row.paper,
        "parameters": results[0]["parameters"] if results else None,
        "flops": _flops(done[0]) if results else None,
        "mean": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "seconds": statistics.fmean(result["seconds"] for result in results) if results else None,
        "diverged": len(folders) - len(done),
        "measures": _measures(done) if table.diagnose else None,
        "runs": results,
    }


@cache
def _flops(run: Path) -> int | None:
    """FLOPs of a finished run's network; None for one with a head on its backbone."""
    loaded = load_run(run)
    side = loaded.recipe.data["image_size"]
    return None if hasattr(loaded.network, "backbone") else cost(loaded.network, (side, side)).flops


def _measures(folders: Sequence[Path]) -> dict[str, float] | None:
    """Means of the measures over seeds and over blocks whose k leaves some keys out; None without such blocks."""
    files = [place / DIAGNOSIS for place in folders if (place / DIAGNOSIS).is_file()]
    blocks = [block for file in files for block in json.loads(file.read_bytes()) if block["top_k"] < block["tokens"]]
    found = {name: [block.get(name) for block in blocks] for name in MEASURES}
    return {name: statistics.fmean(values) for name, values in found.items() if None not in values} if blocks else None


def markdown(content: Mapping[str, Any], label: str) -> str:
    """The content of `table.json` as a page of Markdown; `label` is the metric's human-readable name."""
    measured = [name for name in MEASURES if any(name in (row["measures"] or {}) for row in content["rows"])]
    heads = ["", "parameters, M", "GFLOPs", f"{label}, %", "seeds", "minutes", *(MEASURES[name] for name in measured)]
    heads += [f"{content['column']}, %"] if content["paper"] else []
    rows = []
    for row in content["rows"]:
        cells = [row["name"], number(row["parameters"], 3, 1e-6), number(row["flops"], 3, 1e-9), _score(row)]
        cells += [str(len(row["runs"]) + row["diverged"]), number(row["seconds"], 1, 1 / 60)]
        cells += [number((row["measures"] or {}).get(name), 1 if name == "perplexity" else 3) for name in measured]
        rows.append(cells + ([number(row["paper"], 1)] if content["paper"] else []))
    return f"# {content['title']}\n\n{_caption(content)}\n\n{markdown_table(heads, rows)}"


def _caption(content: Mapping[str, Any]) -> str:
    """What was trained, on what, and what the paper's numbers are."""
    text = f"Recipe `{content['recipe']}`, size {content['size']}; mean ± standard deviation over seeds."
    runs = [run for row in content["rows"] for run in row["runs"]]
    for run in runs[:1]:
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "timm"))
        text += f" {run['epochs']} epochs, {run['steps']} steps; {run['device']}; {versions}."
        text += f"\nCommand: `{run['command']}`."
    if content["paper"]:
        text += f"\nThe column {content['column']}: {content['paper']}; other trainings than these."
    return text


def _score(row: Mapping[str, Any]) -> str:
    diverged = f"{row['diverged']} diverged" if row["diverged"] else ""
    if row["mean"] is None:
        return diverged
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}" + (f" ({diverged})" if diverged else "")
