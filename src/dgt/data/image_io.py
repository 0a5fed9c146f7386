"""From bytes to an upright RGB image, and the report of the files that would not decode.

An unreadable image is never replaced by another one: the reader returns a `BrokenImage`, the batch
leaves it out, and `BrokenImages` of the main process counts and lists it, and stops the run above a
share that the user sets.
"""

import io
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, PngImagePlugin, UnidentifiedImageError

from dgt.utils.errors import LOGGER, UserError

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


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What is decoded, by the names that Pillow has for it: no format that runs a program, as EPS does."""
# Programs that make images keep whole workflows in one text of a PNG, and scanners a profile of
# megabytes: each may be as large as Pillow lets all of them be together.
PngImagePlugin.MAX_TEXT_CHUNK = max(PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY)
ORIENTATION = ExifTags.Base.Orientation
UPRIGHT = 1
# What EXIF's orientations do to the pixels as stored
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TURNED_BACK = {6: 8, 8: 6}  # the others are their own inverse
WHITE_IS_ZERO = 0  # of TIFF's photometric interpretations
LOOKED_AT = 100  # images of a data set whose beginnings show how many bits they have
ALL_BITS = (
    "values are taken to use all of them; where they use fewer, as 12 of a camera or an X-ray, the "
    "images are too dark: set data.bits, or save them with 8"
)


class Stored(NamedTuple):
    """A decoded image file.

    `image` has the pixels as stored, in their own mode, but of colors of 16 bits the higher 8;
    `orientation` is EXIF's, 1 to 8; `format` Pillow's name; `is_stretched` says whether values of
    fewer bits were scaled to 8; `bits` of gray values of more than 8, 0 where the file does not
    say; `is_color_of_16` whether lower bytes were left out.
    """

    image: Image.Image
    orientation: int
    format: str = ""
    is_stretched: bool = False
    bits: int = 0
    is_color_of_16: bool = False

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height of the image turned as its orientation says."""
        width, height = self.image.size
        return (height, width) if self.orientation >= 5 else (width, height)

    @property
    def leaves_bits_open(self) -> bool:
        """Whether it has 16 bits, and nothing in the file says how many of them are used."""
        return (_is_gray_of_16(self.image) and not self.bits) or self.is_color_of_16


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """An image turned as EXIF's `orientation`, 1 to 8, says."""
    return image if orientation == UPRIGHT else image.transpose(TURNS[orientation])


def decode_stored(source: Source) -> Stored:
    """Decode a file, or its bytes, without turning or converting it; UserError where that fails,
    saying why.
    """
    try:
        return _decode(source)
    except (MemoryError, UserError):
        raise
    except Exception as error:
        # decoders raise nearly everything on bad bytes: OSError, SyntaxError, struct.error ...
        try:
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
        except OSError as unread:
            raise UserError(_why_unread(unread, source)) from error
        raise UserError(_why_undecoded(error, content)) from error


def _decode(source: Source) -> Stored:
    # by a path, Pillow would map a file into memory, and a turned TIFF with its sides exchanged
    with (
        io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file,
        Image.open(file, formats=FORMATS) as opened,
    ):
        stored = _begun(opened)
        if stored.format == "TIFF":
            tag = _orientation_tag(opened)
            opened.load()  # which turns it, unless the tag is of another type
            image = turned(opened, TURNED_BACK.get(tag, tag)) if tag in TURNS else opened
            return stored._replace(image=image, orientation=_orientation(tag))
        opened.load()  # first: the EXIF data of a PNG may lie behind its pixels
        return stored._replace(orientation=_orientation(_orientation_tag(opened)))


def _begun(opened: ImageFile.ImageFile) -> Stored:
    """What the beginning of a file says, without its orientation; raises as `_said_bits`."""
    return Stored(
        opened,
        UPRIGHT,
        str(opened.format),
        _is_stretched(opened),
        _said_bits(opened),
        _is_color_of_16(opened),
    )


def _opening(source: Source) -> Any:
    """What Pillow opens of a file or its bytes."""
    return io.BytesIO(source) if isinstance(source, bytes) else source


class Beginning(NamedTuple):
    """What an image file says before its pixels: its `size`, width and height as stored; EXIF's
    `orientation`; and the colors of its `palette`, three bytes each, empty where it has none of RGB.
    """

    size: tuple[int, int]
    orientation: int
    palette: bytes


