"""The shape kinds of the built-in scenes, each as a signed distance: negative inside, zero on the outline.

All shapes are drawn at equal area: `RADIUS` says how far each must reach for an area of pi, so that "the largest
object" means the same for a thin star as for a disc.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.floating[Any]]  # float32 in practice

_STAR_INNER = 0.45
_RING_INNER = 0.55
_CROSS_ARM = 0.33
_BITE_SHIFT, _BITE_RADIUS = 0.5, 0.82


def _fold(x: Field, y: Field, sides: int) -> tuple[Field, Field]:
    """Polar coordinates with the angle folded into one half of one of `sides` equal sectors."""
    sector = 2 * math.pi / sides
    angle = np.abs(np.mod(np.arctan2(y, x) + sector / 2, sector) - sector / 2)
    radius = np.hypot(x, y)
    return radius * np.cos(angle), radius * np.sin(angle)


def _polygon(x: Field, y: Field, sides: int) -> Field:
    """A regular polygon with corners at distance 1 and the middle of one side on the x axis."""
    return _fold(x, y, sides)[0] - np.float32(math.cos(math.pi / sides))


def _star(x: Field, y: Field) -> Field:
    along, across = _fold(x, y, 5)
    inner_x, inner_y = _STAR_INNER * math.cos(math.pi / 5), _STAR_INNER * math.sin(math.pi / 5)
    length = math.hypot(inner_y, 1 - inner_x)
    return ((along - 1) * inner_y + across * (1 - inner_x)) / np.float32(length)


def _cross(x: Field, y: Field) -> Field:
    x, y = np.abs(x), np.abs(y)
    distance: Field = np.maximum(np.maximum(x, y) - 1, np.minimum(x, y) - np.float32(_CROSS_ARM))
    return distance


def _crescent(x: Field, y: Field) -> Field:
    bite = np.float32(_BITE_RADIUS) - np.hypot(x - np.float32(_BITE_SHIFT), y)
    distance: Field = np.maximum(np.hypot(x, y) - 1, bite)
    return distance


def _ring(x: Field, y: Field) -> Field:
    middle, half = (1 + _RING_INNER) / 2, (1 - _RING_INNER) / 2
    return np.abs(np.hypot(x, y) - np.float32(middle)) - np.float32(half)


DISTANCE: dict[str, Callable[[Field, Field], Field]] = {
    "disc": lambda x, y: np.hypot(x, y) - 1,
    "ring": _ring,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - np.float32(math.sqrt(0.5)),
    "triangle": lambda x, y: _polygon(x, y, 3),
    "star": _star,
    "cross": _cross,
    "crescent": _crescent,
    "hexagon": lambda x, y: _polygon(x, y, 6),
}
KINDS = tuple(DISTANCE)


def _unit_area(kind: str) -> float:
    """Area of the kind at radius 1, counted on a fine grid."""
    axis = (np.arange(600, dtype=np.float32) + 0.5) / 200 - 1.5
    inside = DISTANCE[kind](axis[None, :], axis[:, None]) < 0
    return float(inside.mean()) * 9.0


RADIUS = {kind: math.sqrt(math.pi / _unit_area(kind)) for kind in KINDS}
