"""Pascal VOC's layout of detection: the same reports as of COCO's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from dgt.data.detection import DetectionData
from dgt.data.image_io import BrokenImage, BrokenImagesError
from dgt.data.voc import VocImages, read_annotations

from .coco_files import write_coco

SIZE = (60, 40)


def thing(name: str, box: tuple[Any, ...] = (11, 6, 30, 35), more: str = "") -> str:
    """An object as VOC writes it, with a part of its own name and box."""
    sides = "".join(
        f"<{side}>{value}</{side}>"
        for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    return f"<object><name>{name}</name><bndbox>{sides}</bndbox>{more}{part}</object>"


def difficult(mark: Any) -> str:
    return f"<difficult>{mark}</difficult>"


def attribute(name: str, value: str) -> str:
    """As CVAT writes them."""
    content = f"<attribute><name>{name}</name><value>{value}</value></attribute>"
    return f"<attributes>{content}</attributes>"


def write_image(
    root: Path, name: str, *things: str, size: tuple[int, int] = SIZE, orientation: int = 1
) -> None:
    """An image of 60 x 40 pixels as stored, and its annotations."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    for folder in ("JPEGImages", "Annotations"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", SIZE).save(root / "JPEGImages" / f"{name}.jpg", exif=exif)
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    content = f"<annotation>{sides}{''.join(things)}</annotation>"
    (root / "Annotations" / f"{name}.xml").write_text(content)


