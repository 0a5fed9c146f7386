"""Which files below a folder are images: what systems and tools leave there is not."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dgt.data.image_io import StrPath, begins_like_an_image
from dgt.utils.class_names import composed, some
from dgt.utils.errors import UserError

IMAGES = """
    .jpg .jpeg .jpe .jfif .jif .mpo .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm
    .jp2 .j2k .j2c .jpc .jpf .jpx .avif .avifs
"""
OTHERS = """
    .txt .csv .tsv .json .jsonl .xml .yaml .yml .toml .ini .md .rst .html .htm .log .pdf .doc .docx
    .xls .xlsx .py .ipynb .m .sh .mat .npy .npz .h5 .hdf5 .pkl .pt .pth .ckpt .safetensors .parquet
    .arrow .tfrecord .db .sqlite .zip .tar .gz .tgz .bz2 .xz .7z .rar .mp4 .avi .mov .mkv .webm .mpg
    .mpeg .mp3 .wav .svg .eps .ps .ai .psd .xcf .ico .heic .heif .dng .cr2 .cr3 .nef .arw .orf .rw2
    .raf .pef .srw .exr .hdr .dcm .nii .lnk .url .md5 .sha256
"""
SUFFIXES = frozenset(IMAGES.split())
OTHER_SUFFIXES = frozenset(OTHERS.split())  # of what lies beside images: not opened either
# Folders of systems and tools, in lower case; those that begin with a dot go anyway
SYSTEM_FOLDERS = frozenset(
    {"$recycle.bin", "recycler", "#recycle", "@recycle", "#snapshot", "@eadir", "@tmp"}
    | {"__macosx", "lost+found", "system volume information", "__pycache__"}
)
SUFFIX = re.compile(r"\.[A-Za-z]\w*$")
"""The end of a file's name that its partner need not have; `.001` is a part of the name."""
START = 64  # bytes that show what a file is


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or a folder of the system."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def folder_names(parent: StrPath) -> tuple[str, ...]:
    """Sorted names of the folders in `parent`, without hidden ones, those of the system, and links
    to a folder that holds `parent`; none where it is not there.
    """
    entries = os.scandir(parent) if os.path.isdir(parent) else ()
    around = _identities_around(parent)
    return tuple(
        sorted(
            entry.name
            for entry in entries
            if not is_hidden(entry.name) and entry.is_dir() and _identity(entry.path) not in around
        )
    )


def image_files(folder: StrPath, left_out: Counter[str] | None = None) -> list[str]:
    """Every image file below a folder, sorted; `left_out` counts what is not one, by what it is.

    Hidden files and folders and those of the system are left out. Links are followed, each folder
    once. A suffix says whether a file is an image; only of a file without a known one the first
    bytes are read. Raises OSError for a folder that cannot be read.
    """
    left_out = Counter() if left_out is None else left_out
    return sorted(_images(Path(folder), _identities_around(folder), left_out))


def _images(folder: Path, seen: set[tuple[int, int]], left_out: Counter[str]) -> Iterator[str]:
    links = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_hidden(entry.name):
            left_out["hidden or the system's"] += 1
        elif not entry.is_dir():
            suffix = _suffix(entry)
            if suffix is None:
                yield entry.path
            else:
                left_out[suffix] += 1
        elif entry.is_symlink():
            links.append(entry.path)
        else:
            seen.add(_identity(entry.path))
            yield from _images(Path(entry.path), seen, left_out)
    for path in links:  # last: a folder is listed where it is, and not where a link leads to it
        if _identity(path) in seen:
            left_out["links to folders that were listed"] += 1
        else:
            seen.add(_identity(path))
            yield from _images(Path(path), seen, left_out)


def _suffix(entry: os.DirEntry[str]) -> str | None:
    """The suffix of a file that is no image, for counting; None for an image."""
    suffix = os.path.splitext(entry.name)[1].lower()
    if suffix in OTHER_SUFFIXES:
        return suffix
    if not entry.is_file():
        is_lost_link = entry.is_symlink() and suffix in SUFFIXES
        return None if is_lost_link else "no regular files"  # a lost link is a broken image
    if suffix in SUFFIXES:
        return None
    with open(entry.path, "rb") as file:
        return None if begins_like_an_image(file.read(START)) else suffix or "no suffix"


def existing(path: str) -> str:
    """The path, or where it does not exist the same with its accents composed or decomposed, if
    that does.
    """
    forms = (path, *(unicodedata.normalize(form, path) for form in ("NFC", "NFD")))
    return next(filter(os.path.exists, forms), path)


def _identity(path: StrPath) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _identities_around(folder: StrPath) -> set[tuple[int, int]]:
    """The identities of a folder and of all that hold it: a link to one of them is a cycle."""
    real, named = Path(os.path.realpath(folder)), Path(os.path.abspath(folder))
    around = {real, *real.parents, *named.parents}
    return {_identity(path) for path in around if path.is_dir()}


def left_out_note(place: StrPath, left_out: Counter[str]) -> list[str]:
    """A sentence on what lies below a place and is no image, or nothing."""
    if not left_out:
        return []
    counts = ", ".join(f"{count} {what}" for what, count in left_out.most_common())
    return [f"{left_out.total()} files and folders in {place} are left out, no images: {counts}"]


def images_by_name(folder: Path, notes: list[str], end: str = "") -> dict[str, str]:
    """Image files below a folder by their path in it, composed, without suffix and `end`; files
    without that end are left out.
    """
    left_out = Counter[str]()
    paths: dict[str, str] = {}
    for path in image_files(folder, left_out):
        name = composed(SUFFIX.sub("", os.path.relpath(path, folder)))
        if not name.endswith(end):
            continue
        name = name.removesuffix(end)
        first = paths.setdefault(name, path)
        if first != path:
            raise UserError(f"two files have the same name: {first} and {path}")
    notes += left_out_note(folder, left_out)
    return paths


def split_lists(folder: StrPath) -> tuple[str, ...]:
    """Names of the splits that a folder has lists of, text files."""
    return tuple(sorted(path.stem for path in Path(folder).glob("*.txt")))


def listed_names(folder: StrPath, split: str) -> tuple[Path, set[str]]:
    """The list of a split in a folder, and the names in it, one a line, composed.

    FileNotFoundError for no such list, UserError for one that is not in UTF-8.
    """
    path = Path(folder, f"{split}.txt")
    if not path.is_file():
        raise FileNotFoundError(
            f"split: {folder} has no list {path.name!r}; it has: {some(split_lists(folder))}"
        )
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    return path, {composed(line.strip()) for line in lines} - {""}