def beginning_of(source: Source) -> Beginning | None:
    """How an image file or its bytes begin; None where they cannot be read."""
    try:
        with Image.open(_opening(source), formats=FORMATS) as opened:
            kind, palette = ("", b"") if opened.palette is None else opened.palette.getdata()
            orientation = _orientation(_orientation_tag(opened))
            return Beginning(opened.size, orientation, bytes(palette) if kind == "RGB" else b"")
    except Exception:  # as many kinds as of broken images
        return None


def _said_bits(opened: ImageFile.ImageFile) -> int:
    """The bits of the gray values of an opened file of more than 8, by its format; 0 where values of
    fewer bits may have been stored in 16. UserError for values that only their file inverts.
    """
    if not _is_gray_of_16(opened):
        return 0
    if opened.format in ("PPM", "JPEG2000"):  # which Pillow scales to 16
        return 16
    tags = getattr(opened, "tag_v2", {})
    if tags.get(ExifTags.Base.PhotometricInterpretation) == WHITE_IS_ZERO:
        raise UserError("has gray of 16 bits with 0 for white: save it with 0 for black")
    return 12 if tuple(tags.get(ExifTags.Base.BitsPerSample, ())) == (12,) else 0


def _is_gray_of_16(opened: Image.Image) -> bool:
    """Whether an image has gray values of more than 8 bits."""
    return opened.mode.startswith("I")


def _is_color_of_16(opened: ImageFile.ImageFile) -> bool:
    """Whether an opened file has colors of 16 bits, of which Pillow decodes the higher bytes alone."""
    tiles = (tile.args for tile in opened.tile)
    modes = (args[0] if isinstance(args, tuple) else args for args in tiles)
    return opened.mode in ("RGB", "RGBA", "LA") and any(
        str(mode).endswith((";16B", ";16L")) for mode in modes
    )


