"""Tables of sizes, accuracy and accelerated models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tables_shared import NAMES, Cells, bold, number_of_text, read, table

from dgt.utils.records import number, wilson


def _sizes(task: str) -> Cells:
    rows = []
    for row in read("sizes")["rows"]:
        if row["task"] == task:
            params, flops = (
                number(row["params"], 2, 1e-6) + " M",
                number(row["flops"], 1, 1e-9) + " G",
            )
            paper = f"{row['paper_params'] / 1e6:g} M", f"{row['paper_flops'] / 1e9:g} G"
            rows.append([NAMES[row["model"]], params, paper[0], flops, paper[1]])
    return [["backbone", "parameters", "paper", "FLOPs", "paper"], *rows]


@table
def sizes_of_classifiers() -> Cells:
    """Parameters and FLOPs of the classifiers, to the parameter."""
    rows = []
    for row in read("sizes")["rows"]:
        if row["task"] == "classify":
            paper = [number(row["paper_params"], 2, 1e-6), number(row["paper_flops"], 2, 1e-9)]
            rows.append(
                [
                    NAMES[row["model"]],
                    f"{row['params']:,}",
                    paper[0],
                    number(row["flops"], 3, 1e-9),
                    paper[1],
                ]
            )
    return [["model", "parameters", "paper, M", "FLOPs, G", "paper, G"], *rows]


@table
def sizes_of_segmenters() -> Cells:
    """Parameters and FLOPs of UperNet over each backbone."""
    return _sizes("segment")


@table
def sizes_of_detectors() -> Cells:
    """Parameters and FLOPs of Mask R-CNN over each backbone."""
    return _sizes("detect")


@table
def comparators() -> Cells:
    """Parameters and FLOPs of every row of Tables 2, 3 and 4 (a), beside the paper's."""
    rows = []
    for row in read("comparators")["rows"]:
        printed = [f"{row['paper_params'] / 1e6:g}", f"{row['paper_flops'] / 1e9:g}"]
        more = 100 * (row["flops"] / row["paper_flops"] - 1)
        cells = [
            {"classify": "2", "segment": "3"}.get(row["task"], "4 (a)"),
            row["row"],
            row["model"],
        ]
        cells += [
            number(row["params"], 1, 1e-6),
            printed[0],
            number(row["flops"], 1, 1e-9),
            printed[1],
        ]
        rows.append([*cells, f"{more:+.1f}"])
    return [
        [
            "table",
            "row",
            "model",
            "parameters, M",
            "paper",
            "FLOPs, G",
            "paper",
            "over the paper's, %",
        ],
        *rows,
    ]


def _interval(low: float, high: float) -> str:
    return f"({number(low, 1, 100)} to {number(high, 1, 100)})"


@table
def weights() -> Cells:
    """What `tools/make_weights.sh` trains and packs: each metric with its 95 % interval."""
    rows = []
    for name, run in read("weights").items():
        metrics = [
            f"{row['label']} {number(row['value'], 1, 100)} {_interval(row['low'], row['high'])}"
            for row in run["evaluation"]["metrics"].values()
        ]
        time, images = number(run["seconds"], 0, 1 / 60), str(run["evaluation"]["images"])
        rows.append(
            [f"`{name}`", number(run["parameters"], 2, 1e-6), "; ".join(metrics), images, time]
        )
    return [["weights", "parameters, M", "% (95 % interval)", "on images", "minutes"], *rows]


@table
def imagenette_in_hours() -> Cells:
    """Imagenette from random weights, in hours of two cores."""
    rows = []
    for row in read("imagenette_cpu")["rows"]:
        cells = [
            str(row["hours"]),
            f"`{row['model']}`",
            number(row["parameters"], 2, 1e-6),
            str(row["epochs"]),
        ]
        cells += [number(row["seconds"], 0, 1 / 60), number(row["at_96"]["top1"], 1, 100)]
        top1, top5, images = (row["at_128"][key] for key in ("top1", "top5", "images"))
        cells += [
            f"{bold(number(top1, 1, 100))} {_interval(*wilson(top1, images))}",
            number(top5, 1, 100),
        ]
        rows.append(cells)
    heads = [
        "hours of two cores",
        "model",
        "parameters, M",
        "epochs",
        "minutes of one core",
        "top-1 at 96 px, %",
    ]
    return [[*heads, "top-1 at 128 px, % (95 % interval)", "top-5"], *rows]


