"""The built-in `scenes` set: colored shapes on textured backgrounds, drawn on demand, nothing to
download.

One image serves three tasks. Each holds one large object, whose kind is the class label (it covers
more pixels than any other), and a few small ones of any kind; objects hide one another. Color,
place, size, rotation and background say nothing about the kind. A scene is a pure function of
(split, index, size): any process, worker or machine draws the same one, and at another size
it is the same image at another resolution. Shapes are signed distances, negative inside, drawn at
equal area. Backgrounds are noise, stripes, checks and gradients between two muted colors.
"""

import colorsys
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.ops import masks_to_boxes

from dgt.utils.errors import UserError, check_range
from dgt.utils.seeding import generator

Field = NDArray[np.floating[Any]]  # float32 in practice

SPLITS = ("train", "val", "test")
TEXTURES = ("noise", "stripes", "checks", "gradient")
FEWEST_SMALL, MOST_SMALL = 2, 5  # small objects in addition to the large one
NOISE = 0.03  # standard deviation of the pixel noise, 1 being the whole range from black to white
_LARGE = (0.19, 0.26)
_SMALL = (0.06, 0.1)


def _fold(x: Field, y: Field, sides: int) -> tuple[Field, Field]:
    """Polar coordinates with the angle folded into one half of one of `sides` equal sectors."""
    sector = 2 * math.pi / sides
    angle = np.abs(np.mod(np.arctan2(y, x) + sector / 2, sector) - sector / 2)
    radius = np.hypot(x, y)
    return radius * np.cos(angle), radius * np.sin(angle)


def _star(x: Field, y: Field) -> Field:
    """Distance to a star of five points, the inner corners at 0.45."""
    along, across = _fold(x, y, 5)
    inner_x, inner_y = 0.45 * math.cos(math.pi / 5), 0.45 * math.sin(math.pi / 5)
    length = math.hypot(inner_y, 1 - inner_x)
    return ((along - 1) * inner_y + across * (1 - inner_x)) / np.float32(length)


DISTANCE: dict[str, Callable[[Field, Field], Field]] = {
    "disc": lambda x, y: np.hypot(x, y) - 1,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - np.float32(0.775)) - np.float32(0.225),
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - np.float32(math.sqrt(0.5)),
    "triangle": lambda x, y: _fold(x, y, 3)[0] - np.float32(math.cos(math.pi / 3)),
    "star": _star,
    "cross": lambda x, y: np.maximum(
        np.maximum(np.abs(x), np.abs(y)) - 1, np.minimum(np.abs(x), np.abs(y)) - np.float32(0.33)
    ),
    "crescent": lambda x, y: np.maximum(
        np.hypot(x, y) - 1, np.float32(0.82) - np.hypot(x - np.float32(0.5), y)
    ),
    "hexagon": lambda x, y: _fold(x, y, 6)[0] - np.float32(math.cos(math.pi / 6)),
}
KINDS = tuple(DISTANCE)


def _radius(kind: str) -> float:
    """How far a kind must reach for an area of pi, by its area at radius 1, counted on a fine grid."""
    axis = (np.arange(600, dtype=np.float32) + 0.5) / 200 - 1.5
    return math.sqrt(
        math.pi / (9.0 * float((DISTANCE[kind](axis[None, :], axis[:, None]) < 0).mean()))
    )


RADIUS = {kind: _radius(kind) for kind in KINDS}


@lru_cache(maxsize=16)
def _pixel_grid(size: int) -> tuple[Field, Field]:
    """Pixel centers `(x, y)`, each (size, size), in units of the image side: 0 at the left or top
    edge.
    """
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = np.meshgrid(axis, axis)
    return x, y


@lru_cache(maxsize=64)
def _interpolation(cells: int, size: int) -> Field:
    """(size, cells + 1) matrix that interpolates values at the corners of `cells` cells smoothly at
    `size` pixels.
    """
    position = (np.arange(size, dtype=np.float32) + 0.5) / size * cells
    left = position.astype(np.int64)
    weight = position - left
    weight = weight * weight * (3 - 2 * weight)
    matrix = np.zeros((size, cells + 1), dtype=np.float32)
    matrix[np.arange(size), left] = 1 - weight
    matrix[np.arange(size), left + 1] = weight
    return matrix


