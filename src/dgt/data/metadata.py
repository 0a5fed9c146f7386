"""Image files without their metadata, which may be broken where the pixels are not.

Pillow refuses a whole file for a text chunk with a wrong checksum, a color profile of a megabyte or
a resolution in letters. Copied without those, the pixels decode. The EXIF data stay where that is
possible, as they say how the image is turned.
"""

import struct
import zlib

PNG = b"\x89PNG\r\n\x1a\n"
PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf")
WEBP_PIXELS = (b"ANIM", b"ANMF", b"ALPH", b"VP8 ", b"VP8L")
WEBP_PROFILE, WEBP_EXIF, WEBP_XMP = 0x20, 0x08, 0x04  # bits in the flags of VP8X
# What a TIFF file's tags say of its pixels: sizes, types, places, compression, and the orientation.
TIFF_KEPT = frozenset(
    {254, 256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, 321}
    | {322, 323, 324, 325, 330, 332, 338, 339, 340, 341, 347, *range(512, 522), 529, 530, 531, 532}
)


def without_metadata(content: bytes) -> bytes | None:
    """A PNG, JPEG, WebP, TIFF or AVIF file without its metadata; None for other files, and for those
    that end too early.
    """
    try:
        if content.startswith(PNG):
            return _plain_png(content)
        if content.startswith(b"\xff\xd8"):
            return _plain_jpeg(content)
        if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
            return _plain_webp(content)
        if content[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            return _plain_tiff(content)
        if content[4:8] == b"ftyp":  # the entry that names its EXIF data gets another name
            head, mdat, pixels = content.partition(b"mdat")
            return head.replace(b"Exif", b"free") + mdat + pixels
    except (struct.error, ValueError):
        pass
    return None


def _plain_png(content: bytes) -> bytes:
    kept = [PNG]
    place = len(PNG)
    while place + 8 <= len(content):
        length, name = struct.unpack_from(">I4s", content, place)
        chunk = content[place : place + 12 + length]
        if name == b"eXIf":  # may be turned by it even where its checksum is wrong
            chunk = chunk[:-4] + struct.pack(">I", zlib.crc32(chunk[4:-4]))
        if name in PNG_KEPT:
            kept.append(chunk)
        if name == b"IEND":
            break
        place += 12 + length
    return b"".join(kept)


def _plain_jpeg(content: bytes) -> bytes:
    kept = [b"\xff\xd8"]
    place = 2
    while True:
        start = content.index(b"\xff", place)
        if b"\xff\xd8" in content[place : start + 2]:  # a preview, that a wrong length laid bare
            raise ValueError("two images")
        place = start
        marker, length = struct.unpack_from(">BH", content, place + 1)
        if marker in (0x00, 0xFF):  # bytes that fill
            place += 1
            continue
        if marker == 0xDA:  # the pixels begin
            return b"".join([*kept, content[place:]])
        if length < 2:
            raise struct.error
        segment = content[place : place + 2 + length]
        is_exif = marker == 0xE1 and segment[4:10] == b"Exif\0\0"
        # JFIF and Adobe say how colors are stored
        says_colors = (marker == 0xE0 and length >= 16) or (marker == 0xEE and length >= 14)
        is_metadata = 0xE0 <= marker <= 0xEF or marker == 0xFE
        if not is_metadata or is_exif or says_colors:
            kept.append(segment)
        place += 2 + length


def _plain_webp(content: bytes) -> bytes:
    kept = []
    flags = None
    exif = b""
    place = 12
    while place + 8 <= len(content):
        name, length = struct.unpack_from("<4sI", content, place)
        chunk = content[place : place + 8 + length + length % 2]
        if name == b"VP8X":
            flags = chunk[8] & ~(WEBP_PROFILE | WEBP_EXIF | WEBP_XMP)
            canvas = chunk[9:]
        elif name in WEBP_PIXELS:
            kept.append(chunk)
        elif name == b"EXIF" and len(chunk) >= 8 + length:
            exif = chunk
        place += 8 + length + length % 2
    if flags is not None:
        flags |= WEBP_EXIF if exif else 0
        kept = [b"VP8X" + struct.pack("<IB", 10, flags) + canvas, *kept, exif]
    body = b"WEBP" + b"".join(kept)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _plain_tiff(content: bytes) -> bytes:
    order = "<" if content.startswith(b"I") else ">"
    is_big = content[2:4] in (b"+\0", b"\0+")
    pointer, at, count_type, size = ("Q", 8, "Q", 20) if is_big else ("I", 4, "H", 12)
    (place,) = struct.unpack_from(order + pointer, content, at)
    (count,) = struct.unpack_from(order + count_type, content, place)
    first = place + struct.calcsize(count_type)
    entries = [content[first + size * number :][:size] for number in range(count)]
    kept = [entry for entry in entries if struct.unpack_from(order + "H", entry)[0] in TIFF_KEPT]
    # In place, as no pixel may move, and a file that ends too early must not get longer.
    directory = struct.pack(order + count_type, len(kept)) + b"".join(kept)
    directory += struct.pack(order + pointer, 0)
    return content[:place] + directory + content[place + len(directory) :]
