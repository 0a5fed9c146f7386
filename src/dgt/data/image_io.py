"""From bytes to an upright RGB image, and the report of the files that would not decode.

An unreadable image is never replaced by another one: the reader returns a `BrokenImage`, the batch
leaves it out, and `BrokenImages` of the main process counts and lists it, and stops the run above a
share that the user sets.
"""

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from dgt.utils.errors import UserError

StrPath = str | os.PathLike[str]
Source = bytes | StrPath


class BrokenImage(NamedTuple):
    """Stands in for an image that could not be read: where it lies, and why it failed."""

    path: str
    reason: str


class WrongLabels(BrokenImage):
    """Stands in for a sample whose labels can be read but are wrong: such a file stops the run, it
    is not left out.
    """


class BrokenImagesError(UserError):
    """Too many images of a data set are unreadable."""


@contextmanager
def decoding(source: Source) -> Iterator[ImageFile.ImageFile]:
    """An image file, or its bytes, opened by Pillow.

    Whatever decoders raise is a UserError that says why.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            yield opened
    except (MemoryError, UserError):
        raise
    except UnidentifiedImageError:
        raise UserError("not an image in a format that Pillow can read") from None
    except Exception as error:
        # decoders raise nearly everything on bad bytes: OSError, SyntaxError, struct.error ...
        raise UserError(f"{type(error).__name__}: {error}") from error


def decode_image(source: Source) -> Image.Image:
    """Decode a file, or its bytes, to an upright RGB image; UserError where that fails, saying why.

    EXIF orientation is applied, transparent pixels are laid on white, 16-bit gray is scaled to 8
    bits.
    """
    with decoding(source) as opened:
        ImageOps.exif_transpose(opened, in_place=True)
        opened.load()
        return _to_rgb(opened)


def open_image(path: StrPath) -> Image.Image:
    """`decode_image` of a file that the user named: FileNotFoundError where there is none,
    UserError with its name.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"image file {str(path)!r} does not exist")
    try:
        return decode_image(path)
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be read as an image: {error}") from error


def try_decode(source: Source, name: str, answer: int) -> tuple[Image.Image, int] | BrokenImage:
    """`decode_image` beside the image's label or index, or a `BrokenImage` called `name` where that
    fails.
    """
    try:
        return decode_image(source), answer
    except UserError as error:
        return BrokenImage(name, str(error))


def _to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image in RGB, 16 bits of gray scaled to 8, what is transparent laid on white."""
    if image.mode == "F":
        raise UserError("floating-point pixels have no defined range")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise UserError(
                f"gray values from {values.min()} to {values.max()} do not fit in 16 bits"
            )
        image = Image.fromarray((values // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


@dataclass
class BrokenImages:
    """The broken-image report of one split: which of its `total` images could not be read, and why.

    Each image counts once, however often it is tried. The run stops as soon as the broken ones
    exceed `max_share`, 0 to 1, of all. `things` and `fault` are used in messages to say what is
    counted, images or annotations, and what is wrong.
    """

    split: str
    total: int
    max_share: float
    things: str = "images"
    fault: str = "cannot be read"
    broken: dict[str, str] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.broken)

    def record(self, broken: Iterable[BrokenImage]) -> None:
        """Add broken images; BrokenImagesError for too large a share by now, UserError for wrong
        labels among them.
        """
        for item in broken:
            if isinstance(item, WrongLabels):
                raise UserError(f"{item.path}: {item.reason}")
            self.broken.setdefault(item.path, item.reason)
        if len(self) > self.max_share * self.total:
            first = "".join(
                f"\n  {path}: {reason}" for path, reason in list(self.broken.items())[:5]
            )
            count = f"{len(self)} of the {self.total} {self.things} of split {self.split!r} {self.fault}"
            share = f"{len(self) / max(self.total, 1):.2%}, above data.max_broken_share = {self.max_share:.2%}"
            raise BrokenImagesError(f"{count} ({share}); the first:{first}")