def _octave_noise(rng: np.random.Generator, size: int, octaves: tuple[int, ...]) -> Field:
    """(size, size) smooth noise, mostly within -1 to 1: a random lattice per octave, each at half
    the weight.
    """
    noise = np.zeros((size, size), dtype=np.float32)
    for number, cells in enumerate(octaves):
        lattice = rng.uniform(-1, 1, (cells + 1, cells + 1)).astype(np.float32)
        matrix = _interpolation(cells, size)
        noise += np.float32(0.5**number) * (matrix @ lattice @ matrix.T)
    return noise


def _pattern(rng: np.random.Generator, size: int) -> Field:
    """(size, size) in about 0 to 1: how much of the second color each pixel takes."""
    kind = TEXTURES[rng.integers(len(TEXTURES))]
    angle = rng.uniform(0, np.pi)
    phase = rng.uniform(0, 2 * np.pi, 2)
    frequency = rng.uniform(3, 8)
    noise = _octave_noise(rng, size, (3, 7, 15))
    x, y = _pixel_grid(size)
    along = np.float32(np.cos(angle)) * x + np.float32(np.sin(angle)) * y
    across = np.float32(np.cos(angle)) * y - np.float32(np.sin(angle)) * x
    turns = np.float32(2 * np.pi * frequency)
    if kind == "noise":
        return 0.5 + 0.6 * noise
    if kind == "gradient":
        return 0.5 + 0.8 * (along - np.float32(along.mean())) + 0.15 * noise
    wave = np.sin(turns * along + np.float32(phase[0]) + 0.5 * noise)
    if kind == "checks":
        wave = wave * np.sin(turns * across + np.float32(phase[1]) + 0.5 * noise)
    return 0.5 + 0.5 * np.clip(wave * np.float32(4.0), -1, 1) + 0.1 * noise


def _background(rng: np.random.Generator, size: int) -> tuple[Field, Field]:
    """A textured background `(size, size, 3)` in 0 to 1, and its mean color `(3,)`."""

    def muted(hue: float, value: float) -> Field:
        return np.array(
            colorsys.hsv_to_rgb(hue % 1.0, rng.uniform(0.08, 0.4), value), dtype=np.float32
        )

    hue, value = rng.uniform(), rng.uniform(0.35, 0.85)
    step = rng.uniform(0.12, 0.22) * (1 if value < 0.6 else -1)
    first = muted(hue, value)
    second = muted(hue + rng.uniform(-0.12, 0.12), value + step)
    return first + _pattern(rng, size)[..., None] * (second - first), (first + second) / 2


