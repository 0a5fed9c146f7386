"""The images that the page can show: built-in scenes, files named on the command line, and uploads.

Anyone who can reach the server can upload anything, so uploads are checked only by their bytes: few
formats, limited bytes, and limited pixels before a single one is decoded. They live in memory, the
oldest makes room, and nothing is written. Clients name images by ids that the server made, never by
paths.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dgt.data import folders
from dgt.data.image_io import decode_image, open_image
from dgt.data.scenes import KINDS, draw_scene
from dgt.utils.class_names import encodable
from dgt.utils.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_BYTES = 16 * 2**20
MAX_PIXELS = 40_000_000
MAX_SCANS = 100  # of a progressive JPEG, which has about ten: each of them goes over all pixels
LONG_SIDE = 1024
"""Larger images are kept at this size: more than any page shows."""
MAX_UPLOADS = 24
MAX_FILES = 200
# Scenes of the test split, one of each kind, picked by eye.
SCENES = (12, 21, 37, 7, 36, 20, 25, 18)


class RefusedError(Exception):
    """A rejected request: a message for its sender, and the HTTP status."""

    def __init__(self, sentence: str, status_code: int = 415) -> None:
        super().__init__(sentence)
        self.status_code = status_code


def decode_upload(data: bytes, bits: int | None = None) -> Image.Image:
    """Decode untrusted bytes to an upright RGB image of at most `LONG_SIDE` pixels per side.

    Larger images than `MAX_PIXELS` are refused by their header, before anything is decoded, and
    JPEGs of very many scans.

    Args:
        data: a whole JPEG, PNG, WebP, GIF (its first frame) or BMP file.
        bits: as of `decode_image`.

    Raises:
        RefusedError: it is anything else.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            size, pixels = f"{opened.width} x {opened.height} pixels", opened.width * opened.height
            if pixels > MAX_PIXELS:
                raise RefusedError(
                    f"That image has {size}; the limit is {MAX_PIXELS // 1_000_000} million."
                )
            if min(opened.size) < 8 or max(opened.size) > 40 * min(opened.size):
                raise RefusedError(f"An image of {size} is too narrow or too small.")
            if data.startswith(b"\xff\xd8") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
                raise RefusedError(f"That JPEG has {scans} scans; the limit is {MAX_SCANS}.")
        return _small(decode_image(data, bits))
    except MemoryError:
        raise RefusedError("That image is too large for the available memory.", 413) from None
    except RefusedError:
        raise
    except UnidentifiedImageError:
        raise RefusedError("That is not an image: use JPEG, PNG, WebP, GIF or BMP.") from None
    except Image.DecompressionBombError:
        raise RefusedError("That image has far too many pixels.") from None
    except Exception:  # decoders raise nearly everything on bad bytes
        raise RefusedError("That image is damaged or incomplete and cannot be decoded.") from None


def _small(image: Image.Image) -> Image.Image:
    """Sides of at most `LONG_SIDE`."""
    image.thumbnail((LONG_SIDE, LONG_SIDE), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return image


def image_files(path: str | Path) -> list[Path]:
    """The image file `path`, or the image files directly in the folder `path`, sorted.

    Raises FileNotFoundError where nothing is there, UserError for a folder with none or more than
    200.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"image: {str(path)!r} does not exist")
    files = [Path(file) for file in folders.image_files(path) if Path(file).parent == path]
    if not 0 < len(files) <= MAX_FILES:
        raise UserError(
            f"image: expected 1 to {MAX_FILES} image files in {path}, found {len(files)}"
        )
    return files


class Album:
    """Images by id: `scene-N`, `file-N`, `upload-HASH`.

    Args:
        files: images to show first, before the scenes.
        scenes: whether built-in scenes are shown.
        bits: as of `decode_image`.

    Raises:
        FileNotFoundError, UserError: as `open_image`.

    Example:
        >>> Album(["cat.jpg"], scenes=False).names()
        [('file-0', 'cat.jpg')]
    """

    def __init__(
        self, files: Sequence[str | Path] = (), scenes: bool = True, bits: int | None = None
    ) -> None:
        self.bits = bits
        # uploads are decoded one at a time
        self._lock, self._decoding = threading.Lock(), threading.Lock()
        self._uploads: OrderedDict[str, tuple[str, Image.Image]] = OrderedDict()
        self._fixed: dict[str, tuple[str, Image.Image]] = {}
        for number, path in enumerate(files):
            title = encodable(Path(path).name)
            self._fixed[f"file-{number}"] = (title, _small(open_image(path, bits)))
        for number, index in enumerate(SCENES if scenes else ()):
            scene = draw_scene(index, "test", 512)
            self._fixed[f"scene-{number}"] = (KINDS[scene.label], scene.to_pil())

    def names(self) -> list[tuple[str, str]]:
        """(id, title) of the files, the scenes, then the uploads, in order."""
        with self._lock:
            return [
                (key, title) for key, (title, _) in (*self._fixed.items(), *self._uploads.items())
            ]

    def add(self, data: bytes, title: str = "your image") -> str:
        """Take an upload; return its id, the same for the same bytes. Raises as `decode_upload`."""
        with self._decoding:
            image = decode_upload(data, self.bits)
        key = "upload-" + hashlib.sha256(data).hexdigest()[:16]
        with self._lock:
            self._uploads[key] = (title, image)
            self._uploads.move_to_end(key)
            while len(self._uploads) > MAX_UPLOADS:
                self._uploads.popitem(last=False)
        return key

    def image(self, key: str) -> Image.Image:
        """The RGB image of an id.

        Raises RefusedError where there is none, or it had to make room.
        """
        with self._lock:
            entry = self._fixed.get(key) or self._uploads.get(key)
        if entry is None:
            raise RefusedError(
                "That image is no longer available: drop it again, or choose another.", 404
            )
        return entry[1]


def fit_sides(image: Image.Image, side: int, step: int) -> tuple[int, int]:
    """Choose height and width for an image so that its area is near `side` squared and token grids
    fit it exactly.

    Args:
        image: its shape is kept as far as possible; neither side becomes more than twice the other.
        side: in pixels, at least 32; taken as it is for a square image if it is a multiple of
            `step`.
        step: both sides are multiples of it, of at least 32.
    """
    wanted = min(max(image.width / image.height, 0.5), 2.0)
    choices = [length for length in range(step, 2 * side + step, step) if length >= 32]

    def distance(sides: tuple[int, int]) -> float:
        height, width = sides
        return float(
            2 * abs(np.log(width / height / wanted)) + abs(np.log(height * width / side**2))
        )

    return min(((h, w) for h in choices for w in choices if 0.5 <= w / h <= 2), key=distance)


def encode_jpeg(image: Image.Image, side: int, step: int, long_side: int) -> bytes:
    """JPEG bytes of the largest middle part with the proportions of its `fit_sides`, never
    enlarged.
    """
    sides = fit_sides(image, side, step)
    scale = min(image.width / sides[1], image.height / sides[0], long_side / max(sides))
    size = (max(round(sides[1] * scale), 1), max(round(sides[0] * scale), 1))
    buffer = io.BytesIO()
    ImageOps.fit(image, size, Image.Resampling.LANCZOS).save(
        buffer, "JPEG", quality=92, subsampling=0
    )
    return buffer.getvalue()
