"""The built-in `scenes` set: coloured shapes on textured backgrounds, drawn on demand, nothing to download.

One image serves three tasks. Each holds one large object, whose kind is the class label (it covers more pixels than
any other), and a few small ones of any kind; objects hide one another. Colour, place, size, rotation and background say
nothing about the kind. A scene is a pure function of (seed, split, index, size, options): any process, worker or
machine draws the same one, and the same scene at another size is the same image at another resolution.
"""

import colorsys
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from dgt.data.scenes.shapes import DISTANCE, KINDS, RADIUS, Field
from dgt.data.scenes.textures import background, pixel_grid
from dgt.utils.errors import UserError
from dgt.utils.seeding import generator

SPLITS = ("train", "val", "test")
MIN_SIZE = 32
_LARGE = (0.19, 0.26)
_SMALL = (0.06, 0.1)


@dataclass(frozen=True)
class SceneOptions:
    """What a scene may hold.

    Args:
        min_small: fewest small objects beside the large one.
        max_small: most small objects beside the large one.
        noise: standard deviation of the pixel noise, 1 being the whole range from black to white.
    """

    min_small: int = 2
    max_small: int = 5
    noise: float = 0.03

    def __post_init__(self) -> None:
        if not 0 <= self.min_small <= self.max_small:
            raise UserError(f"expected 0 <= min_small <= max_small, got {self.min_small} and {self.max_small}")
        if not 0 <= self.noise <= 1:
            raise UserError(f"noise must lie in [0, 1], got {self.noise}")


@dataclass(frozen=True)
class Scene:
    """One image with the answers for classification, semantic segmentation and instance detection.

    `image` uint8 (3, H, W); `label` the class, 0 to 7; `label_map` int64 (H, W), 0 for background and c + 1 for kind c;
    `boxes` float32 (N, 4), x0 y0 x1 y1 in pixels, right and bottom edges exclusive, tight around `masks`;
    `masks` bool (N, H, W), the visible part of each object; `categories` int64 (N,), the kind c of each.
    Objects of which nothing is visible are left out; N is at least 1.
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
    """A shape in units of the image side; `size` is the radius of the disc of the same area."""

    kind: str
    size: float
    x: float
    y: float
    angle: float
    colour: Field

    @property
    def reach(self) -> float:
        return self.size * RADIUS[self.kind]


def _vivid_colour(rng: np.random.Generator, avoid: Field) -> Field:
    """The first of a few random saturated colours that stands off from `avoid`, or else the one farthest from it."""
    best, best_distance = avoid, -1.0
    for hue, saturation, value in rng.uniform((0, 0.55, 0.55), (1, 1, 1), (6, 3)):
        colour = np.array(colorsys.hsv_to_rgb(hue, saturation, value), dtype=np.float32)
        distance = float(np.abs(colour - avoid).max())
        if distance > 0.4:
            return colour
        if distance > best_distance:
            best, best_distance = colour, distance
    return best


def _random_object(rng: np.random.Generator, sizes: tuple[float, float], avoid: Field) -> _Object:
    kind = KINDS[rng.integers(len(KINDS))]
    size, angle = rng.uniform(*sizes), rng.uniform(0, 2 * math.pi)
    margin = min(0.8 * size * RADIUS[kind], 0.45)
    x, y = rng.uniform(margin, 1 - margin, 2)
    return _Object(kind, size, x, y, angle, _vivid_colour(rng, avoid))


def _compose(rng: np.random.Generator, options: SceneOptions, avoid: Field) -> tuple[str, list[_Object]]:
    """The large object's kind, and all objects from back to front."""
    large = _random_object(rng, _LARGE, avoid)
    small: list[_Object] = []
    wanted = rng.integers(options.min_small, options.max_small + 1)
    for _ in range(8 * wanted):
        if len(small) == wanted:
            break
        new = _random_object(rng, _SMALL, avoid)
        # Small objects may nibble at the large one and at each other, never cover the middle of it.
        clear = math.hypot(new.x - large.x, new.y - large.y) > 0.75 * large.reach + 0.5 * new.reach
        if clear and all(math.hypot(new.x - old.x, new.y - old.y) > 0.6 * (new.reach + old.reach) for old in small):
            small.append(new)
    small.insert(int(rng.integers(len(small) + 1)), large)
    return large.kind, small


