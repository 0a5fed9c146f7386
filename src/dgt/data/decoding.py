"""From bytes to an upright RGB picture, and an honest account of the files that would not decode.

An unreadable image is never replaced by another one in silence: the reader hands on a `BrokenImage`, the batch leaves
it out, and the `BrokenImages` ledger of the main process counts and lists it, and stops the run above a share that the
user sets.
"""

import io
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError


class BrokenImage(NamedTuple):
    """Stands in for an image that could not be read: where it lies, and why it failed."""

    path: str
    reason: str


class WrongLabels(BrokenImage):
    """Stands in for a sample whose labels can be read but are wrong: such a file stops the run, it is not left out."""


class BrokenImagesError(RuntimeError):
    """Too many images of a data set cannot be read."""


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Bring 16-bit and 32-bit grey values (0 to 65535) down to 8 bits; other modes come back as they are."""
    if picture.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if picture.mode != "I" and not picture.mode.startswith("I;16"):
        return picture
    values = np.asarray(picture)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise ValueError(f"grey values from {values.min()} to {values.max()} do not fit 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8))


def _on_white(picture: Image.Image) -> Image.Image:
    """A loaded picture in RGB, what is transparent laid on white; the picture itself where it is that already."""
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def decode_image(source: bytes | str | os.PathLike[str]) -> Image.Image:
    """Decode a file, or its bytes, to an upright RGB picture.

    EXIF orientation is applied; transparent pixels are laid on white; palettes and CMYK are converted; 16-bit grey is
    scaled to 8 bits.

    Raises:
        ValueError: the picture cannot be decoded; the message says why.
    """
    return decode_turned(source)[0]


def decode_turned(source: bytes | str | os.PathLike[str]) -> tuple[Image.Image, int]:
    """`decode_image`, and the EXIF orientation by which it was turned upright: 1 for not at all, 2 to 8."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            found = opened.getexif().get(ExifTags.Base.Orientation)
            orientation = found if isinstance(found, int) and 2 <= found <= 8 else 1  # Pillow, too, heeds no others
            ImageOps.exif_transpose(opened, in_place=True)
            opened.load()
            return _on_white(_eight_bit(opened)), orientation
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise ValueError("not an image in any format that Pillow knows") from None
    except Exception as error:  # decoders raise nearly everything on bad bytes: OSError, SyntaxError, struct.error ...
        raise ValueError(f"{type(error).__name__}: {error}") from error


def try_decode(source: bytes | str | os.PathLike[str], name: str) -> Image.Image | BrokenImage:
    """`decode_image`, or a `BrokenImage` called `name` where that fails."""
    try:
        return decode_image(source)
    except ValueError as error:
        return BrokenImage(name, str(error))


class BrokenImages:
    """The ledger of one split: which of its images could not be read.

    Each image counts once, however often it is tried. The run stops as soon as the broken ones exceed `max_share` of
    the images of the split, so that a few bad files met early in an epoch do not stop it.

    Args:
        split: its name, for messages.
        total: images in the split.
        max_share: the largest share of broken images to put up with, 0 to 1.
        things: what is counted, for messages: images, or annotations.
        fault: what is wrong with the broken ones, for messages.

    Raises:
        ValueError: `max_share` outside [0, 1].
    """

    def __init__(
        self, split: str, total: int, max_share: float, things: str = "images", fault: str = "cannot be read"
    ) -> None:
        if not 0 <= max_share <= 1:
            raise ValueError(f"max_broken_share must lie in [0, 1], got {max_share}")
        self.split, self.total, self.max_share = split, total, max_share
        self.things, self.fault = things, fault
        self.broken: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.broken)

    def record(self, broken: Iterable[BrokenImage]) -> None:
        """Take note of broken images.

        Raises:
            BrokenImagesError: their share is now above the limit.
            ValueError: wrong labels are among them; naming the file.
        """
        for item in broken:
            if isinstance(item, WrongLabels):
                raise ValueError(f"{item.path}: {item.reason}")
            self.broken.setdefault(item.path, item.reason)
        if len(self) > self.max_share * self.total:
            first = "\n".join(f"  {path}: {reason}" for path, reason in list(self.broken.items())[:5])
            raise BrokenImagesError(
                f"{len(self)} of the {self.total} {self.things} of split {self.split!r} {self.fault} "
                f"({len(self) / max(self.total, 1):.2%}, above max_broken_share = {self.max_share:.2%}); "
                f"the first:\n{first}"
            )


def write_broken_images(path: str | os.PathLike[str], ledgers: Iterable[BrokenImages]) -> int:
    """Write every broken image as a line `split <tab> path <tab> reason`; return how many there are.

    The file is written whole or not at all.
    """
    lines = [
        "\t".join((ledger.split, name, " ".join(reason.split()))) + "\n"
        for ledger in ledgers
        for name, reason in sorted(ledger.broken.items())
    ]
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(lines)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return len(lines)
