"""Tables of docs/error.md: what single images and many together had, beside the error asked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgt.acceleration.bound import error_bound, largest_error, relative_error
from dgt.utils.records import number

from .shared import RESULTS, Cells, bold, files, percent, read, span, table

Row = dict[str, Any]
PARTS = (1.0, 0.7, 0.6, 0.5, 0.4)  # of the error asked for, that a bound may be
LEAST_IMAGES = 30  # of a set: a dozen that choose, and enough others
DRAWS = 200
CONFIDENCE = 0.95
DRAWN = 12  # photographs, as a search takes
POOLS = ("coco", "imagenette", "camvid", "imagenette-train")  # large enough to draw from
EARLIER = RESULTS / "earlier_plans"  # whose images have chosen what part of the error a bound is


@table
def errors_above_the_one_asked() -> Cells:
    """Every time that an image was found above the error asked for, the largest share of it first."""
    found = [*read("error_failures")["rows"], *_fresh_searches(), *_draws_before(), *_plans()]
    found.sort(key=_times_asked, reverse=True)
    heads = ["largest of single images", "error asked", "settings, px", "images above it"]
    heads += ["bound told; found together", "cause", "since then"]
    return [heads, *[_failure_cells(row) for row in found]]


def _times_asked(row: Row) -> float:
    if not row["found"]:
        return 0.0
    return row["found"][0] / row["asked"] if row["asked"] else math.inf


def _failure_cells(row: Row) -> list[str]:
    size = f", {row['size']} px" if row["size"] else ""
    together = [
        f"{100 * value:.3g} %" if value else "-" for value in (row["bound"], row["together"])
    ]
    many = row["above"] or f"{len(row['found'])} or more"
    above = f"{many} of {row['images']}: " if row["images"] else ""
    return [
        bold(", ".join(f"{100 * error:.3g}" for error in row["found"][:3]) + " %")
        if row["found"]
        else "-",
        "-" if row["asked"] is None else percent(row["asked"]),
        row["settings"] + size,
        above + row["photographs"],
        "; ".join(together) if row["bound"] or row["together"] else "-",
        row["cause"],
        row["since"],
    ]


def _fresh_searches() -> Iterator[Row]:
    """Searches whose unseen images have a record, with one of them above the error asked for."""
    for row in (row for name in files("accelerate_dinov2_") for row in read(name)["rows"]):
        if row["unseen_most"] > row["asked_error"] > 0:  # exact attention differs by rounding
            yield {
                "settings": "fresh search",
                "size": row["size"],
                "photographs": "COCO",
                "asked": row["asked_error"],
                "found": [row["unseen_most"]],
                "above": None,
                "images": row["unseen"],
                "bound": row["error_bound"],
                "together": row["unseen_error"],
                "cause": "amplified",
                "since": "bounds at half",
            }


def _draws_before() -> Iterator[Row]:
    """Of draws of searches that used all of the error asked for, the worst of each size and error."""
    draws = [row for row in read("error_bound_campaign")["rows"] if row["layers_in_groups"]]
    worst = max(draws, key=lambda row: row["unseen_most"] / row["asked_error"])
    above = sum(row["unseen_most"] > row["asked_error"] for row in draws)
    yield {
        "settings": f"worst of {above} such, of {len(draws)} fresh searches",
        "size": worst["size"],
        "photographs": {"coco": "COCO", "imagenette": "Imagenette"}[worst["photographs"]],
        "asked": worst["asked_error"],
        "found": [worst["unseen_most"]],
        "above": None,
        "images": worst["inputs"],
        "bound": worst["bound"],
        "together": worst["unseen_error"],
        "cause": "amplified",
        "since": "bounds at half",
    }


def _plans() -> Iterator[Row]:
    """Sets of images of which some are above the error asked for with a plan of the package, of today
    or of before.
    """
    today = {
        (size, report["asked_error"], row["image"]): row["error"]
        for size, report, images in _unseen_by_plan(RESULTS)
        for row in images
    }
    for size, report, images in _unseen_by_plan(RESULTS):
        for row, _ in _sets_above(size, report, images):
            yield row | {"settings": "plan of the package", "since": "the same plan"}
    for size, report, images in _unseen_by_plan(EARLIER):
        for row, names in _sets_above(size, report, images):
            again = max(today[size, report["asked_error"], name] for name in names)
            yield row | {
                "settings": "an earlier plan",
                "since": f"bounds of plans at half: {percent(again)}",
            }


def _sets_above(size: int, report: Row, images: list[Row]) -> Iterator[tuple[Row, list[str]]]:
    """Of the images of a plan, the sets with some above the error asked for, and the names of those."""
    asked = report["asked_error"]
    for kind in dict.fromkeys(row["set"] for row in images):
        found = [image for image in images if image["set"] == kind]
        errors = [image["error"] for image in found]
        above = sorted((error for error in errors if error > asked), reverse=True)
        if above:
            row = {
                "size": size,
                "photographs": {"coco": "COCO", "imagenette": "Imagenette"}.get(kind, kind),
                "asked": asked,
                "found": above,
                "above": len(above),
                "images": len(found),
                "bound": report["error_bound"],
                "together": relative_error(squares_of(found)),
                "cause": "amplified",
            }
            yield row, [image["image"] for image in found if image["error"] > asked]


def _unseen_by_plan(folder: Path) -> Iterator[tuple[int, Row, list[Row]]]:
    """Of every plan the size, its report, and the images that were measured with it."""
    names = [
        path.relative_to(RESULTS).with_suffix("") for path in folder.glob("accelerate_unseen*.json")
    ]
    contents = [read(str(name)) for name in names]
    for content in sorted(contents, key=lambda it: (-it["size"], it["report"]["asked_error"])):
        yield content["size"], content["report"], content["rows"]


@table
def single_errors_of_draws() -> Cells:
    """What single images have with settings that a dozen others of their pool chose, by case and error asked."""
    draws = [row for row in read("single_errors_campaign")["rows"] if row["layers_in_groups"]]
    cases = {(row["size"], row["photographs"], row["asked_error"]) for row in draws}
    rows = []
    for size, photographs, asked in sorted(cases, key=lambda case: (-case[0], *case[1:])):
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
                percent(asked),
                bold(percent(max(errors))),
                percent(max(alone)),
                str(len(errors)),
                str(sum(error > asked for error in errors)),
                str(sum(error > 2 * asked for error in errors)),
                str(len(own)),
                str(sum(row["unseen_error"] <= row["bound"] for row in own)),
                str(many),
                span([100 * row["bound"] for row in own], 1) + " %",
                span([100 * row["products"] for row in own], 0) + " %",
            ]
        )
    heads = ["draws of", "error asked", "largest", "without the guard", "images"]
    heads += ["above the error", "above twice", "draws", "within the bound"]
    heads += ["with more than 1 in 20 above", "bound", "products of attention, of all"]
    return [heads, *rows]


@table
def limits_of_draws() -> Cells:
    """What none of so many photographs above the error asked says of all, by kind and of both."""
    draws = [row for row in read("single_errors_campaign")["rows"] if row["layers_in_groups"]]
    kinds = sorted({row["photographs"] for row in draws})
    rows = [
        [kind, *_limit_cells([row for row in draws if row["photographs"] == kind])]
        for kind in kinds
    ]
    needed = math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - 0.001))
    heads = ["draws of", "photographs", "samplings", "draws", "errors", "above the error asked"]
    heads += ["so of such photographs at most", "above `single_error_95`, of all errors"]
    of_thousand = [f"{needed:,}", "-", "-", "-", "0", percent(0.001), "-"]
    return [
        heads,
        *rows,
        ["both", *_limit_cells(draws)],
        ["what one in a thousand would take", *of_thousand],
    ]


def _limit_cells(draws: list[Row]) -> list[str]:
    photographs = {(row["photographs"], name) for row in draws for name in row["unseen"]}
    samplings = {(row["photographs"], row["size"], row["number"]) for row in draws}
    errors = [(error, row) for row in draws for error in row["unseen"].values()]
    above = sum(error > row["asked_error"] for error, row in errors)
    in_twenty = sum(error > row["single_error_95"] for error, row in errors)
    limit = percent(most_of_all(len(photographs))) if not above else "-"
    cells = [str(len(photographs)), str(len(samplings)), str(len(draws)), f"{len(errors):,}"]
    return [*cells, str(above), bold(limit), f"{in_twenty}: {percent(in_twenty / len(errors))}"]


def most_of_all(count: int) -> float:
    """The largest share of all of which none is seen in `count` independent ones once in twenty times."""
    return 1 - (1 - CONFIDENCE) ** (1 / count)


@table
def photographs_at_their_own_resolution() -> Cells:
    """Fresh searches on photographs that chose nothing, by size: what was told, what squares of others had."""
    rows = []
    for name in sorted(RESULTS.glob("accelerate_native_*.json"), reverse=True):
        found = read(name.stem)
        report, images = found["report"], found["rows"]
        photographs = {row["photograph"] for row in images}
        errors = [row["error"] for row in images]
        alone = [row["error_without_guard"] for row in images]
        asked = report["asked_error"]
        rows.append(
            [
                f"{found['size']} px, {percent(asked)}",
                bold(percent(max(errors))),
                percent(max(alone)),
                str(sum(error > asked for error in errors)),
                f"{len(images)} of {len(photographs)}",
                percent(most_of_all(len(photographs))) if max(errors) <= asked else "-",
                percent(report["error_bound"]),
                percent(relative_error(squares_of(images))),
                percent(report["single_error_95"]),
                str(sum(error > report["single_error_95"] for error in errors)),
                f"{sum(bool(row['acted']) for row in images)}",
            ]
        )
    heads = ["search", "largest", "without the guard", "above the error", "squares of photographs"]
    heads += [
        "so of such photographs at most",
        "bound",
        "together",
        "`single_error_95`",
        "above it",
        "guard acted on",
    ]
    return [heads, *rows]


def squares_of(images: list[Row]) -> Tensor:
    """The squared errors and sizes of images, (N, 2)."""
    return torch.tensor([image["squares"] for image in images], dtype=torch.float64)


@table
def unseen_images() -> Cells:
    """Images that chose nothing, by plan: all of them, and the worst of its sets; largest error first."""
    found = []
    for size, report, images in _unseen_by_plan(RESULTS):
        largest = max(row["error"] for row in images) / report["asked_error"]
        found.append((largest, size, report, images))
    rows = [
        [f"{size} px, {percent(report['asked_error'])}", *_unseen_cells(images, report)]
        for _, size, report, images in sorted(found, key=lambda it: -it[0])
    ]
    heads = ["plan", "images", "largest error", "without the guard"]
    heads += ["above the error asked (without)", "guard acted on, for worse"]
    heads += ["its products, of all, at most", "dozens within their bound, at least"]
    return [heads, *rows]


def _unseen_cells(images: list[Row], report: Row) -> list[str]:
    sets = {kind: [row for row in images if row["set"] == kind] for kind in _kinds(images)}
    worst = max(images, key=lambda row: row["error"])
    alone = max(images, key=lambda row: row["error_without_guard"])
    asked = report["asked_error"]
    above = sum(row["error"] > asked for row in images)
    without = sum(row["error_without_guard"] > asked for row in images)
    acted = [row for row in images if row["acted"]]
    worse = sum(row["error"] > row["error_without_guard"] for row in acted)
    costly = max(sets, key=lambda kind: _share_of_guard(sets[kind]))
    held = {kind: _dozens_within(squares_of(own)) for kind, own in sets.items() if kind in POOLS}
    least = min(held, key=lambda kind: held[kind])
    return [
        str(len(images)),
        f"{bold(percent(worst['error']))} {worst['set']}",
        f"{percent(alone['error_without_guard'])} {alone['set']}",
        f"{above} ({without})",
        f"{len(acted)}, {worse}",
        f"{100 * _share_of_guard(sets[costly]):.3g} % {costly}",
        f"{held[least]} of {DRAWS} {least}",
    ]


def _kinds(images: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["set"] for row in images))


def _share_of_guard(images: list[Row]) -> float:
    """The share of the guard's products in all of an accelerated model."""
    total = {key: sum(row["products"][key] for row in images) for key in images[0]["products"]}
    return total["guard"] / (total["groups"] + total["weights"] + total["guard"])