@table
def imagenette_peers() -> Cells:
    """Models of one size in the same minutes of a core, with up to three learning rates each."""
    found = {
        (row["minutes"], row["model"], row["rate"]): row for row in read("imagenette_peers")["rows"]
    }
    rates = sorted({rate for _, _, rate in found})
    runs = dict.fromkeys((minutes, model) for minutes, model, _ in found)
    rows = []
    for minutes, model in sorted(runs, key=lambda run: (run[0], run[1] != "dgt_nano")):
        own = [found.get((minutes, model, rate)) for rate in rates]
        first = next(row for row in own if row)
        cells = [
            str(minutes),
            f"`{model}`",
            number(first["parameters"], 2, 1e-6),
            str(first["epochs"]),
        ]
        rows.append([*cells, *_best_in_bold(own, "at_96"), *_best_in_bold(own, "at_128")])
    heads = ["minutes of one core", "model", "parameters, M", "epochs"]
    heads += [f"{size} px, rate {rate:g}" for size in (96, 128) for rate in rates]
    return [heads, *rows]


def _best_in_bold(rows: Sequence[dict[str, Any] | None], size: str) -> list[str]:
    """Top-1 in % at one size, by learning rate; "-" where there is no run."""
    shares = [row[size]["top1"] if row else None for row in rows]
    best = max(share for share in shares if share is not None)
    texts = [number(share, 1, 100) for share in shares]
    return [
        bold(text) if share == best else text for share, text in zip(shares, texts, strict=True)
    ]


@number_of_text
def minutes_of_imagenette_peers() -> str:
    """How long the trainings with all learning rates were meant to take on one core."""
    return str(min(row["minutes"] for row in read("imagenette_peers")["rows"]))


@number_of_text
def peer_top1(model: str, rate: str, size: str, minutes: str = "12") -> str:
    """Accuracy of one run in %."""
    wanted = (int(minutes), model, float(rate))
    (row,) = (
        row
        for row in read("imagenette_peers")["rows"]
        if (row["minutes"], row["model"], row["rate"]) == wanted
    )
    return number(row[f"at_{size}"]["top1"], 1, 100)


@number_of_text
def half_of_imagenette_peers() -> str:
    """The largest half of a 95 % interval over images."""
    halves = []
    for row in read("imagenette_peers")["rows"]:
        for size in ("at_96", "at_128"):
            low, high = wilson(row[size]["top1"], row[size]["images"])
            halves.append((high - low) / 2)
    return number(max(halves), 1, 100)


@table
def camvid() -> Cells:
    """Segmentation of CamVid from random weights, in minutes."""
    rows = []
    for name, run in read("segmentation_cpu")["runs"].items():
        if "scenes" not in name and name != "camvid_nano":
            shares = [
                number(run["metrics"][key], 1, 100) + " %"
                for key in ("miou", "accuracy", "mean_accuracy")
            ]
            rows.append([name, number(run["parameters"], 3, 1e-6) + " M", *shares])
    return [["backbone", "parameters", "mIoU", "pixel accuracy", "mean accuracy"], *rows]


@table
def camvid_by_class() -> Cells:
    """IoU of each class of CamVid after the longer training."""
    metrics = read("segmentation_cpu")["runs"]["camvid_nano"]["metrics"]
    shares = {
        key.partition("/")[2]: number(value, 1, 100)
        for key, value in metrics.items()
        if key.startswith("iou/")
    }
    return [["", *shares], ["IoU, %", *shares.values()]]


@table
def needs_of_training() -> Cells:
    """What 300 epochs of ImageNet compute and move, model by model: derived."""
    return read("scaling")["needs"]


@table
def steps_of_training() -> Cells:
    """The parts of a step on many GPUs: derived."""
    return read("scaling")["steps"]


@table
def loaders() -> Cells:
    """Images per second of this loader and of timm's."""
    files = {
        "128 px": "loaders_shared_cpu",
        "128 px, before": "loaders_small_cpu",
        "500 x 375, before": "loaders_cpu",
    }
    found = [
        {row["loader"]: row["images_per_second"] for row in read(name)["rows"]}
        for name in files.values()
    ]
    names = dict.fromkeys(name for rates in found for name in rates if "shards" not in name)
    rows = [
        [name, *(number(rates[name], 0) if name in rates else "-" for rates in found)]
        for name in names
    ]
    return [["images/s", *files], *rows]
