"""From bytes to an upright RGB image, and the report of the files that would not decode.

An unreadable image is never replaced by another one in silence: the reader hands on a `BrokenImage`, the batch leaves
it out, and `BrokenImages` of the main process counts and lists it, and stops the run above a share that the user sets.
"""

import io
import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import UserError, check_range

Source = bytes | str | os.PathLike[str]


class BrokenImage(NamedTuple):
    """Stands in for an image that could not be read: where it lies, and why it failed."""

    path: str
    reason: str


class WrongLabels(BrokenImage):
    """Stands in for a sample whose labels can be read but are wrong: such a file stops the run, it is not left out."""


class BrokenImagesError(UserError):
    """Too many images of a data set cannot be read."""


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Bring 16-bit and 32-bit grey values (0 to 65535) down to 8 bits; other modes come back as they are."""
    if image.mode == "F":
        raise UserError("floating-point pixels have no defined range")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise UserError(f"grey values from {values.min()} to {values.max()} do not fit 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8))


def _to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image in RGB, what is transparent laid on white; the image itself where it is that already."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(source: Source) -> Image.Image:
    """Decode a file, or its bytes, to an upright RGB image.

    EXIF orientation is applied; transparent pixels are laid on white; palettes and CMYK are converted; 16-bit grey is
    scaled to 8 bits.

    Raises:
        UserError: the image cannot be decoded; the message says why.
    """
    return decode_oriented(source)[0]


def decode_oriented(source: Source) -> tuple[Image.Image, int]:
    """`decode_image`, and the EXIF orientation by which it was turned upright: 1 for not at all, 2 to 8."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            found = opened.getexif().get(ExifTags.Base.Orientation)
            orientation = found if isinstance(found, int) and 2 <= found <= 8 else 1  # Pillow, too, ignores others
            ImageOps.exif_transpose(opened, in_place=True)
            opened.load()
            return _to_rgb(_to_eight_bits(opened)), orientation
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise UserError("not an image in any format that Pillow knows") from None
    except Exception as error:  # decoders raise nearly everything on bad bytes: OSError, SyntaxError, struct.error ...
        raise UserError(f"{type(error).__name__}: {error}") from error


def try_decode(source: Source, name: str) -> Image.Image | BrokenImage:
    """`decode_image`, or a `BrokenImage` called `name` where that fails."""
    try:
        return decode_image(source)
    except UserError as error:
        return BrokenImage(name, str(error))


class BrokenImages:
    """The broken-image report of one split: which of its images could not be read.

    Each image counts once, however often it is tried. The run stops as soon as the broken ones exceed `max_share` of
    the images of the split, so that a few bad files met early in an epoch do not stop it.

    Args:
        split: its name, for messages.
        total: images in the split.
        max_share: the largest tolerated share of broken images, 0 to 1.
        things: what is counted, for messages: images, or annotations.
        fault: what is wrong with the broken ones, for messages.

    Raises:
        UserError: `max_share` outside [0, 1].
    """

    def __init__(
        self, split: str, total: int, max_share: float, things: str = "images", fault: str = "cannot be read"
    ) -> None:
        check_range(0, 1, max_broken_share=max_share)
        self.split, self.total, self.max_share = split, total, max_share
        self.things, self.fault = things, fault
        self.broken: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.broken)

    def record(self, broken: Iterable[BrokenImage]) -> None:
        """Add broken images.

        Raises:
            BrokenImagesError: their share is now above the limit.
            UserError: wrong labels are among them; naming the file.
        """
        for item in broken:
            if isinstance(item, WrongLabels):
                raise UserError(f"{item.path}: {item.reason}")
            self.broken.setdefault(item.path, item.reason)
        if len(self) > self.max_share * self.total:
            first = "\n".join(f"  {path}: {reason}" for path, reason in list(self.broken.items())[:5])
            raise BrokenImagesError(
                f"{len(self)} of the {self.total} {self.things} of split {self.split!r} {self.fault} "
                f"({len(self) / max(self.total, 1):.2%}, above max_broken_share = {self.max_share:.2%}); "
                f"the first:\n{first}"
            )


def write_broken_images(path: str | os.PathLike[str], reports: Iterable[BrokenImages]) -> int:
    """Write every broken image as a line `split <tab> path <tab> reason`, whole or not at all; return how many."""
    lines = [
        "\t".join((report.split, name, " ".join(reason.split()))) + "\n"
        for report in reports
        for name, reason in sorted(report.broken.items())
    ]
    atomic_write(os.fspath(path), "".join(lines).encode("utf-8", "surrogateescape"))
    return len(lines)
