"""Tables of what `dgt.accelerate` promises, that nothing is slower and that the error's bound holds,
and of very long attention.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from tables_shared import Cells, number_of_text, read, table

from dgt.utils.records import number

WORDS = {"dense": "PyTorch's", "exact": "native dense", "groups": "groups"}
LAYERS = {
    "photograph": "one large photograph",
    "frames": "1,000 frames, 5 special tokens each",
}
SUMMED = (  # over the heads of a layer
    "heads",
    "cpu_s",
    "dense_extrapolated_cpu_s",
    "products",
    "dense_products",
    "error_of_sampled",
)


@table
def never_slower_shapes() -> Cells:
    """What was chosen for sampled shapes, and its time beside PyTorch's."""
    rows = []
    found = read("accelerate_never_slower")["rows"]["shapes"]
    for choice, words in WORDS.items():
        own = [row for row in found if row["choice"] == choice]
        batches = sum(row["most_batch"] is not None for row in own)
        ratios = [row["ratio"] for row in own if "ms" in row]
        rows.append([words, str(len(own)), str(batches), *_least_median_most(ratios)])
    heads = [
        "chosen",
        "shapes",
        "of these, for single inputs",
        "times SDPA's time: best",
        "median",
        "worst",
    ]
    return [heads, *rows]


def _least_median_most(values: list[float]) -> list[str]:
    """Three cells of a table; dashes if there are no values."""
    if not values:
        return ["-"] * 3
    return [number(value, 2) for value in (min(values), statistics.median(values), max(values))]


@table
def never_slower_models() -> Cells:
    """Whole models, accelerated one image at a time, by the size of a batch."""
    rows = []
    for row in read("accelerate_never_slower")["rows"]["models"]:
        counts = [f"{row['choices'].count(name)} {words}" for name, words in WORDS.items()]
        rows.append(
            [
                row["model"],
                f"{100 * row['asked_error']:g} %",
                ", ".join(count for count in counts if not count.startswith("0 ")),
                str(row["batch"]),
                number(row["ms_before"], 0),
                number(row["ms_after"], 0),
                number(row["ratio"], 2),
            ]
        )
    heads = ["model", "error asked", "layers", "batch", "ms before", "ms after", "times its time"]
    return [heads, *rows]


def telling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The draws that say something about the bound: those with groups."""
    return [row for row in rows if row["layers_in_groups"]]


def looseness(rows: list[dict[str, Any]]) -> list[float]:
    """The bound over the error that was found, draw by draw, sorted."""
    return sorted(row["bound"] / row["unseen_error"] for row in rows)


@table
def error_bounds() -> Cells:
    """How often the bound held, by case and by the number of inputs, and how loose it was."""
    draws = telling(read("error_bound_campaign")["rows"])
    by_case: dict[str, list[dict[str, Any]]] = defaultdict(list)
    by_inputs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in draws:
        size = f", {row['size']} px" if row["size"] else ""
        by_case[f"{row['model']}{size}, {row['photographs']}"].append(row)
        by_inputs[row["inputs"]].append(row)
    rows = [[name, *_bound_cells(own)] for name, own in by_case.items()]
    rows += [[f"{count} inputs", *_bound_cells(own)] for count, own in sorted(by_inputs.items())]
    rows.append(["all", *_bound_cells(draws)])
    heads = [
        "draws of",
        "draws",
        "within the bound",
        "within the error asked",
        "bound over error: median",
    ]
    return [[*heads, "eight in ten"], *rows]


def _bound_cells(draws: list[dict[str, Any]]) -> list[str]:
    """How many draws were within the bound and within the target error, and how loose the bound was."""
    ratios = looseness(draws)
    tenth = len(ratios) // 10
    held = sum(row["unseen_error"] <= row["bound"] for row in draws)
    within = sum(row["unseen_error"] <= row["asked_error"] for row in draws)
    middle = number(statistics.median(ratios), 2)
    eight_in_ten = f"{ratios[tenth]:.2f} to {ratios[-1 - tenth]:.2f}"
    return [str(len(draws)), str(held), str(within), middle, eight_in_ten]


@number_of_text
def draws_within_the_bound() -> str:
    """In how many draws the error was within the bound."""
    draws = telling(read("error_bound_campaign")["rows"])
    held = sum(row["unseen_error"] <= row["bound"] for row in draws)
    return f"{held} of {len(draws)}"


@number_of_text
def looseness_of_the_bound() -> str:
    """The median of the bound over the error."""
    return number(statistics.median(looseness(telling(read("error_bound_campaign")["rows"]))), 2)


@number_of_text
def clearest_failure(key: str) -> str:
    """The draw whose error exceeded its bound most: its `unseen_error` or its `bound`."""
    draws = telling(read("error_bound_campaign")["rows"])
    worst = max(draws, key=lambda row: row["unseen_error"] / row["bound"])
    return number(worst[key], 2)


@table
def large_layers() -> Cells:
    """Clustered attention of very long sequences, beside dense attention's count and its
    extrapolated time.
    """
    rows = []
    for part, words in LAYERS.items():
        own = [row for row in read("clustered_large")["rows"] if row["part"] == part]
        sums = {name: sum(row[name] for row in own) for name in SUMMED}
        seconds, dense = sums["cpu_s"], sums["dense_extrapolated_cpu_s"]
        first = own[0]
        rows.append(
            [
                words,
                f"{first['tokens']:,}",
                f"{sums['heads']} x {first['channels']}",
                f"{first['groups']} x {first['keys']} + {first['residual_keys']}",
                number(seconds / 60, 1),
                number(dense / 60, 1),
                number(seconds / dense, 3),
                number(sums["products"] / sums["dense_products"], 4),
                memory_of(own),
                f"{100 * sums['error_of_sampled'] / len(own):.1f} %",
            ]
        )
    heads_of_table = [
        "layer",
        "tokens",
        "heads measured x channels",
        "groups x keys + residual",
        "minutes of one core",
        "dense, extrapolated",
        "times dense's time",
        "of its products",
        "MiB more, output included",
        "error",
    ]
    return [heads_of_table, *rows]


def memory_of(rows: list[dict[str, Any]]) -> str:
    """The most memory that a call took; a dash if it was not measured."""
    measured = [row["extra_mib"] for row in rows if row["extra_mib"] is not None]
    return number(max(measured), 0) if measured else "-"
