"""Tables of the study of what selecting keys by content gains on real images."""

from __future__ import annotations

from typing import Any

from tables_shared import Cells, number_of_text, read, table

from dgt.utils.records import number
from studies.content_selection_camvid import by_seed
from studies.content_selection_models import WITH_RESIDUAL_KEY
from studies.fixed_weights import BESIDE, ahead

RAW = "content_selection"
CHOICES = "key_choice_content_selection"
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


def _by_seed(row: dict[str, Any]) -> str:
    """How many points a test is ahead of all keys, one number for each seed."""
    return ", ".join(f"{points:+.1f}" for points in row["beside all keys"]["by_seed"])


def _cell(row: dict[str, Any]) -> str:
    """Mean accuracy over seeds, and in parentheses how far each seed is ahead of all keys."""
    mean = number(row["mean"], 1, 100)
    if row["kind"] == "all keys" or row["beside all keys"] is None:
        return mean
    return f"{mean} ({_by_seed(row)})"


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
def seeds_of_content_selection(kind: str) -> str:
    """With how many seeds a kind was trained and tested at all sizes."""
    return str(min(len(row["seeds"]) for row in read(RAW)["rows"] if row["kind"] == kind))


@number_of_text
def epochs_of_content_selection() -> str:
    """How long the models were trained."""
    return str(read(RAW)["settings"]["epochs"])


@number_of_text
def points_of_content_selection(kind: str, size: str, test: str = AS_TRAINED) -> str:
    """How many points a test is ahead of all keys at an image size, one number for each seed."""
    return _by_seed(_rows()[kind, int(size), test])


@number_of_text
def top1_of_content_selection(kind: str, size: str) -> str:
    """Accuracy of a kind of attention at an image size in %, one number for each seed."""
    shares = _rows()[kind, int(size), AS_TRAINED]["top1"]
    return ", ".join(number(share, 1, 100) for share in shares)


@number_of_text
def halves_of_content_selection() -> str:
    """The least and largest interval over images of one seed's difference from all keys."""
    halves = [
        half
        for row in _rows().values()
        if row["kind"] != "all keys" and row["beside all keys"]
        for half in row["beside all keys"]["half_over_images_by_seed"]
    ]
    return f"{min(halves):.1f} to {max(halves):.1f}"


CAMVID = "content_selection_camvid"
CAMVID_NAMES = {  # by kind of attention and test
    ("groups", "residual-key"): "groups, tested with the residual key",
    ("groups", "all-keys"): "groups, tested with all keys",
    (WITH_RESIDUAL_KEY, AS_TRAINED): "groups, trained and tested with the residual key",
}


def _camvid_rows() -> dict[tuple[str, str, int], dict[str, Any]]:
    """The tests of the study on CamVid by kind of attention, name, and image width."""
    return {(row["kind"], row["test"], row["width"]): row for row in read(CAMVID)["rows"]}


@table
def content_selection_on_camvid() -> Cells:
    """mIoU by kind of attention and image width, and how far each seed is ahead of all keys."""
    rows = _camvid_rows()
    widths = sorted({width for _, _, width in rows})
    heads = ["stages one and two attend to"]
    for width in widths:
        heads += [f"{width} px wide: mIoU, %", "ahead of all keys, points"]
    lines = []
    for kind, test in dict.fromkeys((kind, test) for kind, test, _ in rows):
        cells = [CAMVID_NAMES.get((kind, test), kind)]
        for width in widths:
            row = rows[kind, test, width]
            cells.append(", ".join(number(value, 1, 100) for value in row["miou"]))
            cells.append("-" if (kind, test) == ("all keys", AS_TRAINED) else by_seed(row))
        lines.append(cells)
    return [heads, *lines]


@number_of_text
def camvid_ahead(kind: str, width: str, test: str = AS_TRAINED) -> str:
    """How many points of mIoU a kind is ahead of all keys, one number for each seed, with intervals."""
    return by_seed(_camvid_rows()[kind, test, int(width)])


@number_of_text
def camvid_miou(kind: str, width: str, test: str = AS_TRAINED) -> str:
    """mIoU in %, one number for each seed."""
    return ", ".join(
        number(value, 1, 100) for value in _camvid_rows()[kind, test, int(width)]["miou"]
    )


@number_of_text
def seeds_of_camvid() -> str:
    """With how many seeds all kinds were trained."""
    return str(min(len(row["seeds"]) for row in read(CAMVID)["rows"]))


@table
def key_choice_on_all_images() -> Cells:
    """A model of the study with other keys: top-1, and how far ahead of as many random keys."""
    content = read(CHOICES)
    rows = {(row["choice"], row["top_k"]): row for row in content["rows"]}
    counts = sorted({top_k for _, top_k in rows})
    heads = [
        f"{head} k {top_k}" for top_k in counts for head in ("top-1,", "ahead of random keys,")
    ]
    lines = []
    for choice in dict.fromkeys(choice for choice, _ in rows):
        cells = [choice]
        for top_k in counts:
            row = rows[choice, top_k]
            cells += [number(row["score"], 1, 100), _ahead(row, rows[BESIDE, top_k])]
        lines.append(cells)
    return [["keys by", *heads], *lines]


def _ahead(row: dict[str, Any], beside: dict[str, Any]) -> str:
    """Points of correct images in a row more than in another, with the paired interval."""
    if row is beside:
        return "-"
    mean, half = ahead(row, beside)
    return f"{100 * mean:+.1f} ± {100 * (half or 0):.1f}"


@number_of_text
def choice_ahead(choice: str, top_k: str, beside: str = BESIDE) -> str:
    """How many points of top-1 a choice of keys is ahead of another, with the paired interval."""
    rows = {(row["choice"], row["top_k"]): row for row in read(CHOICES)["rows"]}
    return _ahead(rows[choice, int(top_k)], rows[beside, int(top_k)])


@number_of_text
def choice_error(choice: str, top_k: str) -> str:
    """Mean relative error of the logits in % when keys are chosen in some way, compared with all keys."""
    rows = {(row["choice"], row["top_k"]): row for row in read(CHOICES)["rows"]}
    return number(rows[choice, int(top_k)]["error"], 1, 100)