def _dozens_within(squares: Tensor) -> int:
    """In how many of the draws the error of a dozen images is within the bound that another dozen gives."""
    order = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(DRAWS):
        drawn = torch.randperm(len(squares), generator=order)
        seen, unseen = squares[drawn[: 2 * DRAWN]].split(DRAWN)
        held += relative_error(unseen) <= error_bound(seen)
    return held


@table
def how_many_images() -> Cells:
    """How often the error of some unseen images is more than 20 % off that of all of them."""
    counts = ("32", "64", "128", "256")
    rows = []
    for row in read("accelerate_imagenette")["rows"]:
        if row["unseen_error"] > 1e-5:
            cells = [percent(row["asked_error"]), str(row["unseen_images"])]
            shares = [number(row["missed"][count], 1, 100) + " %" for count in counts]
            rows.append([*cells, number(row["varies"], 1), *shares])
    heads = ["target error", "images", "spread"]
    return [[*heads, *(f"sample of {count}" for count in counts)], *rows]


@table
def parts_of_the_error() -> Cells:
    """What single images have where the bound of a dozen others is so much of the error asked for."""
    sets = [
        [row for row in images if row["set"] == kind]
        for _, _, images in _unseen_by_plan(EARLIER)
        for kind in (*POOLS, "native")
    ]
    large = [found for found in sets if len(found) >= LEAST_IMAGES]
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
