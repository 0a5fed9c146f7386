"""Tables of docs/gpu.md, attention and models on a GPU, and of docs/kernels.md, what the host does and a step moves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dgt.utils.records import number

from .shared import NAMES, Cells, read, table

RESULT = "gpu_h200"
ATTENTIONS = {
    "all_keys": "all keys, flash",
    "all_keys_cudnn": "all keys, cuDNN",
    "torch": "groups, PyTorch",
    "triton": "groups, Triton",
    "triton_graph": "in a CUDA graph",
}
MODELS = {
    "swin": NAMES["swin_tiny_patch4_window7_224"],
    "dgt_triton": NAMES["dgt_tiny"],
    "dgt": NAMES["dgt_tiny"] + ', `backend="torch"`',
}


def _rows_of_attention() -> Iterator[tuple[dict[str, Any], str, str]]:
    """The rows of attention, with their shape and pass as text."""
    for row in read(RESULT)["rows"]:
        shape = re.search(r"B(\d+) H(\d+) L(\d+) k(\d+)", row["name"])
        if shape is not None:
            forward = row["name"].startswith("forward")
            yield row, ", ".join(shape.groups()), "forward" if forward else "forward, backward"


@table
def attention_on_a_gpu() -> Cells:
    """Milliseconds and peaks of memory, and what ours takes of the better of all keys."""
    peaks_of = ("all_keys", "torch", "triton")
    heads = ["images, heads, tokens, k", "pass", *(f"{kind}: ms" for kind in ATTENTIONS.values())]
    heads += ["times as fast", "MiB: flash, PyTorch operations, Triton", "Triton's, of flash's"]
    cells = [heads]
    for row, shape, direction in _rows_of_attention():
        times = (number(row[kind]["ms"], 2) if kind in row else "-" for kind in ATTENTIONS)
        best = min(row["all_keys"]["ms"], row["all_keys_cudnn"]["ms"])
        peaks = {kind: row[kind]["peak_bytes"] for kind in peaks_of}
        cells.append(
            [
                shape,
                direction,
                *times,
                number(best / row["triton"]["ms"], 2),
                ", ".join(number(peak, 0, 2.0**-20) for peak in peaks.values()),
                number(peaks["triton"] / peaks["all_keys"], 2),
            ]
        )
    return cells


@table
def models_on_a_gpu() -> Cells:
    """Milliseconds and images per second of whole models."""
    cells = [["model", "step", "ms", "of Swin-T's time", "images/s", "peak, GiB"]]
    for row in read(RESULT)["rows"]:
        is_step = re.fullmatch(r"(inference|training) (eager|compiled)", row["name"])
        for name, model in MODELS.items():
            if is_step and name in row:
                measured = row[name]
                cells.append(
                    [
                        model,
                        row["name"].removesuffix(" eager"),
                        number(measured["ms"], 1),
                        number(measured["ms"] / row["swin"]["ms"], 2),
                        number(measured["images_per_second"], 0),
                        number(measured["peak_bytes"], 1, 2.0**-30),
                    ]
                )
    return cells


@table
def traffic_of_steps() -> Cells:
    """Gigabytes and kernels of a step by kind, counted from shapes."""
    columns = {
        f"{NAMES[row['model']]}, {row['step']}": row["kinds"] for row in read("traffic")["rows"]
    }
    kinds = {kind for column in columns.values() for kind in column} - {"all"}
    largest = {
        kind: max(column.get(kind, {"bytes": 0})["bytes"] for column in columns.values())
        for kind in kinds
    }
    cells = [["GB, kernels", *columns]]
    for kind in ["all", *sorted(kinds, key=largest.__getitem__, reverse=True)]:
        found = (column.get(kind) for column in columns.values())
        numbers = (
            f"{number(one['bytes'], 1, 1e-9)}, {one['kernels']}" if one else "-" for one in found
        )
        cells.append([kind, *numbers])
    return cells


@table
def attention_on_the_host() -> Cells:
    """What the host does in a call of the Triton attention."""
    counts = ("launches", "allocations", "python", "built_in")
    heads = ["launches", "allocations", "calls of Python functions", "of built-in functions"]
    cells = [["images, heads, tokens", "pass", *heads]]
    for row in read("attention_host")["rows"]:
        shape = ", ".join(str(size) for size in row["shape"])
        cells.append([shape, row["pass"], *(str(row[name]) for name in counts)])
    return cells
