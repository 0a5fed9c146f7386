"""From bytes to an upright RGB image, and the report of the files that would not decode.

An unreadable image is never replaced by another one: the reader returns a `BrokenImage`, the batch
leaves it out, and `BrokenImages` of the main process counts and lists it, and stops the run above a
share that the user sets.
"""

import io
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, PngImagePlugin, UnidentifiedImageError

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


class Stored(NamedTuple):
    """A decoded image file.

    `image` has the pixels as stored, in their own mode, but colors of 16 bits scaled to 8;
    `orientation` is EXIF's, 1 to 8; `format` Pillow's name; `is_stretched` says whether values of
    fewer bits were scaled to 8; `bits` of gray values above 255, 0 where the file does not say.
    """

    image: Image.Image
    orientation: int
    format: str = ""
    is_stretched: bool = False
    bits: int = 0

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height of the image turned as its orientation says."""
        width, height = self.image.size
        return (height, width) if self.orientation >= 5 else (width, height)


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
        kind, is_stretched = str(opened.format), _is_stretched(opened)
        bits, has_16_bits = _said_bits(opened), _colors_of_16_bits(opened)
        if kind == "TIFF":
            tag = _orientation_tag(opened)
            opened.load()  # which turns it, unless the tag is of another type
            image = _with_few_bits(opened, file) if has_16_bits else opened
            image = turned(image, TURNED_BACK.get(tag, tag)) if tag in TURNS else image
            return Stored(image, _orientation(tag), kind, is_stretched, bits)
        opened.load()  # first: the EXIF data of a PNG may lie behind its pixels
        image = _with_few_bits(opened, file) if has_16_bits else opened
        return Stored(image, _orientation(_orientation_tag(opened)), kind, is_stretched, bits)


def size_as_stored(source: Source) -> tuple[tuple[int, int], int] | None:
    """Width and height of an image file or its bytes, and EXIF's orientation, by how the file begins;
    None where it cannot be read.
    """
    try:
        file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=FORMATS) as opened:
            return opened.size, _orientation(_orientation_tag(opened))
    except Exception:  # as many kinds as of broken images
        return None


def _said_bits(opened: ImageFile.ImageFile) -> int:
    """The bits of the gray values of an opened file of more than 8, by its format; 0 where values of
    fewer bits may have been stored in 16.
    """
    if not opened.mode.startswith("I"):
        return 0
    if opened.format in ("PPM", "JPEG2000"):  # which Pillow scales to 16
        return 16
    stored = getattr(opened, "tag_v2", {}).get(ExifTags.Base.BitsPerSample, ())
    return 12 if tuple(stored) == (12,) else 0


def fewest_bits(largest: int) -> int:
    """The fewest bits of 8, 10, 12, 14 and 16, as cameras and scanners have them, that hold a value."""
    return next(bits for bits in range(8, 18, 2) if largest < 2**bits)


def _colors_of_16_bits(opened: ImageFile.ImageFile) -> bool:
    """Whether an opened file has colors of 16 bits, of which Pillow decodes the higher bytes alone."""
    return opened.mode in ("RGB", "RGBA") and any(
        str(_raw_mode(tile)).endswith((";16B", ";16L")) for tile in opened.tile
    )


def _raw_mode(tile: Any) -> Any:
    return tile.args[0] if isinstance(tile.args, tuple) else tile.args


def _with_few_bits(image: Image.Image, file: IO[bytes]) -> Image.Image:
    """A decoded file of colors of 16 bits; values of up to 14 are scaled to 8 from the fewest bits that
    hold them.
    """
    largest = max(int(np.max(band)) for band in image.getextrema()[:3])
    if largest >= 64:
        return image
    file.seek(0)
    with Image.open(file, formats=FORMATS) as again:
        # in the other order of bytes the higher ones are the lower ones
        for number, tile in enumerate(again.tile):
            mode = str(_raw_mode(tile))
            if mode.startswith("LA"):  # of which Pillow knows one order alone
                if largest < 16:
                    problem = "has gray values of 12 bits or fewer in 16, beside transparency"
                    raise UserError(f"{problem}: save it with 8 bits")
                return image
            other = mode[:-1] + {"B": "L", "L": "B"}[mode[-1]]
            arguments = (other, *tile.args[1:]) if isinstance(tile.args, tuple) else other
            again.tile[number] = tile._replace(args=arguments)
        again.load()
        values = 256 * np.asarray(image).astype(np.int64) + np.asarray(again)
    for part in (values[..., :3], values[..., 3:]):
        part[...] = part * 255 // (2 ** fewest_bits(int(part.max(initial=0))) - 1)
    return Image.fromarray(values.astype(np.uint8), image.mode)


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


def decode_image(source: Source) -> Image.Image:
    """Decode a file, or its bytes, to an upright RGB image; UserError where that fails, saying why.

    EXIF orientation is applied, transparent pixels are laid on white. Values of more than 8 bits are
    scaled to 8 from as many bits as the file says or, where it does not, as `fewest_bits` of its
    largest value: 12 bits of an X-ray in a file of 16 are visible.
    """
    return upright_rgb(decode_stored(source))


def upright_rgb(stored: Stored) -> Image.Image:
    """A decoded file as an upright RGB image, as `decode_image`."""
    return turned(_to_rgb(stored.image, stored.bits), stored.orientation)


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


def _to_rgb(image: Image.Image, bits: int) -> Image.Image:
    """A loaded image in RGB, gray of `bits`, 0 for the fewest that hold it, scaled to 8, what is
    transparent laid on white.
    """
    if image.mode == "F":
        raise UserError("floating-point pixels have no defined range")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise UserError(
                f"gray values from {values.min()} to {values.max()} do not fit in 16 bits"
            )
        steps = 2 ** (bits or fewest_bits(int(values.max()))) - 1
        image = Image.fromarray((values.astype(np.int64) * 255 // steps).astype(np.uint8))
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
