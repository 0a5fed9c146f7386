"""The pictures that the page can show: built-in scenes, files named on the command line, and uploads.

Whoever reaches the server may upload anything, so uploads are judged by their bytes alone: few formats, limited bytes,
and limited pixels before a single one is decoded. They live in memory, the oldest makes room, and nothing is written.
Clients name pictures by ids that the server made; no path ever comes from them.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from dgt.data.image_io import decode_image
from dgt.data.readers import SUFFIXES
from dgt.data.scenes import draw_scene
from dgt.data.scenes.shapes import KINDS
from dgt.utils.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_BYTES = 16 * 2**20
MAX_PIXELS = 40_000_000
LONG_SIDE = 1024
"""Larger pictures are kept at this size: more than any page shows."""
MAX_UPLOADS = 24
MAX_FILES = 200
# Scenes of the test split, one of each kind, picked by eye.
SCENES = (12, 21, 37, 7, 36, 20, 25, 18)


class RefusedUploadError(ValueError):
    """An upload that is no picture we take; the message is a sentence for the person who sent it."""


class UnknownPictureError(LookupError):
    """No picture of that id, or one that had to make room."""


def decode_upload(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode bytes from anybody to an upright RGB picture of at most `LONG_SIDE` pixels a side.

    Args:
        data: a whole JPEG, PNG, WebP, GIF (its first frame) or BMP file.
        max_pixels: larger pictures are refused by their header, before anything is decoded.

    Raises:
        RefusedUploadError: for anything else; says what is wrong in a sentence.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > max_pixels:
                raise RefusedUploadError(
                    f"That picture has {width} x {height} pixels; at most {max_pixels // 1_000_000} million are taken."
                )
            if min(width, height) < 8 or max(width, height) > 40 * min(width, height):
                raise RefusedUploadError(f"A picture of {width} x {height} pixels is too thin or too small to look at.")
        return _small(decode_image(data))
    except (RefusedUploadError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise RefusedUploadError("That is not a picture: JPEG, PNG, WebP, GIF and BMP are taken.") from None
    except Image.DecompressionBombError:
        raise RefusedUploadError("That picture has far too many pixels.") from None
    except Exception:  # decoders raise nearly everything on bad bytes
        raise RefusedUploadError("That picture is damaged or incomplete and cannot be decoded.") from None


def _small(image: Image.Image) -> Image.Image:
    """At most `LONG_SIDE` a side."""
    image.thumbnail((LONG_SIDE, LONG_SIDE), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return image


def image_files(path: str | Path) -> list[Path]:
    """The image file `path`, or the image files directly in the folder `path`, sorted.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a folder without image files, or with more than 200.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"image: there is no file or folder {str(path)!r}")
    files = sorted(Path(entry.path) for entry in os.scandir(path) if entry.name.lower().endswith(SUFFIXES))
    if not 0 < len(files) <= MAX_FILES:
        raise UserError(f"image: expected 1 to {MAX_FILES} image files in {path}, found {len(files)}")
    return files


class Album:
    """Pictures by id: `scene-N`, `file-N`, `upload-HASH`.

    Args:
        files: image files to show besides the scenes, first of all.

    Raises:
        ValueError: a file that cannot be decoded, by its name.
    """

    def __init__(self, files: Sequence[str | Path] = ()) -> None:
        self._lock = threading.Lock()
        self._uploads: OrderedDict[str, tuple[str, Image.Image]] = OrderedDict()
        self._fixed: dict[str, tuple[str, Image.Image]] = {}
        for number, path in enumerate(files):
            try:
                picture = _small(decode_image(path))
            except ValueError as error:
                raise UserError(f"{str(path)!r} cannot be read as an image: {error}") from error
            self._fixed[f"file-{number}"] = (Path(path).name, picture)
        for number, index in enumerate(SCENES):
            scene = draw_scene(index, "test", 512)
            self._fixed[f"scene-{number}"] = (KINDS[scene.label], scene.to_pil())

    def names(self) -> list[tuple[str, str]]:
        """(id, title) of the files, the scenes, then the uploads, in order."""
        with self._lock:
            return [(key, title) for key, (title, _) in (*self._fixed.items(), *self._uploads.items())]

    def add(self, data: bytes, title: str = "your picture") -> str:
        """Take an upload; return its id, which is the same for the same bytes.

        Raises:
            RefusedUploadError: as `decode_upload`.
        """
        picture = decode_upload(data)
        key = "upload-" + hashlib.sha256(data).hexdigest()[:16]
        with self._lock:
            self._uploads[key] = (title, picture)
            self._uploads.move_to_end(key)
            while len(self._uploads) > MAX_UPLOADS:
                self._uploads.popitem(last=False)
        return key

    def picture(self, key: str) -> Image.Image:
        """The RGB picture of an id.

        Raises:
            UnknownPictureError: no picture of that id, or one that had to make room.
        """
        with self._lock:
            found = self._fixed.get(key) or self._uploads.get(key)
        if found is None:
            raise UnknownPictureError(key)
        return found[1]


def fit_sides(size: tuple[int, int], side: int, step: int) -> tuple[int, int]:
    """Sides for a picture such that its area is near `side` squared and token grids lie on it without a rest.

    Args:
        size: (height, width) of the picture.
        side: pixels a side if it were square; at least 32.
        step: both sides are multiples of it.

    Returns:
        (height, width); neither is below 32, nor more than twice the other. A square picture gets `side` itself where
        that is a multiple of `step`.
    """
    wanted = min(max(size[1] / size[0], 0.5), 2.0)
    choices = [length for length in range(step, 2 * side + step, step) if length >= 32]

    def misfit(sides: tuple[int, int]) -> float:
        height, width = sides
        return float(2 * abs(np.log(width / height / wanted)) + abs(np.log(height * width / side**2)))

    return min(((h, w) for h in choices for w in choices if 0.5 <= w / h <= 2), key=misfit)


def crop(picture: Image.Image, sides: tuple[int, int]) -> Image.Image:
    """The largest middle part of a picture with the proportions of `sides` (height, width)."""
    height, width = sides
    scale = min(picture.width / width, picture.height / height)
    w, h = max(round(width * scale), 1), max(round(height * scale), 1)
    left, top = (picture.width - w) // 2, (picture.height - h) // 2
    return picture.crop((left, top, left + w, top + h))


def encode_jpeg(picture: Image.Image, long_side: int) -> bytes:
    """JPEG bytes of a picture, made smaller where it is larger than `long_side`."""
    copy = picture.copy()
    copy.thumbnail((long_side, long_side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    copy.save(buffer, "JPEG", quality=92, subsampling=0)
    return buffer.getvalue()