def note_on_bits(
    source: Callable[[int], Source | None], count: int, bits: int | None, place: StrPath
) -> list[str]:
    """A sentence for images of 16 bits where nothing says how many of them are used, or nothing.

    Args:
        source: the file or bytes of an image by its number.
        count: how many there are; the beginnings of `LOOKED_AT` of them are read.
        bits: what the user said, None for nothing.
        place: where the images lie, for the sentence.
    """
    step = max(1, count // LOOKED_AT)
    for number in range(0, count if bits is None else 0, step):
        found = source(number)
        if found is not None and _leaves_bits_open(found):
            return [f"images in {place} have 16 bits: {ALL_BITS}"]
    return []


def _leaves_bits_open(source: Source) -> bool:
    """Whether a file has 16 bits and does not say how many of them are used, by how it begins."""
    try:
        with Image.open(_opening(source), formats=FORMATS) as opened:
            return _begun(opened).leaves_bits_open
    except Exception:  # as many kinds as of broken images
        return False


def _is_stretched(opened: ImageFile.ImageFile) -> bool:
    """Whether decoding scales the gray values of an opened file, or inverts them."""
    if opened.mode != "L" or not opened.tile:
        return False
    codec, _, _, arguments = opened.tile[0]
    words = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec.startswith("ppm"):
        return words[-1] != 255
    return str(words[0]).startswith("L;") and words[0] != "L;R"


def _orientation_tag(opened: Image.Image) -> Any:
    """EXIF's orientation as stored, of any type; 1 for none, and for broken EXIF data."""
    try:
        return opened.getexif().get(ORIENTATION, UPRIGHT)
    except Exception:  # as many kinds as of broken images
        return UPRIGHT


def _orientation(tag: Any) -> int:
    """EXIF's orientation, 1 to 8, of a tag as stored; 1 for one out of range."""
    if isinstance(tag, bytes | tuple) and len(tag) == 1:
        tag = tag[0]
    return int(tag) if tag in TURNS else UPRIGHT


def _why_unread(error: OSError, source: Source) -> str:
    """In words, why a file could not even be read."""
    if isinstance(error, FileNotFoundError):
        is_link = not isinstance(source, bytes) and os.path.islink(source)
        return "is a link to a file that is not there" if is_link else "is not there"
    return f"cannot be read: {error.strerror or error}"


# How files begin that are often taken for images
NO_IMAGES = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the image: run `git lfs pull`",
    b"%PDF": "is a PDF, not an image",
    b"%!PS": "is PostScript, which is not read: save it as PNG",
    b"PK\3\4": "is a zip archive, not an image",
    b"8BPS": "is a Photoshop file: save it as PNG",
}
HEIC = (b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1")


def _why_undecoded(error: Exception, content: bytes) -> str:
    """In words, why bytes are no image; what the decoder said goes last."""
    start = content[:512].lstrip(b"\xef\xbb\xbf \r\n\t").lower()
    if not content:
        return "is empty"
    if not content.strip(b"\0"):
        return "holds nothing but zeros: a download or a copy that broke off"
    for begin, what in NO_IMAGES.items():
        if content.startswith(begin):
            return what
    if start.startswith((b"<!doctype html", b"<html")):
        return "is a web page, not an image: the download failed"
    if b"<svg" in start:
        return "is SVG, which has no pixels: save it as PNG"
    if content[4:8] == b"ftyp" and content[8:12] in HEIC and b"avif" not in content[8:64]:
        return "is HEIC, which is not read: save it as JPEG"
    if isinstance(error, Image.DecompressionBombError):
        return "has more pixels than are decoded safely: scale it down, or cut it into tiles"
    if not begins_like_an_image(content):
        return "is not an image: expected JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, JPEG 2000 or AVIF"
    if isinstance(error, UnidentifiedImageError):
        return "is damaged, or of a variant of its format that Pillow does not read"
    is_pillows = type(error) is OSError  # whose other errors are about its own code
    return f"is damaged or cut off ({error})" if is_pillows else "is damaged or cut off"


def begins_like_an_image(start: bytes) -> bool:
    """Whether the first bytes of a file, 64 or more, are those of a format in `FORMATS`."""
    return bool(
        start.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a"))
        or (start.startswith(b"RIFF") and start[8:12] == b"WEBP")
        or (start.startswith(b"BM") and start[14:18] in BMP_HEADERS)
        or start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
        or PPM.match(start)
        or start.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"))
        or (start[4:8] == b"ftyp" and (b"avif" in start[8:64] or b"avis" in start[8:64]))
    )


BMP_HEADERS = tuple(struct.pack("<I", size) for size in (12, 40, 52, 56, 64, 108, 124))
PPM = re.compile(rb"P[1-6]\s+(#[^\n]*\n\s*)*\d")


def decode_image(source: Source, bits: int | None = None) -> Image.Image:
    """Decode a file, or its bytes, to an upright RGB image; UserError where that fails, saying why.

    EXIF orientation is applied, transparent pixels are laid on white, gray of more than 8 bits is
    scaled to 8.

    Args:
        source: the file or its bytes.
        bits: how many bits gray values use, 8 to 16, in files of 16 that do not say; None for all.
    """
    return upright_rgb(decode_stored(source), bits)


def upright_rgb(stored: Stored, bits: int | None = None) -> Image.Image:
    """A decoded file as an upright RGB image, as `decode_image`."""
    if stored.is_color_of_16 and bits not in (None, 16):
        raise UserError(
            f"has colors of 16 bits, of which the higher 8 are read, and data.bits is {bits}: save "
            "them with 8 bits"
        )
    return turned(_to_rgb(stored.image, stored.bits or bits or 16), stored.orientation)


def open_image(path: StrPath, bits: int | None = None) -> Image.Image:
    """`decode_image` of a file that the user named: FileNotFoundError where there is none,
    UserError with its name, also for what is no file.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"image file {str(path)!r} does not exist")
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a pipe or a device"
        raise UserError(f"{str(path)!r} must be an image file, but is {kind}")
    try:
        stored = decode_stored(path)
        if bits is None and stored.leaves_bits_open:
            _warn_of_bits()
        return upright_rgb(stored, bits)
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be read as an image: {error}") from error


@cache
def _warn_of_bits() -> None:
    """Say once in a process what is taken for granted of images of 16 bits."""
    LOGGER.warning(f"images have 16 bits: {ALL_BITS}")


def try_decode(
    source: Source, name: str, answer: int, bits: int | None = None
) -> tuple[Image.Image, int] | BrokenImage:
    """`decode_image` beside the image's label or index, or a `BrokenImage` called `name` where that
    fails.
    """
    try:
        return decode_image(source, bits), answer
    except UserError as error:
        return BrokenImage(name, str(error))


def _to_rgb(image: Image.Image, bits: int) -> Image.Image:
    """A loaded image in RGB, gray of `bits` scaled to 8, what is transparent laid on white."""
    if image.mode == "F":
        raise UserError("floating-point pixels have no defined range")
    if _is_gray_of_16(image):
        values = np.asarray(image)
        largest = 2**bits - 1
        if values.min() < 0 or values.max() > largest:
            raise UserError(
                f"gray values from {values.min()} to {values.max()} do not fit in {bits} bits"
            )
        scaled = (values.astype(np.int64) * 255 // largest).astype(np.uint8)
        scaled[values == image.info.get("transparency", -1)] = 255  # white, as below
        image = Image.fromarray(scaled)
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
