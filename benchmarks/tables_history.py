"""Tables of older code, for docs/history.md: what was measured then and not again since."""

from __future__ import annotations

import json
from typing import Any

from tables_shared import ROOT, Cells, bold, read, table

from dgt.utils.records import number


def _models(*names: str) -> dict[str, list[dict[str, Any]]]:
    """For each model of the first file, in its order, its row in each file."""
    files = [{row["model"]: row for row in read(f"models_cpu_{name}")["rows"]} for name in names]
    return {model: [rows[model] for rows in files] for model in files[0]}


def _timed(row: dict[str, Any]) -> list[str]:
    return [number(row["ms_per_image"], 1), bold(number(row["relative_time"], 2))]


@table
def models() -> Cells:
    """Whole models at 224 px, eager, with the accuracy that their papers publish."""
    published = json.loads((ROOT / "benchmarks" / "published.json").read_text(encoding="utf-8"))
    rows = []
    for name, (one, eight) in _models("batch1", "batch8").items():
        if "+inference" in name:  # a form that is gone
            continue
        rows.append([name, number(published[name.partition("+")[0].partition("@")[0]]["top1"], 1)])
        rows[-1] += [*_timed(one), *_timed(eight)]
    heads = [
        "model, 224 px",
        "top-1, published",
        "batch 1: ms",
        "relative",
        "batch 8: ms per image",
        "relative",
    ]
    return [heads, *rows]


@table
def zen_4_before_and_since() -> Cells:
    """DGT-T's time relative to Swin-T's in every runtime, in two runs."""
    names = [f"runtimes_zen4_{run}_batch{batch}" for batch in (1, 8) for run in ("before", "since")]
    found = [
        {
            row["runtime"]: row["relative_time"]
            for row in read(name)["rows"]
            if row["model"] == "dgt_tiny"
        }
        for name in names
    ]
    heads = ["DGT-T, relative to Swin-T", "batch 1, before", "since", "batch 8, before", "since"]
    return [
        heads,
        *([runtime, *(number(times[runtime], 2) for times in found)] for runtime in found[0]),
    ]


@table
def packed_by_hand() -> Cells:
    """What packing weights by hand was worth, beside runtimes: the lower quartiles, batch 8."""
    rows = read("inference_form_cpu")["batches"][1]["rows"]
    return [
        ["224 px, batch 8", "ms per image"],
        *([row["model"], number(row["ms_per_image"]["quartile"], 1)] for row in rows),
    ]


@table
def larger_images() -> Cells:
    """Whole models at 512 and 1024 px."""
    found = [row for name in ("px512", "px1024") for (row,) in _models(name).values()]
    rows = [
        [
            row["model"],
            str(row["image_size"]),
            number(row["ms_per_image"], 0),
            bold(number(row["relative_time"], 2)),
        ]
        for row in found
        if "+inference" not in row["model"]  # a form that is gone
    ]
    return [["model", "pixels", "ms", "relative"], *rows]


@table
def parts() -> Cells:
    """Where the time of DGT-T goes, part by part; a dash where a form has no such part of its own."""
    columns = []
    for batch in (1, 8):
        rows = read(f"models_cpu_profile{batch}")["rows"]
        columns.append(
            {row["part"]: row["ms_per_image"] for row in rows if row["model"] == "dgt_tiny"}
        )
    lines = [
        [part, *(number(column.get(part), 2) for column in columns)]
        for part in dict.fromkeys(part for column in columns for part in column)
    ]
    lines.append(["together", *(number(sum(column.values()), 1) for column in columns)])
    return [["part of DGT-T at 224 px, eager, ms per image", "batch 1", "batch 8"], *lines]


@table
def exported_models() -> Cells:
    """ONNX in onnxruntime beside eager PyTorch."""
    rows = []
    for row in read("exported_cpu")["rows"]:
        ms = row["ms_per_image"]
        rows.append([f"{row['side']} x {row['side']}", str(row["batch"])])
        rows[-1] += [number(ms["eager"], 1), number(ms["onnxruntime"], 1)]
        rows[-1].append(bold(number(ms["onnxruntime"] / ms["eager"], 2)))
    return [["pixels", "batch", "eager, ms per image", "onnxruntime, ms per image", "ratio"], *rows]


@table
def int8() -> Cells:
    """The same file with integers of 8 bits, at 224 px."""
    content = read("exported_cpu")
    one, eight = (row for row in content["rows"] if row["side"] == 224)
    rows = []
    names = {
        "onnxruntime": "float32",
        "int8 MatMul": "matrix products",
        "int8 MatMul, Conv": "and convolutions",
    }
    for key, name in names.items():
        rows.append([name, number(content["bytes"][key], 1, 1 / 2**20) + " MiB"])
        rows[-1] += [number(row["ms_per_image"][key], 1) for row in (one, eight)]
        rows[-1].append(one["agreement"][key].rpartition(" ")[2])
    heads = ["int8, 224 px", "file", "ms per image, batch 1", "batch 8"]
    return [[*heads, "largest difference of a logit, relative to the largest logit or 1"], *rows]
