"""Tables of the study of what selecting keys by content gains on real images."""

from __future__ import annotations

from typing import Any

from tables_shared import Cells, number_of_text, read, table

from dgt.utils.records import number

RAW = "content_selection"
AS_TRAINED = "as-trained"
TESTS = {  # of models with groups, by the name in the raw file
    "k-4": "4",
    "k-16": "16",
    AS_TRAINED: "32, as trained",
    "k-64": "64",
    "k-256": "256",
    "k-all": "all",
    "k-4-remainder": "4 and the residual key",
    "k-32-remainder": "32 and the residual key",
}


def _rows() -> dict[tuple[str, int, str], dict[str, Any]]:
    """The tests by kind of attention, image size, and name."""
    return {(row["kind"], row["size"], row["test"]): row for row in read(RAW)["rows"]}


def _heads() -> dict[int, str]:
    """The image sizes, and what stands above their columns."""
    content = read(RAW)
    trained, stored = content["settings"]["train_size"], content["enlarged_above"]
    heads = {}
    for size in sorted({row["size"] for row in content["rows"]}):
        heads[size] = f"{size} px"
        if size == trained:
            heads[size] += ", as trained"
        if size > stored:
            heads[size] += ", enlarged"
    return heads


def _cell(row: dict[str, Any]) -> str:
    """Accuracy, and in brackets how far it is ahead of all keys, with the interval over images."""
    mean = number(row["mean"], 1, 100)
    beside = row["beside all keys"]
    if row["kind"] == "all keys" or beside is None:
        return mean
    return f"{mean} ({beside['ahead']:+.1f} ± {beside['half_over_images']:.1f})"


@table
def content_selection() -> Cells:
    """Top-1 by kind of attention and image size."""
    rows, heads = _rows(), _heads()
    kinds = list(dict.fromkeys(kind for kind, _, _ in rows))
    lines = [[kind, *(_cell(rows[kind, size, AS_TRAINED]) for size in heads)] for kind in kinds]
    return [["stages one and two attend to", *heads.values()], *lines]


@table
def content_selection_at_other_k() -> Cells:
    """The models with groups, tested with other numbers of keys."""
    rows, heads = _rows(), _heads()
    lines = [
        [name, *(_cell(rows["groups", size, test]) for size in heads)]
        for test, name in TESTS.items()
    ]
    return [["keys per group in the test", *heads.values()], *lines]


@number_of_text
def seeds_of_content_selection() -> str:
    """With how many seeds every kind was trained; the fewest."""
    return str(min(len(row["top1"]) for row in read(RAW)["rows"]))


@number_of_text
def epochs_of_content_selection() -> str:
    """How long the models were trained."""
    return str(read(RAW)["settings"]["epochs"])


@number_of_text
def points_of_content_selection(kind: str, size: str, test: str = AS_TRAINED) -> str:
    """How many points a test is ahead of all keys at an image size, with the interval over images."""
    beside = _rows()[kind, int(size), test]["beside all keys"]
    return f"{beside['ahead']:+.1f} ± {beside['half_over_images']:.1f}"
