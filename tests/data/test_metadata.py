"""Large metadata cost no pixels, turned images keep their label maps, reasons are sentences."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from dgt.data.image_io import TURNS, BrokenImage, decode_image, decode_stored, try_decode, turned
from dgt.data.label_maps import LabelMapFolder
from dgt.utils.errors import UserError

PIXELS = np.zeros((40, 60, 3), np.uint8)
PIXELS[:20, :30] = (200, 30, 30)  # one corner, so that every turn shows


def exif(orientation: int = 6) -> Image.Exif:
    made = Image.Exif()
    made[ExifTags.Base.Orientation] = orientation
    made[ExifTags.Base.Make] = "maker" * 10
    return made


def saved(kind: str, pixels: np.ndarray = PIXELS, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes) -> bytes:
    whole = saved("PNG", exif=exif())
    return whole[:33] + b"".join(chunks) + whole[33:]  # after IHDR


def turned_tiff(kind: int) -> bytes:
    """A TIFF turned by an orientation of an unusual type."""
    whole = bytearray(saved("TIFF", tiffinfo={ExifTags.Base.Orientation: 6}))
    entry = whole.index(struct.pack("<HHI", ExifTags.Base.Orientation, 3, 1))
    struct.pack_into("<HI4s", whole, entry + 2, kind, 1, b"\6\0\0\0")
    return bytes(whole)


ZEROS = zlib.compress(bytes(40 * 2**20))
USABLE: dict[str, Callable[[], bytes]] = {
    "a text that unpacks to 40 MB": lambda: png_with(chunk(b"zTXt", b"a\0\0" + ZEROS)),
    "a color profile of 40 MB": lambda: png_with(chunk(b"iCCP", b"a\0\0" + ZEROS)),
    "a profile that does not unpack": lambda: png_with(chunk(b"iCCP", b"a\0\0no zlib")),
    "EXIF data longer than they say": lambda: saved(
        "JPEG", exif=exif(), comment=b"abc", quality=95
    ).replace(b"\xff\xfe\0\5abc", b"\xff\xfe\0\3abc"),
    "TIFF with an orientation of one byte": lambda: turned_tiff(1),
    "TIFF with a long orientation": lambda: turned_tiff(4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", USABLE)
def test_such_metadata_cost_no_pixels_and_no_turn(what: str) -> None:
    found = np.asarray(decode_image(USABLE[what]()), dtype=int)
    expected = np.asarray(turned(Image.fromarray(PIXELS), 6), dtype=int)
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() < 4


@pytest.mark.filterwarnings("ignore")
def test_what_pillow_refuses_is_a_broken_image() -> None:
    text = chunk(b"tEXt", b"a\0b")[:-1] + b"!"  # whose checksum is wrong
    found = try_decode(png_with(text), "a.png", 0)
    assert found == BrokenImage("a.png", found[1])
    assert "damaged" in str(found[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "rubbish", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"no EXIF data"]
)
def test_exif_data_of_rubbish_turn_nothing(kind: str, rubbish: bytes) -> None:
    assert decode_image(saved(kind, exif=rubbish)).size == (60, 40)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_is_none_turns_nothing(value: int) -> None:
    made = Image.Exif()
    made[ExifTags.Base.Orientation] = value
    assert decode_image(saved("PNG", exif=made)).size == (60, 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_every_format_is_turned_as_its_tag_says(kind: str, orientation: int) -> None:
    stored = decode_stored(saved(kind, exif=exif(orientation)))
    assert (stored.image.size, stored.orientation) == ((60, 40), orientation)
    found = np.asarray(turned(stored.image, stored.orientation))[..., 0] > 100
    expected = np.asarray(turned(Image.fromarray(PIXELS[..., 0]), orientation)) > 100
    assert (found == expected).mean() > 0.97


def aligned(
    folder: Path, kind: str, of_image: int, of_map: int, is_upright: bool, side: int = 60
) -> bool | str:
    """Whether an image and its label map, each with an orientation, agree when read; or why not.

    The label map is drawn on the upright image, or on the pixels as stored.
    """
    pixels = PIXELS[:, :side]
    stored = Image.fromarray((pixels[..., 0] > 0).astype(np.uint8))
    labels = turned(stored, of_image) if is_upright else stored
    for place, image, tag, ending in (
        ("images", Image.fromarray(pixels), of_image, kind),
        ("labels", labels, of_map, "tif" if kind == "tif" else "png"),
    ):
        path = folder / place / "train" / f"a.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **({} if tag == 1 else {"exif": exif(tag)}))
    found = LabelMapFolder(folder, "train", ["a", "b"])[0]
    if isinstance(found, BrokenImage):
        return found.reason
    seen = np.asarray(found[0])[..., 0] > 100
    return bool(seen.shape == found[1].shape and (seen == found[1]).mean() > 0.97)


class TestAlignment:
    @pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
    @pytest.mark.parametrize("orientation", [5, 6, 7, 8])
    def test_sizes_show_what_a_label_map_is_of(
        self, tmp_path: Path, kind: str, orientation: int
    ) -> None:
        for is_upright in (True, False):
            assert aligned(tmp_path, kind, orientation, 1, is_upright) is True

    @pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
    @pytest.mark.parametrize("orientation", TURNS)
    def test_the_same_tag_on_both_turns_both(
        self, tmp_path: Path, kind: str, orientation: int
    ) -> None:
        assert aligned(tmp_path, kind, orientation, orientation, is_upright=False) is True

    def test_a_tag_copied_to_an_upright_label_map(self, tmp_path: Path) -> None:
        assert aligned(tmp_path, "jpg", 6, 6, is_upright=True) is True

    @pytest.mark.parametrize(
        ("of_image", "of_map", "side"), [(3, 1, 60), (6, 1, 40), (1, 4, 60), (6, 8, 60), (2, 3, 60)]
    )
    def test_what_cannot_be_known_is_refused(
        self, tmp_path: Path, of_image: int, of_map: int, side: int
    ) -> None:
        why = aligned(tmp_path, "png", of_image, of_map, is_upright=False, side=side)
        assert "store both upright" in str(why)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (bytes(3000), "is nothing but zeros|holds nothing but zeros"),
        (b"\n<!DOCTYPE html><title>404</title>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is HEIC"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is PostScript"),
        (b"some text", "is not an image: expected JPEG, PNG"),
        (saved("PNG")[:60], "is damaged"),
        (saved("JPEG")[:300], "is damaged"),
    ],
)
def test_the_reason_for_a_broken_image_is_for_people(content: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        decode_image(content)
    assert "BytesIO" not in str(raised.value)
    assert "Error" not in str(raised.value)


@pytest.mark.parametrize("missing", [1, 40, 67])
def test_a_tiff_whose_pixels_end_too_early_is_refused(missing: int) -> None:
    file = io.BytesIO()
    Image.new("I;16", (1, 40), 40_000).save(file, "TIFF")
    with pytest.raises(UserError, match="damaged or cut off"):
        decode_image(file.getvalue()[:-missing])
