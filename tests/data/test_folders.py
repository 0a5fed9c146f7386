"""What of a folder is data: not what systems and tools leave there, links once, any suffix or none."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from dgt.data.classification import ClassificationData
from dgt.data.folders import folder_names, image_files
from dgt.data.label_maps import LabelMapFolder
from dgt.data.readers import ImageFolder


def put(root: Path, *names: str, kind: str = "PNG") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(path, kind)


def names_in(root: Path, left_out: Counter[str] | None = None) -> list[str]:
    return [os.path.relpath(path, root) for path in image_files(root, left_out)]


@pytest.mark.parametrize(
    "junk",
    [
        ".DS_Store",
        "._0.png",
        ".ipynb_checkpoints/0-checkpoint.png",
        "deep/.Trash-1000/files/1.png",
        "$RECYCLE.BIN/$R1.png",
        "@eaDir/0.png/SYNOPHOTO_THUMB.png",
        "deep/__MACOSX/cat/0.png",
        "lost+found/1.png",
        "System Volume Information/1.png",
    ],
)
def test_hidden_files_and_folders_of_systems_are_no_data(tmp_path: Path, junk: str) -> None:
    put(tmp_path, "0.png", "deep/er/1.png", junk)
    left_out = Counter[str]()
    assert names_in(tmp_path, left_out) == ["0.png", "deep/er/1.png"]
    assert left_out.total() == 1


def test_folders_of_systems_are_no_classes_and_no_splits(tmp_path: Path) -> None:
    put(tmp_path, "cat/0.png", "__MACOSX/0.png", ".git/0.png", "@eaDir/0.png", "lost+found/0.png")
    assert folder_names(tmp_path) == ("cat",)


def test_links_are_followed_once_and_cycles_end(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/0.png", "train/cat/deep/1.png", "train/dog/2.png", "else/3.png")
    cat = tmp_path / "train" / "cat"
    for name, target in {
        "loop": cat,
        "up": tmp_path / "train",
        "deep/back": cat / "deep",
        "again": cat / "deep",
        "more": tmp_path / "else",
        "more_again": tmp_path / "else",
    }.items():
        (cat / name).symlink_to(target, target_is_directory=True)
    (cat / "4.png").symlink_to(tmp_path / "else" / "3.png")
    assert names_in(cat) == ["0.png", "4.png", "deep/1.png", "more/3.png"]
    (tmp_path / "train" / "all").symlink_to(tmp_path / "train", target_is_directory=True)
    assert folder_names(tmp_path / "train") == ("cat", "dog")
    (tmp_path / "linked").symlink_to(cat, target_is_directory=True)
    assert len(image_files(tmp_path / "linked")) == 4


def test_a_link_to_nothing_is_a_broken_image(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/0.png")
    (tmp_path / "train" / "cat" / "1.png").symlink_to(tmp_path / "gone.png")
    images = ImageFolder(tmp_path)
    assert len(images) == 2
    assert images[1].reason == "is a link to a file that is not there"


KINDS = {
    "JPEG": (".jpg", ".JPEG", ".jpe", ".jfif"),
    "PNG": (".png", ".PNG"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pnm"),
    "JPEG2000": (".jp2", ".j2k", ".jpf"),
    "AVIF": (".avif",),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_found_by_its_suffix_or_by_its_first_bytes(
    tmp_path: Path, kind: str
) -> None:
    names = [f"cat/{place}{suffix}" for place, suffix in enumerate((*KINDS[kind], "", ".photo"))]
    put(tmp_path / "train", *names, kind=kind)
    images = ImageFolder(tmp_path)
    assert len(images) == len(names)
    assert all(images[index][0].size == (40, 40) for index in range(len(names)))


def test_gray_and_bitmaps_of_ppm(tmp_path: Path) -> None:
    for name, mode in (("a.pgm", "L"), ("b.pbm", "1"), ("c", "1"), ("d", "L")):
        Image.new(mode, (40, 40)).save(tmp_path / name, "PPM")
    assert names_in(tmp_path) == ["a.pgm", "b.pbm", "c", "d"]


def test_only_files_without_a_known_suffix_are_opened(tmp_path: Path) -> None:
    put(tmp_path, "0.png")
    for name in ("notes.txt", "labels.json", "plot.eps", "IMG_1.HEIC"):
        (tmp_path / name).write_bytes(b"\xff\xd8\xff")
    (tmp_path / "plain").write_text("P1 of the text, BM, II")
    (tmp_path / "program").write_text("%!PS-Adobe-3.0 EPSF-3.0")
    os.mkfifo(tmp_path / "pipe.jpg")  # to open it would wait for ever
    opened = []
    usual = open

    def watched(path: object, *more: object) -> object:
        opened.append(os.path.basename(str(path)))
        return usual(path, *more)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", watched)
        left_out = Counter[str]()
        assert names_in(tmp_path, left_out) == ["0.png"]
    assert sorted(opened) == ["plain", "program"]
    assert left_out == {
        ".txt": 1,
        ".json": 1,
        ".eps": 1,
        ".heic": 1,
        "no suffix": 2,
        "no regular files": 1,
    }


def test_what_is_left_out_is_said_in_one_line_for_each_split(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/0.png", "val/cat/0.png", "train/cat/.0.png", "train/stray.png")
    put(tmp_path, "train/dog/0.png")
    (tmp_path / "train" / "cat" / "0.txt").touch()
    data = ClassificationData(str(tmp_path), image_size=32, num_workers=0)
    data.setup()
    (note,) = data.notes
    assert note.startswith(f"3 files and folders in {tmp_path / 'train'} are left out")
    assert "1 .txt" in note


def test_label_maps_pair_with_images_of_any_suffix(tmp_path: Path) -> None:
    put(tmp_path, "images/val/a", "images/val/b.photo", "images/val/c.001", "images/val/c.002.jpg")
    for name in ("a", "b", "c.001", "c.002", ".hidden", "@eaDir/a"):
        path = tmp_path / "labels" / "val" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 40)).save(path)
    reader = LabelMapFolder(tmp_path, "val", ["road", "sky"])
    assert [os.path.basename(path) for path, _ in reader.samples] == [
        "a",
        "b.photo",
        "c.001",
        "c.002.jpg",
    ]
    assert "2 files and folders" in reader.notes[0]


def test_names_with_accents_are_one_however_they_are_composed(tmp_path: Path) -> None:
    put(tmp_path / "train", "caf\u00e9/0.png", "cafe\u0301/1.png", "b/2.png")
    put(tmp_path / "val", "cafe\u0301/0.png")
    train = ImageFolder(tmp_path, "train")
    assert train.class_names == ("b", "caf\u00e9")
    assert [label for _, label in train.samples] == [0, 1, 1]
    assert ImageFolder(tmp_path, "val", train.class_names).samples[0][1] == 1
    put(tmp_path / "images" / "val", "Stra\u0308\u00dfe/o\u0308.png")
    (tmp_path / "labels" / "val" / "Str\u00e4\u00dfe").mkdir(parents=True)
    Image.new("L", (40, 40)).save(tmp_path / "labels" / "val" / "Str\u00e4\u00dfe" / "\u00f6.png")
    assert len(LabelMapFolder(tmp_path, "val", ["a", "b"])) == 1
