"""Backgrounds of the built-in scenes: noise in octaves, stripes, checks and gradients between two muted colours."""

import colorsys
from functools import lru_cache

import numpy as np

from dgt.data.scenes.shapes import Field

TEXTURES = ("noise", "stripes", "checks", "gradient")


@lru_cache(maxsize=16)
def pixel_grid(size: int) -> tuple[Field, Field]:
    """Pixel centres `(x, y)`, each (size, size), in units of the image side: 0 at the left or top edge."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = np.meshgrid(axis, axis)
    x.setflags(write=False)
    y.setflags(write=False)
    return x, y


@lru_cache(maxsize=64)
def _interpolation(cells: int, size: int) -> Field:
    """(size, cells + 1) matrix that interpolates values at the corners of `cells` cells smoothly at `size` pixels."""
    position = (np.arange(size, dtype=np.float32) + 0.5) / size * cells
    left = position.astype(np.int64)
    weight = position - left
    weight = weight * weight * (3 - 2 * weight)
    matrix = np.zeros((size, cells + 1), dtype=np.float32)
    matrix[np.arange(size), left] = 1 - weight
    matrix[np.arange(size), left + 1] = weight
    return matrix


def octave_noise(rng: np.random.Generator, size: int, octaves: tuple[int, ...]) -> Field:
    """(size, size) smooth noise, mostly within -1 to 1: a random lattice per octave, each at half the weight."""
    noise = np.zeros((size, size), dtype=np.float32)
    weight = 1.0
    for cells in octaves:
        lattice = rng.uniform(-1, 1, (cells + 1, cells + 1)).astype(np.float32)
        matrix = _interpolation(cells, size)
        noise += np.float32(weight) * (matrix @ lattice @ matrix.T)
        weight /= 2
    return noise


def _soft_steps(wave: Field, sharpness: float) -> Field:
    steps: Field = 0.5 + 0.5 * np.clip(wave * np.float32(sharpness), -1, 1)
    return steps


def _pattern(rng: np.random.Generator, size: int) -> Field:
    """(size, size) in about 0 to 1: how much of the second colour each pixel takes."""
    kind = TEXTURES[rng.integers(len(TEXTURES))]
    angle, phase, frequency = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi, 2), rng.uniform(3, 8)
    noise = octave_noise(rng, size, (3, 7, 15))
    x, y = pixel_grid(size)
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
    return _soft_steps(wave, 4.0) + 0.1 * noise


def _muted_colour(rng: np.random.Generator, hue: float, value: float) -> Field:
    return np.array(colorsys.hsv_to_rgb(hue % 1.0, rng.uniform(0.08, 0.4), value), dtype=np.float32)


def background(rng: np.random.Generator, size: int) -> tuple[Field, Field]:
    """A textured background `(size, size, 3)` in 0 to 1, and its mean colour `(3,)`."""
    hue, value = rng.uniform(), rng.uniform(0.35, 0.85)
    step = rng.uniform(0.12, 0.22) * (1 if value < 0.6 else -1)
    first = _muted_colour(rng, hue, value)
    second = _muted_colour(rng, hue + rng.uniform(-0.12, 0.12), value + step)
    image = first + _pattern(rng, size)[..., None] * (second - first)
    return image, (first + second) / 2
