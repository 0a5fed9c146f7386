"""Tables of the study of a matcher's cross-attention, `studies/matching/`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dgt.utils.records import interval, number

from .shared import Cells, bold, read, table

Pairs = list[dict[str, Any]]
SIZES = (1024, 2048, 4096, 8000)


def pairs_at(points: int) -> Pairs:
    """The pairs of a record that have enough possible matches."""
    return [pair for pair in read(f"matching/{points}")["pairs"] if "arms" in pair]


def correct(pairs: Pairs, arm: str, way: str) -> list[int]:
    """Correct matches of an arm on every pair."""
    return [pair["arms"][arm][way]["correct"] for pair in pairs]


def share(parts: list[int], wholes: list[int]) -> str:
    """The ratio of two sums over pairs in percent, with its interval."""
    return ratio(parts, wholes, 1, 100)


def ratio(parts: Sequence[float], wholes: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """The ratio of two sums over pairs, and half of its 95 % interval by the jackknife, where there are
    several.
    """
    part, whole, count = sum(parts), sum(wholes), len(parts)
    if count == 1:
        return number(part / whole, digits, factor)
    pseudo = [
        count * part / whole - (count - 1) * (part - one) / (whole - other)
        for one, other in zip(parts, wholes, strict=True)
    ]
    return number(part / whole, digits, factor, interval(pseudo)[1])


def arms_of(pairs: Pairs) -> list[str]:
    """The arms that all pairs of a record have, in their order."""
    return [arm for arm in pairs[0]["arms"] if all(arm in pair["arms"] for pair in pairs)]


def close_corners(pairs: Pairs, arm: str, pixels: float) -> int:
    """How many homographies have their corners within so many pixels."""
    errors = [pair["arms"][arm]["threshold"]["corners"] for pair in pairs]
    return sum(error is not None and error <= pixels for error in errors)


@table
def matching_arms() -> Cells:
    """All arms at 1,024 keypoints."""
    pairs = pairs_at(1024)
    milliseconds = read("matching/calls")["1024"]["milliseconds"]
    possible = [pair["possible"] for pair in pairs]
    heads = [
        "keys of a query, in cross-attention",
        "correct matches, %",
        "with pruning, %",
        "of possible, without threshold, %",
        f"homographies within 3 / 5 px, of {len(pairs)}",
        "one call, ms",
    ]
    rows = []
    for arm in arms_of(pairs):
        ratios = [
            share(correct(pairs, arm, way), correct(pairs, "all", way))
            for way in ("threshold", "pruned")
        ]
        rows.append(
            [
                arm,
                *ratios,
                share(correct(pairs, arm, "no threshold"), possible),
                f"{close_corners(pairs, arm, 3)} / {close_corners(pairs, arm, 5)}",
                number(milliseconds.get(arm), 1),
            ]
        )
    return [heads, *rows]


def by_keypoints(cell: Callable[[Pairs, str], str]) -> Cells:
    """A row for every arm, a column for every number of keypoints."""
    records = {points: pairs_at(points) for points in SIZES}
    heads = ["keys of a query"]
    heads += [f"{points:,} ({len(pairs)} pairs)" for points, pairs in records.items()]
    arms = dict.fromkeys(arm for pairs in records.values() for arm in arms_of(pairs))
    rows = [
        [arm, *(cell(pairs, arm) if arm in arms_of(pairs) else "-" for pairs in records.values())]
        for arm in arms
    ]
    return [heads, *rows]


@table
def matching_by_keypoints() -> Cells:
    """Correct matches with the threshold, in percent of those with all keys."""
    return by_keypoints(
        lambda pairs, arm: share(
            correct(pairs, arm, "threshold"), correct(pairs, "all", "threshold")
        )
    )


@table
def matching_without_threshold() -> Cells:
    """Correct matches without the threshold, in percent of those that are possible."""
    return by_keypoints(
        lambda pairs, arm: share(
            correct(pairs, arm, "no threshold"), [pair["possible"] for pair in pairs]
        )
    )


@table
def matching_times() -> Cells:
    """Seconds of the whole matcher, and how many times as fast as in SDPA groups are."""
    record = read("matching/times")
    heads = ["keypoints", "points", "pairs", "einsum, s", "SDPA, s", "groups, s"]
    heads += ["**SDPA / groups**", "correct matches kept, %", "groups"]
    rows = []
    for points in sorted(record, key=int):
        runs = record[points]
        for kept in ("all points", "pruned"):
            seconds = {
                way: [min(run[kept]["seconds"][way]) for run in runs]
                for way in ("einsum", "SDPA", "groups")
            }
            matches = {
                way: [run[kept]["correct"][way] for run in runs] for way in ("groups", "SDPA")
            }
            rows.append(
                [
                    f"{int(points):,}",
                    "all kept" if kept == "all points" else kept,
                    str(len(runs)),
                    *(number(statistics.fmean(each), 2) for each in seconds.values()),
                    bold(ratio(seconds["SDPA"], seconds["groups"], 2)),
                    ratio(matches["groups"], matches["SDPA"], 1, 100),
                    runs[0]["groups"].removeprefix("those of its group: "),
                ]
            )
    return [heads, *rows]


@table
def matching_search() -> Cells:
    """What a search by `dgt.accelerate` gains on pairs that chose nothing."""
    record = read("matching/search")
    heads = ["keypoints", "error asked for", "search, s", "pairs", "SDPA, s", "accelerated, s"]
    heads += ["**SDPA / accelerated**", "exact kernel alone", "correct matches kept, %"]
    rows = []
    for points in sorted(record, key=int):
        found = record[points]
        pairs = found["pairs"]
        ways = ("SDPA", "accelerated")
        seconds = {way: [min(pair["seconds"][way]) for pair in pairs] for way in ways}
        correct = {way: [pair["correct"][way] for pair in pairs] for way in ways}
        rows.append(
            [
                f"{int(points):,}",
                number(found["error"], 1),
                number(found["search_seconds"], 0),
                str(len(pairs)),
                *(number(statistics.fmean(each), 2) for each in seconds.values()),
                bold(ratio(seconds["SDPA"], seconds["accelerated"], 2)),
                number(found["exact_speedup"], 2),
                ratio(correct["accelerated"], correct["SDPA"], 1, 100),
            ]
        )
    return [heads, *rows]


@table
def matching_calls() -> Cells:
    """Milliseconds of one cross-attention by every arm."""
    record = read("matching/calls")
    sizes = sorted(record, key=int)
    arms = dict.fromkeys(arm for points in sizes for arm in record[points]["milliseconds"])
    heads = ["one call, one thread, ms", *(f"{int(points):,} keypoints" for points in sizes)]
    return [
        heads,
        *(
            [arm, *(number(record[points]["milliseconds"].get(arm), 1) for points in sizes)]
            for arm in arms
        ),
    ]
