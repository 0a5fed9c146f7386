"""The table of an ablation as JSON and Markdown: mean and spread over seeds, cost, time, and the paper's numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgt.experiments.tables import Row, Table
from dgt.models import cost
from dgt.tasks import TASKS
from dgt.training.load import load_run
from dgt.training.recipe import load_recipe
from dgt.utils.atomic_write import atomic_write, write_json

MEASURES = {  # of `diagnose`, means over the blocks where k is below the number of tokens
    "selected": "mass on selected keys",
    "random": "on random keys",
    "window": "on a window",
    "best_for_all": "best k for all",
    "best_for_group": "best k of the group",
    "best_for_query": "best k of the query",
    "perplexity": "perplexity of groups",
}


def write_table(folder: Path, table: Table, runs: Sequence[tuple[Row, Path]]) -> None:
    """Write `table.json` and `table.md`, each whole.

    Args:
        folder: where they go.
        table: which table.
        runs: the finished runs: row and folder, in any order.

    Raises:
        OSError: the folder cannot be written to.
    """
    known = _known_costs(folder / "table.json")
    rows = [
        _row(table, row, [place for other, place in runs if other == row], known)
        for row in table.rows
        if any(other == row for other, _ in runs)
    ]
    headline = TASKS[load_recipe(runs[0][1] / "recipe.yaml").task].headline
    metric = next(iter(headline))
    content: dict[str, Any] = {
        "table": table.name,
        "title": table.title,
        "size": table.size,
        "recipe": table.recipe,
        "metric": metric,
        "paper": table.paper,
        "column": table.column,
        "rows": rows,
    }
    write_json(folder / "table.json", content)
    atomic_write(folder / "table.md", markdown(content, headline[metric]))


def _known_costs(path: Path) -> dict[str, int | None]:
    """FLOPs by row that an earlier table of this folder has."""
    if not path.is_file():
        return {}
    return {row["name"]: row["flops"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def _row(table: Table, row: Row, folders: Sequence[Path], known: dict[str, int | None]) -> dict[str, Any]:
    """One row: its settings, one entry a seed, mean and spread over those that did not diverge."""
    done = [place for place in folders if (place / "results.json").is_file()]
    results = [json.loads((place / "results.json").read_text(encoding="utf-8")) for place in done]
    recipe = load_recipe(folders[0] / "recipe.yaml")
    metric = next(iter(TASKS[recipe.task].headline))
    values = [result["metrics"][metric] for result in results]
    flops = known.get(row.name)
    if flops is None and done and recipe.task == "classify":
        side = recipe.data["image_size"]
        flops = cost(load_run(done[0]).network, (side, side)).flops
    return {
        "name": row.name,
        "model": recipe.model.name,
        "changes": row.changes,
        "paper": row.paper,
        "parameters": results[0]["parameters"] if results else None,
        "flops": flops,
        "mean": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "seconds": statistics.fmean(result["seconds"] for result in results) if results else None,
        "diverged": len(folders) - len(done),
        "measures": _measures(done) if table.diagnose and done else None,
        "runs": results,
    }


def _measures(folders: Sequence[Path]) -> dict[str, float] | None:
    """Means of the measures over seeds and over blocks whose k leaves some keys out; None without such blocks."""
    blocks = [
        block
        for place in folders
        if (place / "diagnosis.json").is_file()
        for block in json.loads((place / "diagnosis.json").read_text(encoding="utf-8"))
        if block["top_k"] < block["tokens"]
    ]
    if not blocks:
        return None
    return {
        name: statistics.fmean(block[name] for block in blocks)
        for name in MEASURES
        if all(block.get(name) is not None for block in blocks)
    }


def markdown(content: dict[str, Any], label: str) -> str:
    """A table's JSON as a page of Markdown.

    Args:
        content: as in `table.json`.
        label: name of the metric for people.
    """
    rows = content["rows"]
    measured = [name for name in MEASURES if any(name in (row["measures"] or {}) for row in rows)]
    heads = ["", "parameters, M", "GFLOPs", f"{label}, %", "seeds", "minutes"]
    heads += [MEASURES[name] for name in measured]
    heads += [f"{content['column']}, %"] if content["paper"] else []
    lines = [f"# {content['title']}", "", _caption(content), ""]
    lines += ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for row in rows:
        cells = [row["name"], _number(row["parameters"], 1e-6, 3), _number(row["flops"], 1e-9, 3), _score(row)]
        cells += [str(len(row["runs"]) + row["diverged"]), _number(row["seconds"], 1 / 60, 1)]
        cells += [_number((row["measures"] or {}).get(name), 1, 1 if name == "perplexity" else 3) for name in measured]
        cells += [_number(row["paper"], 1, 1)] if content["paper"] else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _caption(content: dict[str, Any]) -> str:
    """What was trained, on what, and what the paper's numbers are."""
    runs = [run for row in content["rows"] for run in row["runs"]]
    text = f"Recipe `{content['recipe']}`, size {content['size']}; mean ± standard deviation over seeds."
    if runs:
        versions = ", ".join(f"{name} {runs[0]['versions'][name]}" for name in ("torch", "timm"))
        text += f" {runs[0]['epochs']} epochs, {runs[0]['steps']} steps; {runs[0]['device']}; {versions}."
        text += f"\nCommand: `{runs[0]['command']}`."
    if content["paper"]:
        text += f"\nThe column {content['column']}: {content['paper']}; other trainings than these."
    return text


def _score(row: dict[str, Any]) -> str:
    diverged = f"{row['diverged']} diverged" if row["diverged"] else ""
    if row["mean"] is None:
        return diverged
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}" + (f" ({diverged})" if diverged else "")


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"
