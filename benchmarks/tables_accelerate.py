"""Tables of accelerated models: error, speed, and how well the error is predicted."""

from __future__ import annotations

from tables_shared import Cells, bold, off, read, relative, table

from dgt.utils.records import number

SETS = {"chose": "searched with", "aside": "held out", "others": "others, unseen"}


@table
def predicted_errors() -> Cells:
    """What reports of a ViT predict, beside images that they had not: draw by draw of those that they had."""
    rows = []
    for row in sorted(
        read("accelerate_prediction")["rows"], key=lambda row: (row["asked_error"], row["draw"])
    ):
        grouped = sum(groups > 0 for groups, _ in row["layers"])
        cells = [
            f"{100 * row['asked_error']:.2g} %",
            str(row["draw"]),
            f"{grouped} of {len(row['layers'])}",
        ]
        rows.append(
            [
                *cells,
                *(relative(row, name) for name in ("predicted", "measured", "unseen")),
                off(row),
            ]
        )
    heads = [
        "target error",
        "draw",
        "grouped layers",
        "predicted",
        "on held-out images",
        "on other images",
    ]
    return [[*heads, "prediction off by"], *rows]


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
    rows = []
    for row in read("accelerate_camvid")["rows"]:
        if "asked_error" in row:
            cells = [f"{100 * row['asked_error']:.2g} %"]
            cells += [relative(row, name) for name in ("predicted", "measured", "unseen")]
            cells += [number(row["agreement"], 1, 100) + " %", number(row["miou"], 1, 100)]
            rows.append(
                [*cells, *(number(row[key], 2) for key in ("attention_speedup", "model_speedup"))]
            )
            rows[-1].append(number(row["bound"], 1))
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
    rows = []
    for row in read("accelerate_models")["rows"]:
        if row["part"] != "shapes":
            cells = [f"`{row['model']}`", "{} x {}".format(*row["size"]), str(row["tokens"])]
            cells += [f"{row['groups']} of {row['keys']}", number(row["before_ms"], 1, 1e-3)]
            cells += [number(row["after_ms"], 1, 1e-3), bold(number(row["speedup"], 1))]
            rows.append([*cells, number(row["bound"], 1)])
    return [heads, *rows]


@table
def neighbours_of_a_plan() -> Cells:
    """A plan and two others, on the images that it was chosen with, on held-out and unseen ones."""
    found = read("accelerate_neighbours")
    heads = [
        "keys",
        *(f"{told}: {found['images'][name]} images" for name, told in SETS.items()),
    ]
    rows = []
    for row in found["rows"]:
        pairs = [
            [number(row[name][key], 2, 100) for key in ("error", "half")]
            for name in found["images"]
        ]
        keys = "as chosen" if row["times"] == 1 else f"times {row['times']:g}"
        rows.append([keys, *(f"{error} ± {half} %" for error, half in pairs)])
        rows[-1].append(f"{100 * (row['chose_by_others'] - 1):+.0f} %")
    return [[*heads, "prediction off by"], *rows]


@table
def how_many_images() -> Cells:
    """How often draws of some of the unseen images have an error more than 20 % off that of all of them."""
    counts, rows = ("32", "64", "128", "256"), []
    for row in read("accelerate_imagenette")["rows"]:
        if row["unseen_error"] > 1e-5:
            shares = [number(row["missed"][count], 1, 100) + " %" for count in counts]
            cells = [
                f"{100 * row['asked_error']:.2g} %",
                str(row["unseen_images"]),
                number(row["varies"], 1),
            ]
            rows.append([*cells, *shares])
    return [["target error", "images", "spread", *(f"sample of {count}" for count in counts)], *rows]


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
            cells += [relative(row, name) for name in ("predicted", "measured", "unseen")]
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
