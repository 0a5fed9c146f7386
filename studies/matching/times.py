"""Times: of the whole matcher, of the matcher after a search by `dgt.accelerate`, and of single calls."""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from typing import Any

import torch
from torch import Tensor

import dgt
from dgt.runs.environment import environment
from dgt.utils.errors import UserError
from dgt.utils.json_files import read_json
from dgt.utils.records import write_record
from studies.matching.arms import ALL_KEYS, TIMED, Replaced, arms_at, capture_call, match
from studies.matching.pairs import Described, describe, images_in, load_models, numbered_pair, score

# Pairs from this number on choose groups in a search; nothing else matches them.
FIRST_TO_CHOOSE = 200
TO_CHOOSE = 8
CALLS_TIMED = 3
TIMED_LAYER = 2  # from 0, as the one that is drawn


def measure_times(options: argparse.Namespace) -> None:
    """Time the matcher as kornia has it, in SDPA, and in groups, side by side on one pair; adds to the record.

    Raises:
        UserError: an image of the pair has fewer keypoints.
    """
    from kornia.feature.lightglue import CrossBlock

    from examples.matcher import CrossAttention

    torch.set_num_threads(options.threads)
    models = load_models(options.package)
    pair = numbered_pair(options.pair, images_in(options.coco), [], options.points)
    described = describe(models.features, pair, options.points)
    found = [len(places) for places in described.places]
    if min(found) < options.points:
        raise UserError(f"--pair must have {options.points} keypoints in both images, got {found}")
    grouped = next(arm for arm in arms_at(options.points) if arm.name == TIMED[options.points])
    ways = {
        "einsum": (CrossBlock, ALL_KEYS),
        "SDPA": (CrossAttention, ALL_KEYS),
        "groups": (CrossAttention, grouped),
    }
    measured: dict[str, Any] = {"pair": options.pair, "groups": grouped.name}
    for prunes in (False, True):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        correct = {}
        for _, (name, (kind, arm)) in itertools.product(range(options.rounds), ways.items()):
            for layer in models.matcher.transformers:
                layer.cross_attn.__class__ = kind
            start = time.perf_counter()
            matches = match(models.matcher, described, arm, prunes)["matches"][0]
            seconds[name].append(time.perf_counter() - start)
            correct[name] = score(described, matches)["correct"]
        measured["pruned" if prunes else "all points"] = {"seconds": seconds, "correct": correct}
    path = options.records / "times.json"
    record = read_json(path) if path.is_file() else {}
    record.setdefault(str(options.points), []).append({**measured, **environment()})
    write_record(path, record)


def measure_search(options: argparse.Namespace) -> None:
    """Have `dgt.accelerate` choose groups with some pairs, and time it beside SDPA with others; adds to the
    record.
    """
    from examples.matcher import forward

    torch.set_num_threads(options.threads)
    models = load_models(options.package)
    models.matcher.conf.width_confidence = -1
    coco = images_in(options.coco)

    def described_pair(number: int) -> Described:
        return describe(
            models.features, numbered_pair(number, coco, [], options.points), options.points
        )

    choosing = [
        described_pair(number) for number in range(FIRST_TO_CHOOSE, FIRST_TO_CHOOSE + TO_CHOOSE)
    ]

    def correct_matches(outputs: list[dict[str, Any]]) -> float:
        matches = [output["matches"] for output in outputs]
        return sum(map(correct_of, choosing, matches))

    accelerated = copy.deepcopy(models.matcher)
    start = time.perf_counter()
    report = dgt.accelerate(
        accelerated,
        [(described.item,) for described in choosing],
        options.error,
        forward=forward,
        metric=correct_matches,
        approximate="*.cross_attn",
        num_prefix_tokens=0,
    )
    searched = time.perf_counter() - start
    print(report, flush=True)
    ways = {"SDPA": models.matcher, "accelerated": accelerated}
    pairs = []
    for number in range(options.pairs):
        described = described_pair(number)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        correct = {}
        for _, (name, matcher) in itertools.product(range(options.rounds), ways.items()):
            start = time.perf_counter()
            with torch.inference_mode():
                matches = matcher(described.item)["matches"][0]
            seconds[name].append(time.perf_counter() - start)
            correct[name] = correct_of(described, matches)
        pairs.append({"pair": number, "seconds": seconds, "correct": correct})
        print(pairs[-1], flush=True)
    path = options.records / "search.json"
    record = read_json(path) if path.is_file() else {}
    record[str(options.points)] = {
        "error": options.error,
        "largest_error": report.largest_error,
        "search_seconds": searched,
        "exact_speedup": report.exact_speedup,
        "matches_of_search": [report.metric_before, report.metric_after],
        "pairs": pairs,
        **environment(),
    }
    write_record(path, record)


def correct_of(described: Described, matches: Tensor) -> int:
    """How many (M, 2) matches are correct."""
    correct: int = score(described, matches)["correct"]
    return correct


@torch.inference_mode()
def time_calls(options: argparse.Namespace) -> None:
    """Time one cross-attention by every arm, centroids and lists included: the least of some calls, with the
    queries, keys and values that a middle layer has for the first pair.
    """
    torch.set_num_threads(1)
    models = load_models(options.package)
    path = options.records / "calls.json"
    record = read_json(path) if path.is_file() else {}
    pair = numbered_pair(0, images_in(options.coco), [], options.points)
    described = describe(models.features, pair, options.points)
    call = capture_call(models, described, TIMED_LAYER)
    milliseconds = {}
    for arm in arms_at(options.points):
        if arm.kind in ("alone", "none"):
            continue
        replaced = Replaced(arm, described)
        replaced.kept = [torch.arange(len(places)) for places in described.places]
        taken = []
        for _ in range(CALLS_TIMED):
            start = time.perf_counter()
            if replaced.answer("cross_attn", 0, call) is None:
                call.run()
            taken.append(time.perf_counter() - start)
        milliseconds[arm.name] = 1000 * min(taken)
    keypoints = [len(places) for places in described.places]
    record[str(options.points)] = {
        "keypoints": keypoints,
        "milliseconds": milliseconds,
        **environment(),
    }
    write_record(path, record)