@dataclass(frozen=True)
class Scene:
    """One image with the answers for classification, semantic segmentation and instance detection.

    `image` uint8 (3, H, W); `label` the class, 0 to 7; `label_map` int64 (H, W), 0 for background
    and c + 1 for kind c; `boxes` float32 (N, 4), x0 y0 x1 y1 in pixels, right and bottom edges
    exclusive, tight around `masks`; `masks` bool (N, H, W), the visible part of each object;
    `categories` int64 (N,), the kind c of each. Objects of which nothing is visible are left out; N
    is at least 1.
    """

    image: Tensor
    label: int
    label_map: Tensor
    boxes: Tensor
    masks: Tensor
    categories: Tensor

    def to_pil(self) -> Image.Image:
        """The image for decoders' callers: as PIL has it."""
        return Image.fromarray(self.image.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class _Object:
    """A shape in units of the image side: `size` is the radius of the disc of its area, `reach` of
    all of it.
    """

    kind: str
    size: float
    x: float
    y: float
    angle: float
    color: Field
    reach: float


def _vivid_color(rng: np.random.Generator, avoid: Field) -> Field:
    """The first of a few random saturated colors that differs clearly from `avoid`, or else the one
    farthest from it.
    """
    drawn = rng.uniform((0, 0.55, 0.55), (1, 1, 1), (6, 3))
    colors = [np.array(colorsys.hsv_to_rgb(*hsv), dtype=np.float32) for hsv in drawn]
    distances = [float(np.abs(color - avoid).max()) for color in colors]
    first = next(
        (place for place, distance in enumerate(distances) if distance > 0.4),
        int(np.argmax(distances)),
    )
    return colors[first]


def _random_object(rng: np.random.Generator, sizes: tuple[float, float], avoid: Field) -> _Object:
    kind = KINDS[rng.integers(len(KINDS))]
    size, angle = rng.uniform(*sizes), rng.uniform(0, 2 * math.pi)
    margin = min(0.8 * size * RADIUS[kind], 0.45)
    x, y = rng.uniform(margin, 1 - margin, 2)
    return _Object(kind, size, x, y, angle, _vivid_color(rng, avoid), size * RADIUS[kind])


def _compose(rng: np.random.Generator, avoid: Field) -> tuple[str, list[_Object]]:
    """The large object's kind, and all objects from back to front."""
    large = _random_object(rng, _LARGE, avoid)
    small: list[_Object] = []
    wanted = rng.integers(FEWEST_SMALL, MOST_SMALL + 1)
    for _ in range(8 * wanted):
        if len(small) == wanted:
            break
        new = _random_object(rng, _SMALL, avoid)
        # Small objects may nibble at the large one and at each other, never cover the middle of it.
        clear = math.hypot(new.x - large.x, new.y - large.y) > 0.75 * large.reach + 0.5 * new.reach
        if clear and all(
            math.hypot(new.x - old.x, new.y - old.y) > 0.6 * (new.reach + old.reach)
            for old in small
        ):
            small.append(new)
    small.insert(int(rng.integers(len(small) + 1)), large)
    return large.kind, small


def _paint(image: Field, owner: NDArray[np.int16], item: _Object, number: int) -> None:
    """Draw one object over `image` (H, W, 3) and write its number where it now covers `owner` (H,
    W), in place.
    """
    size = len(image)
    reach, shadow, rim = item.reach, 0.03, max(1.2 / size, 0.07 * item.size)
    (x0, x1), (y0, y1) = (
        [
            int(np.clip(v * size, 0, size))
            for v in (middle - reach - shadow, middle + reach + shadow + 1 / size)
        ]
        for middle in (item.x, item.y)
    )
    window = (slice(y0, y1), slice(x0, x1))
    x, y = (
        grid[window] - np.float32(center)
        for grid, center in zip(_pixel_grid(size), (item.x, item.y), strict=True)
    )
    cos, sin = np.float32(math.cos(item.angle) / reach), np.float32(math.sin(item.angle) / reach)
    distance = DISTANCE[item.kind](cos * x + sin * y, cos * y - sin * x) * np.float32(reach)

    dim = 1 - 0.45 * np.clip(1 - np.maximum(distance, 0) / np.float32(shadow), 0, 1) ** 2
    cover = np.clip(0.5 - distance * size, 0, 1)[..., None]
    inside = np.clip(0.5 - (distance + np.float32(rim)) * size, 0, 1)
    light = (0.5 + 0.5 * inside) * (1 - np.float32(0.2 / item.size) * (x + y))
    under = image[window] * dim[..., None]
    image[window] = under + cover * (light[..., None] * item.color - under)
    owner[window][distance < 0] = number


def draw_scene(index: int, split: str = "train", image_size: int = 64) -> Scene:
    """Draw a scene.

    Args:
        index: its number in the split, from 0.
        split: "train", "val" or "test".
        image_size: side in pixels, at least 32.

    Raises:
        UserError: an argument is out of range.
    """
    if split not in SPLITS:
        raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    check_range(32, image_size=image_size)
    check_range(0, index=index)
    rng = generator("scenes", 0, split, index)
    layout, pixel_noise = rng.spawn(2)
    image, mean_color = _background(rng, image_size)
    label, objects = _compose(layout, mean_color)
    # each pixel's topmost object, -1 for none
    owner = np.full((image_size, image_size), -1, dtype=np.int16)
    for number, item in enumerate(objects):
        _paint(image, owner, item, number)
    image += np.float32(NOISE) * pixel_noise.standard_normal(image.shape, dtype=np.float32)
    pixels = np.clip(image * 255 + 0.5, 0, 255).astype(np.uint8)
    kinds = np.array([KINDS.index(item.kind) for item in objects] + [-1])
    visible = np.flatnonzero(np.bincount(owner[owner >= 0].ravel(), minlength=len(objects)))
    masks = torch.from_numpy(owner == visible[:, None, None])
    boxes = masks_to_boxes(masks).float() + torch.tensor([0.0, 0.0, 1.0, 1.0])
    drawn = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    label_map = torch.from_numpy(kinds[owner] + 1)
    return Scene(
        drawn, KINDS.index(label), label_map, boxes, masks, torch.from_numpy(kinds[visible])
    )


class Scenes:
    """`length` scenes of a split; item i is `draw_scene(i, ...)`. The splits share no scene.

    Raises UserError as `draw_scene`, and for a length under 1.
    """

    class_names: tuple[str, ...] = KINDS

    def __init__(self, split: str, length: int, image_size: int = 64) -> None:
        check_range(1, length=length)
        self.split = split
        self.length = length
        self.image_size = image_size
        draw_scene(0, split, image_size)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        return draw_scene(index, self.split, self.image_size)