def write_list(root: Path, split: str, *names: str) -> None:
    (root / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    (root / "ImageSets" / "Main" / f"{split}.txt").write_text(
        "".join(f"{name}\n" for name in names)
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two images to train on, one to validate on."""
    write_image(tmp_path, "2007_1", thing("dog"), thing("cat", (1, 1, 60, 40)))
    write_image(tmp_path, "2007_2", thing("cat"))
    write_image(tmp_path, "2007_3", thing("dog", more=attribute("rotation", "0.0")))
    write_list(tmp_path, "train", "2007_2", "2007_1")
    write_list(tmp_path, "val", "2007_3")
    return tmp_path


def open_data(root: Path, **options: Any) -> DetectionData:
    data = DetectionData(str(root), batch_size=2, num_workers=0, **options)
    data.setup()
    return data


def test_boxes_count_from_1_and_include_their_last_pixels(root: Path) -> None:
    data = open_data(root)
    assert data.class_names == ("cat", "dog")
    image, _, objects = data.datasets["train"].reader[0]
    assert image.size == SIZE
    assert objects()["boxes"].tolist() == [[10, 5, 30, 35], [0, 0, 60, 40]]
    assert objects()["labels"].tolist() == [2, 1]
    truth = data.datasets["val"].reader.ground_truth()
    assert [(each["bbox"], each["iscrowd"]) for each in truth["annotations"]] == [
        ([10, 5, 20, 30], 0)
    ]
    _, targets = next(iter(data.train_dataloader()))
    assert sorted(len(target["boxes"]) for target in targets) == [1, 2]


def test_any_list_is_a_split(root: Path) -> None:
    write_list(root, "trainval", "2007_1", "2007_2", "2007_3")
    assert len(open_data(root, train_split="trainval").datasets["train"]) == 3
    with pytest.raises(
        FileNotFoundError, match=r"has no list 'test\.txt'; it has: train, trainval"
    ):
        open_data(root, val_split="test")


def test_what_objects_marked_as_difficult_are_is_asked_for(root: Path) -> None:
    write_image(root, "2007_2", thing("cat", more=difficult(0)), thing("dog", more=difficult(1)))
    with pytest.raises(ValueError, match=r"data\.difficult must be one of ignore, keep: 1 of 4"):
        open_data(root)
    for choice, labels, crowds in (("ignore", [1], [0, 1]), ("keep", [1, 2], [0, 0])):
        reader = open_data(root, difficult=choice).datasets["train"].reader
        assert reader[1][2]()["labels"].tolist() == labels
        assert [each["iscrowd"] for each in reader.by_image[1]] == crowds


def test_classes_are_those_that_a_file_lists(root: Path) -> None:
    (root / "classes.txt").write_text("dog\nowl\n")
    with pytest.raises(BrokenImagesError, match="2 of the 3 annotations of split 'train'"):
        open_data(root)
    data = open_data(root, max_broken_share=0.9)
    assert data.class_names == ("dog", "owl")
    assert any("have no object" in note for note in data.notes)


def test_classes_of_a_model_are_matched_by_name(root: Path) -> None:
    data = DetectionData(str(root), num_workers=0)
    data.setup("validate", class_names=("owl", "dog"))
    assert data.datasets["val"].reader[0][2]()["labels"].tolist() == [2]


class TestBadData:
    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            (thing("owl"), "must have one of the classes as its name, got 'owl'"),
            ("<object/>", "must have one of the classes as its name, got None"),
            (
                thing("dog", more=difficult("maybe")),
                "must have 0 or 1 as its difficult, got 'maybe'",
            ),
            (
                thing("dog", more=attribute("occluded", "False") + attribute("rotation", "45.0")),
                "must have no rotation among its attributes, got '45.0'",
            ),
            (thing("dog", ("a", 6, 30, 35)), r"must have numbers as its xmin, .*got \('a', '6'"),
            (
                thing("dog", more="<bndbox><xmin>40</xmin></bndbox>"),
                r"must have numbers as its xmin, .*got \('11 and 40', '6'",
            ),
            (thing("dog", (90, 6, 99, 35)), "must have a bbox inside of its image"),
            (thing("dog", (30, 6, 11, 35)), "must have .* as its bbox, got"),
        ],
    )
    def test_a_wrong_object_is_named_with_its_file(
        self, root: Path, wrong: str, reason: str
    ) -> None:
        write_image(root, "2007_3", thing("cat"), wrong)
        with pytest.raises(BrokenImagesError, match=rf"2007_3\.xml: object 2: {reason}"):
            open_data(root)
        data = open_data(root, max_broken_share=0.5)
        assert len(data.broken_images["val annotations"]) == 1
        assert len(data.datasets["val"].reader.by_image[0]) == 1

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"no XML", "is not XML: syntax error"),
            (b"", "is not XML: no element found"),
            (b"<?xml version='1.0' encoding='klingon'?><annotation/>", "is not XML"),
            (b"<annotation><size><width>60</width></size></annotation>", "got ['60', None]"),
            (b"<!DOCTYPE a [<!ENTITY b SYSTEM '/etc/hostname'>]><a>&b;</a>", "document type"),
        ],
    )
    def test_annotations_that_cannot_be_read_break_their_image(
        self, root: Path, content: bytes, reason: str
    ) -> None:
        (root / "Annotations" / "2007_2.xml").write_bytes(content)
        reader = open_data(root, max_broken_share=0.5).datasets["train"].reader
        assert isinstance(reader[1], BrokenImage)
        assert reader[1].path.endswith("2007_2.xml")
        assert reason in reader[1].reason
        with pytest.raises(BrokenImagesError, match=r"2007_2\.xml"):
            list(open_data(root).train_dataloader())

    def test_a_broken_image_and_one_of_another_size_are_reported(self, root: Path) -> None:
        (root / "JPEGImages" / "2007_1.jpg").write_bytes(b"no image")
        write_image(root, "2007_2", thing("cat"), size=(50, 40))
        reader = VocImages(root, "train")
        assert "is not an image" in reader[0].reason
        assert reader[1].reason == "is 60 x 40, annotated as 50 x 40"

    def test_a_turned_image_is_as_its_annotations(self, root: Path) -> None:
        for size in (SIZE, SIZE[::-1]):
            write_image(root, "2007_3", thing("dog"), size=size, orientation=6)
            assert VocImages(root, "val")[0][0].size == size

    def test_names_without_files_and_lists_without_names_are_refused(self, root: Path) -> None:
        (root / "Annotations" / "2007_2.xml").unlink()
        with pytest.raises(ValueError, match=r"1 names in .*train\.txt have no image .*: 2007_2"):
            open_data(root)
        write_list(root, "train")
        with pytest.raises(ValueError, match=r"no names in .*train\.txt"):
            open_data(root)

    def test_boxes_in_shares_are_refused_and_those_from_0_noted(self, root: Path) -> None:
        write_image(root, "2007_3", thing("dog", (0.1, 0.2, 0.5, 0.9)))
        with pytest.raises(ValueError, match="no box exceeds 1"):
            open_data(root)
        write_image(root, "2007_3", thing("dog", (0, 5, 30, 35)))
        assert any("begin before pixel 1" in note for note in open_data(root).notes)

    def test_options_of_other_layouts_and_several_layouts_are_refused(self, root: Path) -> None:
        with pytest.raises(ValueError, match=r"data\.box_format is for a Hugging Face data set"):
            open_data(root, box_format="xyxy")
        write_coco(root)
        with pytest.raises(ValueError, match="has the folders of several layouts"):
            open_data(root)
        (root / "JPEGImages").rename(root / "pictures")
        with pytest.raises(
            ValueError, match=r"data\.difficult is for Pascal VOC's layout, not for"
        ):
            open_data(root, difficult="keep")
        with pytest.raises(
            ValueError, match=r"data\.difficult must be null or one of ignore, keep"
        ):
            open_data(root, difficult="drop")


def test_sizes_and_parts_of_objects(root: Path) -> None:
    size, objects = read_annotations(str(root / "Annotations" / "2007_1.xml"))
    assert size == SIZE
    assert [each.name for each in objects] == ["dog", "cat"]


def test_an_empty_mark_as_difficult_is_none(tmp_path: Path) -> None:
    write_image(tmp_path, "2007_1", thing("dog", more=difficult("")))
    write_list(tmp_path, "train", "2007_1")
    assert VocImages(tmp_path, "train").with_objects() == [0]


def test_files_in_an_encoding_that_is_not_read_are_said_to_be(root: Path) -> None:
    for path in (root / "Annotations").glob("*.xml"):
        path.write_bytes(b'<?xml version="1.0" encoding="gbk"?>' + path.read_bytes())
    with pytest.raises(ValueError, match=r"has a name; .*2007_1\.xml is not XML: .*encoding"):
        VocImages(root, "train")
