"""Tables of docs/dinov2.md: DINOv2-S accelerated, and residual keys compared with other methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgt.acceleration.bound import error_bound, largest_error, relative_error
from dgt.utils.records import number

from .rivals import (
    MODEL,
    OURS,
    cells,
    lost_cells,
    place_of,
    rows_of_table,
    shown_with_ms,
)
from .shared import RESULTS, Cells, bold, generation, median_and_most, read, span, table

SHORT = {
    "dense": "exact, our kernel",
    "merged tokens (ToMe)": "ToMe",
    "blocks (SpargeAttn)": "SpargeAttn",
    "blocks of clusters (SVG 2)": "SVG 2",
    "with compensation (SVG-EAR)": "SVG-EAR",
}
STUDIES = {
    "DINOv2-S": "residual_rivals",
    "ViT of CamVid": "residual_rivals_camvid",
    "ViT of Imagenette": "residual_rivals_imagenette",
}
PARTS = (1.0, 0.7, 0.6, 0.5, 0.4)  # of the error asked for, that a bound may be
LEAST_IMAGES = 30  # of a set: a dozen that choose, and enough others
DRAWS = 200
DRAWN = 12  # photographs, as a search takes
HEADS = (
    "px",
    "processor",
    "error asked",
    "layers in groups",
    "bound at 95 %",
    "largest of unseen images",
    "together (how many)",
    "cosine, lowest hundredth",
    "guard acted",
    "attention",
    "model",
    "exact attention alone",
    "without attention",
    "ms before, after, timed again",
    "model, timed again",
    "batch 4",
    "seconds of search",
)


def _percent(error: float, half: float | None = None) -> str:
    """An error in percent, with two digits; of exact attention only rounding is left."""
    if error < 1e-4:
        return "0"
    return f"{100 * error:.2g}" + (f" ± {100 * half:.1g}" if half else "") + " %"


def _faster(row: dict[str, Any], batch: int) -> str:
    """Times as fast at a batch size, a dash where that was not timed."""
    times = row["batches"].get(str(batch))
    return number(times["ms_before"] / times["ms_after"], 2) if times else "-"


def _unseen(row: dict[str, Any]) -> list[str]:
    """Errors, cosines and what the guard did on images that chose nothing; dashes where not measured."""
    if "unseen_error" not in row:
        return ["-"] * 4
    error = f"{_percent(row['unseen_error'], row['unseen_half'])} ({row['unseen']})"
    return [
        _percent(row["unseen_most"]),
        error,
        number(row["unseen_cosine_low"], 4),
        str(row["unseen_guard_acted"]),
    ]


def accelerated() -> list[str]:
    """The raw results of accelerating DINOv2-S, one for each processor."""
    return sorted(path.stem for path in RESULTS.glob("accelerate_dinov2_*.json"))


@table
def dinov2() -> Cells:
    """Errors asked, bounded, and measured on images that chose nothing; speed in times."""
    rows = []
    found = [(row, generation(name)) for name in accelerated() for row in read(name)["rows"]]
    for row, processor in sorted(
        found, key=lambda found: (found[0]["size"], found[1], found[0]["asked_error"])
    ):
        in_groups = sum(layer["choice"] == "groups" for layer in row["layers"])
        one = row["batches"].get("1")
        times = f"{one['ms_before']:.0f}, {one['ms_after']:.0f}" if one else "-"
        rows.append(
            [
                str(row["size"]),
                processor,
                _percent(row["asked_error"]),
                f"{in_groups} of {len(row['layers'])}",
                _percent(row["error_bound"]),
                *_unseen(row),
                bold(number(row["attention_speedup"], 2)),
                bold(number(row["model_speedup"], 2)),
                number(row["exact_speedup"], 2) if "exact_speedup" in row else "-",
                number(row["bound"], 2),
                times,
                *(_faster(row, batch) for batch in (1, 4)),
                f"{row['seconds']:.0f}",
            ]
        )
    return [list(HEADS), *rows]


@table
def dinov2_in_runtimes() -> Cells:
    """The unmodified model in each runtime, and the accelerated one in eager PyTorch and OpenVINO."""
    rows = []
    for name in accelerated():
        content = read(name)
        place = f"{generation(name)}, {content['machine']['threads']}"
        for row in content["rows"]:
            if times := row.get("runtimes"):
                before = [times[f"{kind}_before"] for kind in ("eager", "compiled", "openvino")]
                names = ("eager_after", "eager_unguarded", "openvino_after")
                after = [times[name] for name in names if name in times]
                shown = [f"{times[name]:.0f}" if name in times else "-" for name in names]
                cells = [str(row["size"]), place, _percent(row["asked_error"])]
                cells += [*(f"{ms:.0f}" for ms in before), *shown]
                cells.append(bold(number(min(before) / min(after), 2)))
                errors = row.get("bfloat16_errors", {})
                half = [
                    f"{times[f'bfloat16_{when}']:.0f} ({_percent(error)})"
                    for when, error in errors.items()
                ]
                rows.append([*cells, ", ".join(half) or "-"])
    heads = ["px", "processor, threads", "error asked", "unmodified: eager, ms", "compiled"]
    heads += ["OpenVINO", "accelerated: eager, ms", "without its guard", "OpenVINO, extension"]
    heads += ["fastest to fastest", "eager in bfloat16 (its error): unmodified, accelerated"]
    return [heads, *rows]


def _unseen_by_plan() -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
    """Of every plan what it is called, the error asked, and the images that were measured with it."""
    contents = [read(path.stem) for path in RESULTS.glob("accelerate_unseen*.json")]
    for content in sorted(contents, key=lambda it: (-it["size"], it["report"]["asked_error"])):
        asked = content["report"]["asked_error"]
        yield f"{content['size']} px, {_percent(asked)} asked", asked, content["rows"]


@table
def unseen_images() -> Cells:
    """Errors of images that chose nothing, one by one, by set, with the guard and without it."""
    rows = []
    for place, asked, images in _unseen_by_plan():
        for kind in dict.fromkeys(row["set"] for row in images):
            found = [row for row in images if row["set"] == kind]
            rows.append([place, kind, *_unseen_cells(found, asked)])
        rows.append([place, "all", *_unseen_cells(images, asked)])
    heads = ["plan", "images", "number", "largest error", "without the guard", "median"]
    heads += ["above the error asked", "without the guard", "above twice", "without the guard"]
    heads += ["guard looked closely at", "acted on", "worse with it", "its products, of all"]
    return [heads, *rows]


def _unseen_cells(found: list[dict[str, Any]], asked: float) -> list[str]:
    errors = [row["error"] for row in found]
    alone = [row["error_without_guard"] for row in found]
    cells = [str(len(found)), *map(_percent, (max(errors), max(alone)))]
    cells.append(_percent(statistics.median(errors)))
    for limit in (asked, 2 * asked):
        cells += [str(sum(error > limit for error in values)) for values in (errors, alone)]
    total = {key: sum(row["products"][key] for row in found) for key in found[0]["products"]}
    share = total["guard"] / (total["groups"] + total["weights"])
    worse = sum(row["error"] > row["error_without_guard"] for row in found)
    cells += [str(sum(bool(row[key]) for row in found)) for key in ("checked_closely", "acted")]
    return [*cells, str(worse), _percent(share)]


@table
def bounds_of_draws() -> Cells:
    """How often the bound of a dozen photographs is above the error of another dozen, by plan."""
    rows = []
    for place, _, images in _unseen_by_plan():
        for kind in ("coco", "imagenette"):
            found = [row["squares"] for row in images if row["set"] == kind]
            ratios = _bounds_over_errors(torch.tensor(found, dtype=torch.float64))
            held = sum(ratio >= 1 for ratio in ratios)
            cells = [place, kind, str(len(found)), f"{held} of {DRAWS}"]
            rows.append([*cells, *median_and_most(ratios)])
    heads = ["plan", "photographs", "number", "within the bound"]
    return [[*heads, "bound over error: median", "eight in ten"], *rows]


def _bounds_over_errors(squares: Tensor) -> list[float]:
    """Of many draws, the bound that a dozen images give over the error of another dozen."""
    order = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(DRAWS):
        drawn = torch.randperm(len(squares), generator=order)
        seen, unseen = squares[drawn[: 2 * DRAWN]].split(DRAWN)
        ratios.append(error_bound(seen) / relative_error(unseen))
    return ratios


@table
def single_errors_of_draws() -> Cells:
    """What single images have with settings that a dozen others of their pool chose, by case and error asked."""
    rows = []
    draws = [row for row in read("single_errors_campaign")["rows"] if row["layers_in_groups"]]
    cases = {(row["size"], row["photographs"], row["asked_error"]) for row in draws}
    for size, photographs, asked in sorted(cases):
        own = [
            row
            for row in draws
            if (row["size"], row["photographs"], row["asked_error"]) == (size, photographs, asked)
        ]
        errors = [error for row in own for error in row["unseen"].values()]
        alone = [
            error
            for row in own
            for error in {**row["unseen"], **row["unseen_without_guard"]}.values()
        ]
        many = sum(
            sum(error > asked for error in row["unseen"].values()) > len(row["unseen"]) / 20
            for row in own
        )
        rows.append(
            [
                f"{size} px, {photographs}",
                _percent(asked),
                _percent(max(errors)),
                _percent(max(alone)),
                f"{sum(error > 2 * asked for error in errors)} of {len(errors)}",
                f"{sum(error > asked for error in errors)} of {len(errors)}",
                f"{many} of {len(own)}",
                f"{sum(row['unseen_error'] <= row['bound'] for row in own)} of {len(own)}",
                span([100 * row["bound"] for row in own], 1) + " %",
                span([100 * row["single_error_999"] for row in own], 1) + " %",
                span([100 * row["products"] for row in own], 0) + " %",
            ]
        )
    heads = ["draws of", "error asked", "largest of single images", "without the guard"]
    heads += ["images above twice", "images above it", "draws with more than 1 in 20 above it"]
    heads += ["many together within the bound", "bound", "one in a thousand, as reported"]
    return [[*heads, "products of attention, of all"], *rows]


@table
def parts_of_the_error() -> Cells:
    """What single images have where the bound of a dozen others is so much of the error asked for."""
    sets = {
        f"{place}, {kind}": [row for row in images if row["set"] == kind]
        for place, _, images in _unseen_by_plan()
        for kind in ("coco", "imagenette", "native")
    }
    large = [found for found in sets.values() if len(found) >= LEAST_IMAGES]
    return [
        [
            "bound, of the error asked",
            "largest of single images, of the error asked",
            "without the guard",
            "images above twice",
            "without the guard",
            "images above it",
            "draws with more than 1 in 20 above it",
            "error asked over that of all together",
        ],
        *[_part_cells(large, part) for part in PARTS],
    ]


def _part_cells(sets: list[list[dict[str, Any]]], part: float) -> list[str]:
    guarded, alone = _Found(), _Found()
    order = torch.Generator().manual_seed(0)
    for found in sets:
        with_guard = torch.tensor([row["squares"] for row in found], dtype=torch.float64)
        without = with_guard.clone()
        errors = torch.tensor([row["error_without_guard"] for row in found], dtype=torch.float64)
        without[:, 0] = errors.square() * without[:, 1]
        for _ in range(DRAWS // 4):
            drawn = torch.randperm(len(found), generator=order)
            guarded.add(with_guard[drawn], part)
            alone.add(without[drawn], part)
    largest = [number(most.largest, 1) for most in (guarded, alone)]
    twice = [f"{number(most.twice / most.images, 2, 100)} %" for most in (guarded, alone)]
    above = f"{number(guarded.above / guarded.images, 1, 100)} %"
    draws = f"{number(guarded.many_above / guarded.draws, 0, 100)} %"
    times = number(statistics.median(guarded.times), 1)
    return [number(part, 1), *largest, *twice, above, draws, times]


class _Found:
    """What draws of a dozen and all other images of their set have shown."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.images = self.above = self.twice = self.draws = self.many_above = 0
        self.times: list[float] = []

    def add(self, squares: Tensor, part: float) -> None:
        """Ask for the error of which the bound of the first dozen is so much."""
        seen, unseen = squares[:DRAWN], squares[DRAWN:]
        asked = error_bound(seen) / part
        errors = (unseen[:, 0] / unseen[:, 1]).sqrt() / asked
        above = int((errors > 1).sum())
        self.largest = max(self.largest, largest_error(unseen) / asked)
        self.draws += 1
        self.images += len(unseen)
        self.above += above
        self.twice += int((errors > 2).sum())
        self.many_above += above > len(unseen) / 20
        self.times.append(asked / relative_error(unseen))


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


@table
def cells_that_residual_keys_lost() -> Cells:
    """Comparisons in which a rival is ahead, with the time that both take."""
    rows = [
        [
            f"{model}, {place_of(cell)}",
            SHORT.get(cell.rival, cell.rival),
            shown_with_ms(cell.best.get(cell.rival)),
            shown_with_ms(cell.best.get(OURS)),
        ]
        for model, raw in STUDIES.items()
        for cell in lost_cells(cells(read(raw)))
    ]
    return [["comparison", "ahead", "its error and time", OURS], *(rows or [["none", *["-"] * 3]])]
