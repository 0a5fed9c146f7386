"""Tables of accelerated models: error, speed, and how well the error is predicted."""

from __future__ import annotations

from typing import Any

from tables_shared import Cells, bold, off, read, relative, table

from dgt.utils.records import number

SETS = {"chose": "searched with", "aside": "held out", "others": "others, unseen"}


@table
def predicted_errors() -> Cells:
    """What reports of a ViT predict, beside the error on other images, for several draws of images."""
    found = read("accelerate_prediction")["rows"]
    rows = []
    for row in sorted(found, key=lambda row: (row["asked_error"], row["draw"])):
        grouped = sum(groups > 0 for groups, _ in row["layers"])
        cells = [
            f"{100 * row['asked_error']:.2g} %",
            str(row["draw"]),
            f"{grouped} of {len(row['layers'])}",
        ]
        rows.append([*cells, *_errors(row), off(row)])
    heads = [
        "target error",
        "draw",
        "grouped layers",
        "predicted",
        "on held-out images",
        "on other images",
        "prediction off by",
    ]
    return [heads, *rows]


def _errors(row: dict[str, Any]) -> list[str]:
    """The error that a report predicts, and those on held-out and on unseen images."""
    return [relative(row, name) for name in ("predicted", "measured", "unseen")]


@table
def accelerated() -> Cells:
    """A ViT trained on CamVid, accelerated within several errors."""
    heads = [
        "target error",
        "predicted",
        "on held-out images",
        "on the test images",
        "same class",
        "mIoU",
    ]
    found = [row for row in read("accelerate_camvid")["rows"] if "asked_error" in row]
    rows = [
        [
            f"{100 * row['asked_error']:.2g} %",
            *_errors(row),
            number(row["agreement"], 1, 100) + " %",
            number(row["miou"], 1, 100),
            number(row["attention_speedup"], 2),
            number(row["model_speedup"], 2),
            number(row["bound"], 1),
        ]
        for row in found
    ]
    return [[*heads, "attention", "model", "bound"], *rows]


@table
def accelerated_on_imagenette() -> Cells:
    """A ViT trained on Imagenette at 4,096 tokens, beside itself accelerated within several errors."""
    heads = [
        "target error",
        "predicted",
        "on unseen images",
        "prediction off by",
        "images",
        "top-1 gained, points",
    ]
    rows = []
    for row in read("accelerate_imagenette")["rows"]:
        cells = [
            f"{100 * row['asked_error']:.2g} %",
            relative(row, "predicted"),
            relative(row, "unseen"),
            off(row),
        ]
        cells += [
            str(row["unseen_images"]),
            f"{100 * row['top1_gain']:+.2f} ± {100 * row['top1_gain_half']:.2f}",
        ]
        cells += [number(row["agreement"], 1, 100) + " %", number(row["attention_speedup"], 2)]
        rows.append([*cells, number(row["model_speedup"], 2), number(row["bound"], 1)])
    return [[*heads, "same class", "attention", "model", "bound"], *rows]


@table
def large_models() -> Cells:
    """Large ViTs with random weights, accelerated as trained ones were, beside themselves."""
    heads = [
        "model",
        "pixels",
        "tokens",
        "groups of keys",
        "s",
        "grouped, s",
        "speedup",
        "bound",
    ]
    found = [row for row in read("accelerate_models")["rows"] if row["part"] != "shapes"]
    rows = [
        [
            f"`{row['model']}`",
            "{} x {}".format(*row["size"]),
            str(row["tokens"]),
            f"{row['groups']} of {row['keys']}",
            number(row["before_ms"], 1, 1e-3),
            number(row["after_ms"], 1, 1e-3),
            bold(number(row["speedup"], 1)),
            number(row["bound"], 1),
        ]
        for row in found
    ]
    return [heads, *rows]


@table
def neighbors_of_a_plan() -> Cells:
    """A plan and two others, on the images that it was chosen with, on held-out and unseen ones."""
    found = read("accelerate_neighbours")
    counts = [f"{words}: {found['images'][name]} images" for name, words in SETS.items()]
    rows = []
    for row in found["rows"]:
        keys = "as chosen" if row["times"] == 1 else f"times {row['times']:g}"
        errors = [_with_half(row[name]) for name in found["images"]]
        rows.append([keys, *errors, f"{100 * (row['chose_by_others'] - 1):+.0f} %"])
    return [["keys", *counts, "prediction off by"], *rows]


def _with_half(found: dict[str, float]) -> str:
    """An error and half of its interval, in percent."""
    return f"{number(found['error'], 2, 100)} ± {number(found['half'], 2, 100)} %"


@table
def how_many_images() -> Cells:
    """How often the error of some unseen images is more than 20 % off that of all of them."""
    counts = ("32", "64", "128", "256")
    rows = []
    for row in read("accelerate_imagenette")["rows"]:
        if row["unseen_error"] > 1e-5:
            shares = [number(row["missed"][count], 1, 100) + " %" for count in counts]
            cells = [
                f"{100 * row['asked_error']:.2g} %",
                str(row["unseen_images"]),
                number(row["varies"], 1),
            ]
            rows.append([*cells, *shares])
    return [
        ["target error", "images", "spread", *(f"sample of {count}" for count in counts)],
        *rows,
    ]


@table
def predicted_by_more_images() -> Cells:
    """What reports of the ViT trained on Imagenette predict, by how many images they were given."""
    rows = []
    for found in (read("accelerate_imagenette"), read("accelerate_predicted")):
        for row in found["rows"]:
            cells = [
                f"{100 * row['asked_error']:.2g} %",
                str(found["calibrate"]),
                str(row["choosing_images"]),
            ]
            cells += _errors(row)
            rows.append([*cells, str(row["unseen_images"]), off(row)])
    heads = [
        "target error",
        "images given",
        "searched with",
        "predicted",
        "on held-out images",
        "on unseen images",
    ]
    return [
        [*heads, "unseen", "prediction off by"],
        *sorted(rows, key=lambda cells: float(cells[0][:-2])),
    ]
