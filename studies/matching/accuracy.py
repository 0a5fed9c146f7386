"""How many right matches the matcher finds by every arm."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.runs.environment import environment
from dgt.utils.json_files import read_json
from dgt.utils.records import write_record
from studies.matching.arms import Arm, arms_at, match, prunes_too
from studies.matching.pairs import (
    PACKAGE,
    Described,
    Models,
    describe,
    images_in,
    load_models,
    numbered_pair,
    score,
)

LEAST_POSSIBLE = 100


def measure_accuracy(options: argparse.Namespace) -> None:
    """Match pairs by every arm until the record has enough of them, and what it lacks of those that it has."""
    torch.set_num_threads(1)
    path = options.records / f"{options.points}.json"
    record: dict[str, Any] = {"points": options.points, "package": PACKAGE, "pairs": []}
    if path.is_file():
        record = read_json(path)
    models = load_models(options.package)
    coco, imagenette = images_in(options.coco), images_in(options.imagenette)
    pairs = record["pairs"]
    for number in itertools.count():
        known = pairs[number] if number < len(pairs) else None
        if known is None and sum("arms" in found for found in pairs) >= options.pairs:
            break
        missing = arms_at(options.points)
        if known is not None:
            done = known.get("arms")
            missing = tuple(arm for arm in missing if done is not None and arm.name not in done)
        if not missing:
            continue
        pair = numbered_pair(number, coco, imagenette, options.points)
        described = describe(models.features, pair, options.points)
        if known is None:
            known = {
                "number": number,
                "photograph": pair.name,
                "strong": pair.strong,
                "keypoints": [len(places) for places in described.places],
                "possible": described.possible,
            }
            pairs.append(known)
        if described.possible >= LEAST_POSSIBLE:
            arms = known.setdefault("arms", {})
            for arm in missing:
                prunes = prunes_too(arm, options.points)
                arms[arm.name] = results_of(models, described, arm, prunes)
        write_record(path, {**record, **environment()})
        print(number, pair.name, known["keypoints"], described.possible, flush=True)


def results_of(models: Models, described: Described, arm: Arm, prunes: bool) -> dict[str, Any]:
    """The scores of an arm on a pair: with all points, with and without the threshold; and pruned."""
    if arm.kind == "alone":
        first, second = (F.normalize(part, dim=-1) for part in described.descriptors)
        alone = score(described, mutual_best(first @ second.T))
        return {"threshold": alone, "no threshold": alone, "pruned": alone}
    start = time.process_time()
    found = match(models.matcher, described, arm, prunes=False)
    seconds = time.process_time() - start
    loose = mutual_best(found["log_assignment"][0, :-1, :-1])
    results: dict[str, Any] = {
        "threshold": score(described, found["matches"][0]),
        "no threshold": score(described, loose),
        "seconds": round(seconds, 3),
    }
    if prunes:
        pruned = match(models.matcher, described, arm, prunes=True)
        results["pruned"] = score(described, pruned["matches"][0])
    return results


def mutual_best(scores: Tensor) -> Tensor:
    """(M, 2): rows and columns that are each other's best in (L, S) scores."""
    best = scores.argmax(1)
    rows = torch.arange(len(best))
    is_mutual = scores.argmax(0)[best] == rows
    return torch.stack([rows, best], 1)[is_mutual]
