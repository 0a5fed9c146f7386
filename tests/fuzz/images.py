"""Image files as found in the wild: valid in every mode and format, then corrupted in every way."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image

MODES = {
    "RGB": ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM"),
    "RGBA": ("PNG", "WEBP", "TIFF"),
    "L": ("PNG", "JPEG", "BMP", "TIFF", "PPM"),
    "LA": ("PNG",),
    "P": ("PNG", "GIF", "BMP"),
    "1": ("PNG", "TIFF", "BMP"),
    "CMYK": ("JPEG", "TIFF"),
    "YCbCr": ("JPEG",),
    "I;16": ("PNG", "TIFF"),
    "I": ("TIFF",),
    "F": ("TIFF",),
}
SIZES = ((1, 1), (1, 40), (40, 1), (20000, 10), (10, 20000), (33, 47), (64, 64), (300, 200))
FAULTS = ("none", "random bytes", "cut", "flipped bytes", "empty", "doubled", "text before", "exif")


def intact_file(seed: int) -> bytes:
    """The file before it was corrupted."""
    return _files(seed)[0]


def image_file(seed: int) -> tuple[bytes, str]:
    """A file and what it is; the same for the same seed."""
    return _files(seed)[1:]


def _files(seed: int) -> tuple[bytes, bytes, str]:
    draw = random.Random(seed)
    mode = draw.choice(list(MODES))
    size, kind = draw.choice(SIZES), draw.choice(MODES[mode])
    # WebP's header cannot store more.
    kind = "PNG" if kind == "WEBP" and max(size) > 16383 else kind
    fault = draw.choice(FAULTS)
    image = _image(mode, size, np.random.default_rng(seed))
    options = (
        {"exif": _exif(draw)} if fault == "exif" and kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}
    )
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    content = buffer.getvalue()
    return (
        content,
        _corrupted(content, fault, draw),
        f"{fault}: {mode} {kind} {size[0]} x {size[1]}",
    )


def _image(mode: str, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    width, height = size
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width), dtype=np.uint16))
    if mode == "I":
        return Image.fromarray(
            rng.integers(-100, rng.choice([60000, 10**6]), (height, width), dtype=np.int32)
        )
    if mode == "F":
        return Image.fromarray(rng.random((height, width), dtype=np.float32))
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def _exif(draw: random.Random) -> Image.Exif:
    """Orientations, valid and invalid."""
    exif = Image.Exif()
    exif[0x0112] = draw.choice([*range(10), 65535])
    return exif


def _corrupted(content: bytes, fault: str, draw: random.Random) -> bytes:
    if fault == "random bytes":
        return draw.randbytes(draw.choice([1, 10, 1000, 100_000]))
    if fault == "cut":
        return content[: draw.randrange(len(content))]
    if fault == "flipped bytes":
        corrupted = bytearray(content)
        for _ in range(draw.choice([1, 5, 50])):
            corrupted[draw.randrange(min(len(corrupted), draw.choice([64, 10**9])))] ^= (
                1 << draw.randrange(8)
            )
        return bytes(corrupted)
    return {"empty": b"", "doubled": content * 2, "text before": b"<html>" + content}.get(
        fault, content
    )
