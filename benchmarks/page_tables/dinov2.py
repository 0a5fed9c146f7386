"""Tables of docs/dinov2.md: DINOv2-S accelerated, and residual keys compared with other methods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dgt.utils.records import number

from .rivals import (
    MODEL,
    cells,
    rows_of_table,
)
from .shared import Cells, bold, files, generation, percent, read, table

SHORT = {
    "dense": "exact, our kernel",
    "merged tokens (ToMe)": "ToMe",
    "blocks (SpargeAttn)": "SpargeAttn",
    "blocks of clusters (SVG 2)": "SVG 2",
    "with compensation (SVG-EAR)": "SVG-EAR",
}
HALF = ("accelerate_dinov2_zen4", "accelerate_dinov2_xeon_amx")
"""Searches that kept their bound at half of the error asked, as one of today does."""
STUDIES = {
    "DINOv2-S": "residual_rivals",
    "ViT of CamVid": "residual_rivals_camvid",
    "ViT of Imagenette": "residual_rivals_imagenette",
}


def _faster(row: dict[str, Any], batch: int) -> str:
    """Times as fast at a batch size, a dash where that was not timed."""
    times = row["batches"].get(str(batch))
    return number(times["ms_before"] / times["ms_after"], 2) if times else "-"


def _unseen(row: dict[str, Any]) -> list[str]:
    """Errors, cosines and what the guard did on images that chose nothing; dashes where not measured."""
    if "unseen_error" not in row:
        return ["-"] * 4
    error = f"{percent(row['unseen_error'], row['unseen_half'])} ({row['unseen']})"
    return [
        percent(row["unseen_most"]),
        error,
        number(row["unseen_cosine_low"], 4),
        str(row["unseen_guard_acted"]),
    ]


def _searches() -> list[tuple[dict[str, Any], list[str]]]:
    """Searches that kept their bound, by size, processor and error asked, and the cells that say these."""
    found = [(row, generation(name)) for name in HALF for row in read(name)["rows"]]
    found.sort(key=lambda pair: (pair[0]["size"], pair[1], pair[0]["asked_error"]))
    return [
        (row, [str(row["size"]), processor, percent(row["asked_error"])])
        for row, processor in found
    ]


@table
def dinov2_errors() -> Cells:
    """Errors asked, bounded, and measured on images that chose nothing."""
    heads = ["px", "processor", "error asked", "layers in groups", "bound at 95 %"]
    heads += ["largest of unseen", "together (how many)", "cosine, lowest hundredth", "guard acted"]
    rows = []
    for row, place in _searches():
        in_groups = sum(layer["choice"] == "groups" for layer in row["layers"])
        layers = f"{in_groups} of {len(row['layers'])}"
        rows.append([*place, layers, percent(row["error_bound"]), *_unseen(row)])
    return [heads, *rows]


@table
def dinov2_times() -> Cells:
    """Times as fast by errors asked, and the milliseconds of the second measurement."""
    heads = ["px", "processor", "error asked", "attention", "model", "without attention"]
    heads += ["ms before, after", "timed again", "batch 4", "search, s"]
    rows = []
    for row, place in _searches():
        one = row["batches"].get("1")
        rows.append(
            [
                *place,
                bold(number(row["attention_speedup"], 2)),
                bold(number(row["model_speedup"], 2)),
                number(row["bound"], 2),
                f"{one['ms_before']:.0f}, {one['ms_after']:.0f}" if one else "-",
                *(_faster(row, batch) for batch in (1, 4)),
                f"{row['seconds']:.0f}",
            ]
        )
    return [heads, *rows]


@table
def dinov2_at_a_glance() -> Cells:
    """Of the processors with units for bfloat16 and a search of today, times at 1036 px in eager PyTorch."""
    found = {
        (generation(name), row["asked_error"]): row["runtimes"]
        for name in HALF
        for row in read(name)["rows"]
        if row["size"] == 1036 and "runtimes" in row
    }
    places = list(dict.fromkeys(place for place, _ in found))
    rows = []
    for asked, code in ((0.0, "`error=0`"), (0.05, "`error=0.05`")):
        for prefix, kind in (("eager", "float32"), ("bfloat16", "bfloat16")):
            times = [found[place, asked] for place in places]
            pairs = [(one[f"{prefix}_before"], one[f"{prefix}_after"]) for one in times]
            cells = [f"{before:.0f}, {bold(f'{after:.0f}')}" for before, after in pairs]
            rows.append([f"{code}, {kind}", *cells])
    return [["1036 px", *places], *rows]


def _on_processors() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """All measurements, with the cells of their size, processor and threads, and error asked."""
    for name in files("accelerate_dinov2_"):
        content = read(name)
        place = f"{generation(name)}, {content['machine']['threads']}"
        for row in content["rows"]:
            yield row, [str(row["size"]), place, percent(row["asked_error"])]


@table
def dinov2_in_runtimes() -> Cells:
    """The unmodified model in each runtime, and the accelerated one in eager PyTorch and OpenVINO."""
    rows = []
    for row, place in _on_processors():
        times = row.get("runtimes")
        if not times:
            continue
        before = [times[f"{kind}_before"] for kind in ("eager", "compiled", "openvino")]
        after = [times.get(name) for name in ("eager_after", "openvino_after")]
        shown = [f"{ms:.0f}" if ms else "-" for ms in (*before, *after)]
        fastest = min(before) / min(filter(None, after))
        rows.append([*place, *shown, bold(number(fastest, 2))])
    heads = ["px", "processor, threads", "error asked", "unmodified: eager, ms", "compiled"]
    heads += ["OpenVINO", "accelerated: eager, ms", "OpenVINO, extension"]
    return [[*heads, "fastest to fastest"], *rows]


@table
def dinov2_in_bfloat16() -> Cells:
    """Both models in eager PyTorch in bfloat16: milliseconds, and the error beside float32."""
    rows = []
    for row, place in _on_processors():
        errors = row.get("bfloat16_errors")
        if not errors:
            continue
        shown = [
            f"{row['runtimes'][f'bfloat16_{when}']:.0f} ({percent(errors[when])})"
            for when in ("before", "after")
        ]
        rows.append([*place, *shown])
    heads = ["px", "processor, threads", "error asked"]
    return [[*heads, "unmodified, ms (error)", "accelerated, ms (error)"], *rows]


@table
def dinov2_in_openvino() -> Cells:
    """Both models in PyTorch in bfloat16 and in OpenVINO's default precision, in milliseconds."""
    rows = []
    for name in files("dinov2_openvino_"):
        content = read(name)
        for row in sorted(content["rows"], key=lambda row: -row["size"]):
            ms = row["ms"]
            shown = [
                f"{ms[arm]:.0f} ({percent(row['errors'][arm])})"
                for arm in ("pytorch", "pytorch_exact", "pytorch_plan", "openvino", "openvino_plan")
            ]
            ahead = [ms[arm] / ms["openvino_plan"] for arm in ("pytorch_plan", "openvino")]
            place = f"{generation(name)}, {row['threads']}"
            rows.append([str(row["size"]), place, *shown, *(number(each, 2) for each in ahead)])
    heads = ["px", "processor, threads", "PyTorch, ms (error)", "exact", "plan for 5 %"]
    heads += ["OpenVINO, ms (error)", "plan for 5 %, extension"]
    heads += ["plan: PyTorch to OpenVINO", "OpenVINO: without to with plan"]
    return [heads, *rows]


@table
def rivals() -> Cells:
    """Errors of whole models in percent, with one method in all layers, by the time allowed."""
    lines: list[list[str]] = []
    heads: list[str] = []
    for model, raw in STUDIES.items():
        heads, *rows = rows_of_table(cells(read(raw)))
        lines += [[f"{model}, {row[0]} px", *row[2:]] for row in rows if row[1] == MODEL]
    named = [SHORT.get(head, head) for head in heads[3:]]
    return [["model", heads[2], *named], *lines]


@table
def residual_keys_beside_rivals() -> Cells:
    """In how many comparisons, of layers and of whole models, residual keys are equal or better."""
    rows = []
    for model, raw in STUDIES.items():
        compared = [cell for cell in cells(read(raw)) if math.isfinite(cell.theirs)]
        rows.append([model, str(len(compared)), str(sum(cell.won for cell in compared))])
    heads = ["comparisons, of layers and of the whole model", "a rival is fast enough in"]
    return [[*heads, "residual keys are equal or better in"], *rows]
