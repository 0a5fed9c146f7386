"""Numbers of the text, each behind its name in the mark of a page."""

from __future__ import annotations

import re
import statistics
from typing import Any

from tables_shared import TABLES, number_of_text, read

from dgt.utils.records import interval, number

BACKBONES = ("dgt_tiny", "dgt_small", "dgt_base")


def cell(table: str, row: str, column: str, which: str = "") -> str:
    """A cell of a table, by its row's first cell and its column's head; `which`: the first number in it, second..."""
    heads, *rows = TABLES[table]()
    found = next((cells for cells in rows if _plain(cells[0]) == row), None)
    if found is None or column not in heads:
        raise KeyError(f"{table} has no row {row!r} or no column {column!r}")
    text = _plain(found[heads.index(column)])
    return re.findall(r"[-+]?\d[\d.,]*(?: ± [\d.]+)?", text)[int(which) - 1] if which else text


def value(file: str, path: str, places: str = "0", by: str = "1") -> str:
    """A number of a JSON, or several of a list, by its path."""
    found = _at(file, path)
    return ", ".join(number(one, int(places), float(by)) for one in (found if isinstance(found, list) else [found]))


@number_of_text
def openvino_beside_packed(batch: str) -> str:
    """The time of OpenVINO in parts of that of weights packed by hand."""
    rows = f"batches/batch={batch}/rows/model={{}}/ms_per_image/quartile".format
    openvino, packed = (
        _at("inference_form_cpu", rows(name)) for name in ("dgt_tiny, openvino", "dgt_tiny+inference, packed by hand")
    )
    return number(openvino / packed, 2)


@number_of_text
def faster_than_global(pixels: str) -> str:
    """DGT-T, eager, beside itself with global attention: how many times faster."""
    ms = {row["model"]: row["ms_per_image"] for row in read(f"models_cpu_px{pixels}")["rows"]}
    return number(ms["dgt_tiny+global"] / ms["dgt_tiny"], 1)


@number_of_text
def single(name: str, places: str = "1") -> str:
    """A measurement of `single.json`, or several."""
    return value("single", f"rows/name={name}/value", places)


@number_of_text
def objects(layer: str, measure: str) -> str:
    """A share, %, of COCO's queries that are no background, in one layer."""
    labels = read("like_to_like_coco")["rows"][int(layer)]["by_label"].items()
    found = [(row["share"], row[measure]) for label, row in labels if label != "background"]
    return number(100 * sum(share * one for share, one in found) / sum(share for share, _ in found), 1)


@number_of_text
def bound(case: str, label: str, busy: str = "") -> str:
    """The same on two threads as in the table of bounds, or beside a busy process."""
    rows = [row for row in read("attention_bound") if row["threads"] == 2 and bool(row["busy"]) == bool(busy)]
    return number(next(row["ratio"] for row in rows if (row["case"], row["label"]) == (case, label)), 1)


@number_of_text
def parts_of(model: str, batch: str, part: str = "") -> str:
    """Milliseconds an image of a part of a model, or of all parts."""
    rows = [row for row in read(f"models_cpu_profile{batch}")["rows"] if row["model"] == model]
    return number(sum(row["ms_per_image"] for row in rows if part in ("", row["part"])), 1)


@number_of_text
def right(row: str) -> str:
    """Retrieval: right answers in %, mean and half of the 95 % interval over seeds."""
    mean, half = interval([run["accuracy"] for run in _runs(row)])
    return f"{mean:.1f} ± {half:.1f}"


@number_of_text
def last_batch(row: str, maps: str) -> str:
    """Retrieval: points won in evaluation by the means of the last batch, of so many maps; mean ± one deviation."""
    won = [
        accuracy - run["accuracy"]
        for run in _runs(row)
        for found in run["last_batch"]
        if found["maps"] == int(maps)
        for accuracy in found["accuracies"]
    ]
    return f"{statistics.fmean(won):+.1f} ± {statistics.stdev(won):.1f}"


@number_of_text
def labels(file: str, choice: str, top_k: str) -> str:
    """Other keys at fixed weights: labels as with all keys in %, and half of the 95 % interval over images."""
    (row,) = (row for row in read(file)["rows"] if row["choice"] == choice and row["top_k"] == int(top_k))
    return f"{number(row['agreement'], 1, 100)} ± {number(row['agreement_half'], 1, 100)}"


@number_of_text
def times_lower(file: str, key: str, low: str, high: str) -> str:
    """Other keys at fixed weights: how many times lower a measure is with a choice than with another, over all k."""
    found = {(row["choice"], row["top_k"]): row[key] for row in read(file)["rows"]}
    ratios = [found[high, top_k] / value for (choice, top_k), value in found.items() if choice == low]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


@number_of_text
def points(file: str, row: str, beside: str) -> str:
    """An ablation's row beside another: points of top-1 more, and half of the 95 % interval over seeds, in pairs."""
    runs = {found["name"]: found["runs"] for found in read(file)["rows"]}
    top1 = {name: {run["seed"]: run["metrics"]["top1"] for run in runs[name]} for name in (row, beside)}
    mean, half = interval([100 * (top1[row][seed] - top1[beside][seed]) for seed in top1[row] if seed in top1[beside]])
    return f"{mean:+.1f} ± {half:.1f}"


@number_of_text
def within(file: str) -> str:
    """An ablation: points from its worst to its best row."""
    means = [row["mean"] for row in read(file)["rows"]]
    return number(max(means) - min(means), 1, 100)


@number_of_text
def curve(run: str, key: str, *epochs: str) -> str:
    """Segmentation of CamVid or scenes, in %: a measure after epochs of validation; the training loss after any."""
    found = read("segmentation_cpu")["runs"][run]
    if key == "loss":
        return ", ".join(number(found["training_loss"][int(epoch) - 1], 2) for epoch in epochs)
    return ", ".join(number(row[key], 1, 100) for row in found["validation"])


@number_of_text
def sizes_of(task: str, key: str, places: str, *models: str) -> str:
    """Parameters in M, or FLOPs in G, of DGT-T, -S and -B, or of other models of `sizes.json`."""
    rows = {row["model"]: row for row in read("sizes")["rows"] if row["task"] == task}
    return ", ".join(
        number(rows[name][key], int(places), 1e-9 if key == "flops" else 1e-6) for name in models or BACKBONES
    )


def _runs(row: str) -> list[dict[str, Any]]:
    return [run for run in read("retrieval")["runs"] if run["row"] == row]


def _at(file: str, path: str) -> Any:
    """What a path leads to: keys of objects, and of lists the place, or KEY=VALUE&... of one row, with / between."""
    found: Any = read(file)
    for step in path.split("/"):
        if isinstance(found, dict):
            found = found[step]
        elif step.isdigit():
            found = found[int(step)]
        else:
            wanted = dict(part.split("=", 1) for part in step.split("&"))
            rows = [row for row in found if all(str(row.get(key)) == text for key, text in wanted.items())]
            if len(rows) != 1:
                raise KeyError(f"{file}.json has {len(rows)} rows with {step}")
            found = rows[0]
    return found


def _plain(text: str) -> str:
    return text.strip("*`")