def _paint(image: Field, owner: NDArray[np.int16], item: _Object, number: int) -> None:
    """Draw one object over `image` (H, W, 3) and write its number where it now covers `owner` (H, W), in place."""
    size = len(image)
    reach, shadow, rim = item.reach, 0.03, max(1.2 / size, 0.07 * item.size)
    x0, x1 = (int(np.clip(v * size, 0, size)) for v in (item.x - reach - shadow, item.x + reach + shadow + 1 / size))
    y0, y1 = (int(np.clip(v * size, 0, size)) for v in (item.y - reach - shadow, item.y + reach + shadow + 1 / size))
    window = (slice(y0, y1), slice(x0, x1))
    x, y = (grid[window] - np.float32(centre) for grid, centre in zip(pixel_grid(size), (item.x, item.y), strict=True))
    cos, sin = np.float32(math.cos(item.angle) / reach), np.float32(math.sin(item.angle) / reach)
    distance = DISTANCE[item.kind](cos * x + sin * y, cos * y - sin * x) * np.float32(reach)

    dim = 1 - 0.45 * np.clip(1 - np.maximum(distance, 0) / np.float32(shadow), 0, 1) ** 2
    cover = np.clip(0.5 - distance * size, 0, 1)[..., None]
    inside = np.clip(0.5 - (distance + np.float32(rim)) * size, 0, 1)
    light = (0.5 + 0.5 * inside) * (1 - np.float32(0.2 / item.size) * (x + y))
    under = image[window] * dim[..., None]
    image[window] = under + cover * (light[..., None] * item.colour - under)
    owner[window][distance < 0] = number


def _scene(image: Field, owner: NDArray[np.int16], objects: list[_Object], label: int) -> Scene:
    """Tensors from the painted image (H, W, 3) and each pixel's topmost object (H, W), -1 for none."""
    kinds = np.array([KINDS.index(item.kind) for item in objects] + [-1])
    visible = np.flatnonzero(np.bincount(owner[owner >= 0].ravel(), minlength=len(objects)))
    masks = owner == visible[:, None, None]
    boxes = np.empty((len(visible), 4), dtype=np.float32)
    for first, last, hit in ((0, 2, masks.any(axis=1)), (1, 3, masks.any(axis=2))):
        boxes[:, first] = hit.argmax(axis=1)
        boxes[:, last] = hit.shape[1] - hit[:, ::-1].argmax(axis=1)
    pixels = np.clip(image * 255 + 0.5, 0, 255).astype(np.uint8)
    return Scene(
        image=torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))),
        label=label,
        label_map=torch.from_numpy(kinds[owner] + 1),
        boxes=torch.from_numpy(boxes),
        masks=torch.from_numpy(masks),
        categories=torch.from_numpy(kinds[visible]),
    )


def draw_scene(
    index: int, split: str = "train", image_size: int = 64, seed: int = 0, options: SceneOptions | None = None
) -> Scene:
    """Draw scene number `index` of a split at `image_size` x `image_size` pixels.

    Raises:
        ValueError: an unknown split, a size under 32, a negative index or seed.
    """
    if split not in SPLITS:
        raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if image_size < MIN_SIZE:
        raise UserError(f"image_size must be at least {MIN_SIZE} pixels, got {image_size}")
    if index < 0 or seed < 0:
        raise UserError(f"index and seed must be >= 0, got index {index} and seed {seed}")
    options = options or SceneOptions()
    rng = generator("scenes", seed, split, index)
    layout, pixel_noise = rng.spawn(2)
    image, mean_colour = background(rng, image_size)
    label, objects = _compose(layout, options, mean_colour)
    owner = np.full((image_size, image_size), -1, dtype=np.int16)
    for number, item in enumerate(objects):
        _paint(image, owner, item, number)
    image += np.float32(options.noise) * pixel_noise.standard_normal(image.shape, dtype=np.float32)
    return _scene(image, owner, objects, KINDS.index(label))


class Scenes(Dataset[Scene]):
    """`length` scenes of a split; item i is `draw_scene(i, ...)`.

    Args:
        split: "train", "val" or "test"; the splits share no scene.
        length: number of scenes.
        image_size: side in pixels, at least 32.
        seed: another seed is another set of the same kind.
        options: what a scene may hold.

    Raises:
        ValueError: an unknown split, a length under 1, a size under 32.
    """

    class_names: tuple[str, ...] = KINDS

    def __init__(
        self, split: str, length: int, image_size: int = 64, seed: int = 0, options: SceneOptions | None = None
    ) -> None:
        if length < 1:
            raise UserError(f"length must be at least 1, got {length}")
        self.split, self.length, self.image_size, self.seed = split, length, image_size, seed
        self.options = options or SceneOptions()
        draw_scene(0, split, image_size, seed, self.options)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        return draw_scene(index, self.split, self.image_size, self.seed, self.options)
