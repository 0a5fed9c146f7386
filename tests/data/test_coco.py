"""COCO's annotation files: we use the annotations that COCO's own code uses, and report unusable ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import ExifTags, Image

from dgt.data.coco import CocoImages, draw_masks, encode_masks, usable_annotation
from dgt.data.image_io import BrokenImage

from .coco_files import CATEGORIES, SIZES, crowd, entry, write_coco

IMAGES = {
    number: {"width": width, "height": height}
    for number, (width, height) in enumerate(SIZES, start=1)
}


def test_categories_are_in_the_order_of_their_ids_and_every_valid_entry_is_kept(
    tmp_path: Path,
) -> None:
    found = CocoImages(write_coco(tmp_path) / "annotations" / "instances_train2017.json")
    assert [category["name"] for category in found.categories] == ["cat", "dog"]
    assert {number: [item["id"] for item in items] for number, items in found.by_image.items()} == {
        1: [1, 2],
        2: [3],
        3: [4, 5, 6],
        4: [],
    }
    assert (found.bad, found.total) == ([], 6)
    assert len(found.ground_truth()["annotations"]) == 6


BAD = [
    ({"image_id": 99}, "must have one of the file's images as its image_id, got 99"),
    ({"category_id": 4}, "must have one of the file's categories as its category_id, got 4"),
    ({"image_id": [1]}, "must have one of the file's images as its image_id, got [1]"),
    ({"image_id": 1.0}, "must have one of the file's images as its image_id, got 1.0"),
    ({"category_id": {}}, "must have one of the file's categories as its category_id, got {}"),
    ({"iscrowd": "no"}, "must have 0 or 1 as its iscrowd, got 'no'"),
    ({"ignore": "no"}, "must have 0 or 1 as its ignore, got 'no'"),
    ({"attributes": {"rotation": 9.5}, "segmentation": []}, "must have no rotation, unless"),
    ({"bbox": None, "segmentation": []}, "or a mask that can be drawn, as its bbox, got None"),
    ({"bbox": [1, 2, -3, 4], "segmentation": [[1, 1, 9, 9]]}, "as its bbox, got [1, 2, -3, 4]"),
    ({"bbox": [1, 2, 3], "segmentation": [list(range(999))]}, "as its bbox, got [1, 2, 3]"),
    ({"bbox": None, "segmentation": {"size": [40, 48], "counts": [1920]}}, "with a pixel"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_what_cannot_be_used_is_named(change: dict[str, Any], reason: str) -> None:
    whole = entry(11, 1, (4, 6, 24, 30))
    assert usable_annotation(whole, IMAGES, {3, 7}) == (whole, [])
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        usable_annotation({**whole, **change}, IMAGES, {3, 7})
    assert len(str(raised.value)) < 250


def test_an_object_to_ignore_is_as_a_crowd() -> None:
    marked = entry(11, 1, (4, 6, 24, 30), ignore=1)
    assert usable_annotation(marked, IMAGES, {3, 7})[0]["iscrowd"] == 1


BOX = [4, 6, 20, 24]
RECTANGLE = [[4, 6, 24, 6, 24, 30, 4, 30]]
CODE = encode_masks(draw_masks([{"segmentation": RECTANGLE}], 40, 48))[0]
USED = [
    ({"segmentation": []}, "is missing"),
    ({"segmentation": [[]]}, "is missing"),
    ({"segmentation": None}, "is missing"),
    ({"segmentation": ...}, "is missing"),
    ({"segmentation": [[1, 1, 9, 9]]}, "cannot be drawn"),
    ({"segmentation": {"size": [9, 9], "counts": [81]}}, "cannot be drawn"),
    ({"segmentation": {"size": [40, 48], "counts": [1921, -1]}}, "cannot be drawn"),
    ({"segmentation": {"size": [40, 48], "counts": "01"}}, "cannot be drawn"),
    ({"segmentation": {"size": [40, 48]}}, "cannot be drawn"),
    ({"segmentation": [*RECTANGLE, [5, 5]]}, "without a part"),
    ({"segmentation": [[1, 1, 9, 1, 9], *RECTANGLE]}, "without a part"),
    ({"segmentation": [[1, 1, 9, 1, 9, float("nan")], *RECTANGLE]}, "without a part"),
    ({"segmentation": ["a", *RECTANGLE, None]}, "without a part"),
    ({"segmentation": RECTANGLE[0]}, None),
    ({"segmentation": CODE}, None),
    ({"bbox": ...}, "box of their mask"),
    ({"bbox": [24, 30, -20, -24]}, "box of their mask"),
    ({"bbox": [1, 2, 3, float("inf")]}, "box of their mask"),
    ({"bbox": None, "segmentation": CODE}, "box of their mask"),
    ({"area": ...}, "area of their mask"),
    ({"area": None}, "area of their mask"),
    ({"area": -480.0}, "area of their mask"),
    ({"area": float("nan"), "segmentation": CODE}, "area of their mask"),
    ({"area": "480"}, "area of their mask"),
    ({"area": 1e11}, "area of their mask"),
    ({"bbox": [0, 0, 0, 0]}, "box of their mask"),
    ({"bbox": [9, 9, 5, 5], "attributes": {"rotation": 90}}, "box of their mask"),
    ({"attributes": {"rotation": 0.0}}, None),
    ({"ignore": 0}, None),
    ({"iscrowd": None}, None),
    ({"iscrowd": False}, None),
    ({"iscrowd": ...}, None),
]


@pytest.mark.parametrize(("change", "told"), USED)
def test_an_object_stays_as_far_as_the_rest_says_what_it_is(
    tmp_path: Path, change: dict[str, Any], told: str | None
) -> None:
    whole = {**entry(70, 4, (4, 6, 24, 30)), "image_id": 1}
    given = {key: value for key, value in (whole | change).items() if value is not ...}
    used, changed = usable_annotation(given, IMAGES, {3, 7})
    assert used["bbox"] == BOX
    assert used["area"] == 480
    assert used["iscrowd"] == 0
    assert np.array_equal(draw_masks([used], 40, 48), draw_masks([whole], 40, 48))
    assert told in changed[0] if told else not changed
    reader = CocoImages(write_coco(tmp_path, given) / "annotations" / "instances_val2017.json")
    assert (reader.bad, len(reader.by_image[1])) == ([], 3)
    *notes, twice, ignored, thin = reader.notes
    assert "1 annotations" in twice  # it has the box of annotation 1
    assert "2 of 7 annotations" in ignored  # 3 and 5
    assert "1 objects" in thin  # annotation 6
    assert [told in note for note in notes] == [True] * (told is not None)


@pytest.mark.parametrize(
    ("box", "mask", "told"),
    [
        ([40, 30, 20, 4], None, "cut at the border"),
        ([-3, -3, 10, 10], None, "cut at the border"),
        ([500, 6, 20, 24], RECTANGLE, "box of their mask"),
        ([0, -90, 20, 24], CODE, "box of their mask"),
        (BOX, [[0.1, 0.2, 0.5, 0.2, 0.5, 0.9]], "cannot be drawn"),
        (BOX, [[90, 50, 99, 50, 99, 70]], "cannot be drawn"),
        ([40, 8, 8.5, 30], None, None),
    ],
)
def test_what_lies_outside_of_the_image_is_said(
    box: list[float], mask: Any, told: str | None
) -> None:
    x, y, width, height = box
    own = [[x, y, x + width, y, x + width, y + height, x, y + height]]
    given = {**entry(70, 1, (4, 6, 24, 30)), "bbox": box, "segmentation": mask or own}
    used, changed = usable_annotation(given, IMAGES, {3})
    assert [told in change for change in changed] == [True] * (told is not None)
    assert draw_masks([used], 40, 48).any()
    x, y, width, height = used["bbox"]
    assert min(x, y) >= 0
    assert x + width <= 49
    assert y + height <= 41


@pytest.mark.parametrize(
    ("box", "mask", "reason"),
    [
        ([48, 0, 9, 9], [], "inside of its image"),
        ([0, -20, 9, 20], [[0, -20, 9, -20, 9, 0]], "inside of its image"),
        ([30, 20, 9, 9], [[4, 6, 9, 6, 9, 9]], "meets its mask"),
    ],
)
def test_a_box_without_a_pixel_of_its_object_is_refused(
    box: list[float], mask: Any, reason: str
) -> None:
    given = {**entry(70, 1, (4, 6, 24, 30)), "bbox": box, "segmentation": mask}
    with pytest.raises(ValueError, match=reason):
        usable_annotation(given, IMAGES, {3})


@pytest.mark.parametrize(
    ("boxes", "masks", "told"),
    [
        ([[0.3, 0.2, 0.4, 0.5], [0, 0, 1, 1]], [], "in shares of their image"),
        ([[0.5, 0.5, 0.1, 0.1]], [[[10, 10, 30, 10, 30, 30]]], "in shares of their image"),
        ([[20, 15, 40, 35], [30, 10, 47, 39]], [], "seem to be corners"),
        ([[5, 5, 9, 9]], [[[5, 5, 9, 5, 9, 9]]], "seem to be corners"),
        ([[24, 18, 20, 8]], [[[14, 14, 34, 14, 34, 22, 14, 22]]], "outside of their boxes"),
        ([[30, 5, 9, 9]], [{"size": [40, 48], "counts": [30, 9, 1881]}], "outside of their boxes"),
    ],
)
def test_boxes_in_other_units_are_refused_as_a_file(
    tmp_path: Path, boxes: list[list[float]], masks: list[Any], told: str
) -> None:
    entries = [
        {"id": n, "image_id": 1, "category_id": 3, "iscrowd": 0, "bbox": box}
        | ({"segmentation": masks[n]} if masks else {})
        for n, box in enumerate(boxes)
    ]
    path = change_file(tmp_path, annotations=entries)
    with pytest.raises(ValueError, match=told):
        CocoImages(path)


def test_objects_that_are_there_twice_are_said(tmp_path: Path) -> None:
    twice = [entry(1, 1, (4, 6, 24, 30)), entry(2, 1, (4, 6, 24, 30)), entry(3, 2, (4, 6, 24, 30))]
    (note,) = (each for each in notes_of(tmp_path, twice) if "repeat" in each)
    assert note.startswith("1 annotations of ")
    assert not any("repeat" in each for each in notes_of(tmp_path / "once", twice[1:]))


def notes_of(folder: Path, annotations: list[dict[str, Any]]) -> list[str]:
    folder.mkdir(exist_ok=True)
    return CocoImages(change_file(folder, annotations=annotations)).notes


def test_an_image_of_objects_thinner_than_a_pixel_is_not_one_to_train_on(tmp_path: Path) -> None:
    thin = [entry(1, 1, (4, 6, 4.5, 30)), entry(2, 2, (39.2, 0, 44, 9)), entry(3, 3, (0, 0, 9, 9))]
    found = CocoImages(change_file(tmp_path, annotations=thin))
    assert found.with_objects() == [2]
    assert "2 objects" in found.notes[-1]


def test_a_file_is_found_however_the_accents_of_its_name_are_composed(tmp_path: Path) -> None:
    for stored, named in (("caf\u00e9.png", "cafe\u0301.png"), ("A\u030a.png", "\u00c5.png")):
        Image.new("RGB", (8, 6)).save(tmp_path / stored)
        image = {"id": 1, "file_name": named, "width": 8, "height": 6}
        path = change_file(tmp_path / f"file of {stored}", images=[image], annotations=[])
        sample = CocoImages(path, tmp_path)[0]
        assert sample[0].size == (8, 6)


def test_reasons_are_counted(tmp_path: Path) -> None:
    extra = [
        entry(70, 1, (1, 1, 5, 5), area=-16),
        entry(71, 1, (1, 1, 5, 5), area=-16),
        entry(72, 1, (1, 1, 5, 5), segmentation=[]),
        entry(73, 98, (1, 1, 5, 5)),
        entry(74, 99, (1, 1, 5, 5)),
    ]
    found = CocoImages(write_coco(tmp_path, *extra) / "annotations" / "instances_val2017.json")
    used, left_out, *_ = found.notes
    assert "2 with the area of their mask" in used
    assert "1 with their box for a mask" in used
    assert "2 of 11 annotations" in left_out
    assert "2 must have one of the file's images as its image_id" in left_out


def change_file(root: Path, **sections: Any) -> Path:
    file = write_coco(root) / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sections))
    return file


@pytest.mark.parametrize(("name", "above"), [("dog", "none"), ("animals", None), ("animals", "")])
def test_a_root_without_annotations_is_no_class(
    tmp_path: Path, name: str, above: str | None
) -> None:
    root = {"id": 0, "name": name, "supercategory": above}
    others = [
        {"id": 7, "name": "dog", "supercategory": name},
        {"id": 3, "name": "cat", "supercategory": name},
    ]
    found = CocoImages(change_file(tmp_path, categories=[root, *others]))
    assert (found.class_names, found.category_ids) == (("cat", "dog"), (3, 7))
    assert f"category 0 {name!r}" in found.notes[0]


def test_of_two_categories_of_one_name_the_one_with_annotations_is_a_class(tmp_path: Path) -> None:
    categories = [{"id": 9, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
    found = CocoImages(change_file(tmp_path, categories=categories))
    assert (found.class_names, found.category_ids) == (("cat", "dog"), (3, 7))


def test_a_root_with_annotations_is_a_class(tmp_path: Path) -> None:
    root = {"id": 3, "name": "cat", "supercategory": "none"}
    found = CocoImages(
        change_file(tmp_path, categories=[root, {"id": 7, "name": "dog", "supercategory": "cat"}])
    )
    assert found.class_names == ("cat", "dog")


def test_a_root_that_is_a_class_of_the_training_is_one(tmp_path: Path) -> None:
    root = {"id": 1, "name": "animal", "supercategory": "none"}
    others = [{**each, "supercategory": "animal"} for each in CATEGORIES]
    file = change_file(tmp_path, categories=[root, *others])
    assert CocoImages(file).class_names == ("cat", "dog")
    assert CocoImages(file, class_names=["animal", "cat"]).class_names == ("animal", "cat", "dog")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    file = write_coco(tmp_path) / "annotations" / "instances_val2017.json"
    file.write_bytes(file.read_text().encode(encoding))
    assert len(CocoImages(file)) == 4


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_turned_photograph_is_as_its_annotations_are(tmp_path: Path, is_stored: bool) -> None:
    folder = write_coco(tmp_path)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    size = (48, 40) if is_stored else (40, 48)
    Image.new("RGB", size).save(folder / "val2017" / "000000000001.png", exif=exif)
    file = folder / "annotations" / "instances_val2017.json"
    image, *_ = CocoImages(file, folder / "val2017")[0]
    assert image.size == (48, 40)


@pytest.mark.parametrize(("orientation", "side"), [(2, 40), (3, 40), (4, 40), (6, 48), (5, 48)])
def test_what_boxes_of_a_turned_photograph_are_of_is_not_guessed(
    tmp_path: Path, orientation: int, side: int
) -> None:
    folder = write_coco(tmp_path)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = folder / "annotations" / "instances_val2017.json"
    for image in (content := json.loads(file.read_text()))["images"]:
        image["height"] = side
        path = folder / "val2017" / image["file_name"]
        Image.new("RGB", (image["width"], side)).save(path, exif=exif)
    file.write_text(json.dumps(content))
    reader = CocoImages(file, folder / "val2017")
    found = [reader[index] for index in range(len(reader)) if reader.images[index]["width"] == 48]
    assert found
    for of_one in found:
        assert isinstance(of_one, BrokenImage)
        assert "do not show whether its boxes are of the upright image" in of_one.reason


@pytest.mark.parametrize(
    ("area", "used"), [(0, 2500.0), (1.0, 2500.0), (2401, 2401), (900, 2500.0), (4000, 4000)]
)
def test_an_area_that_contradicts_its_mask_is_that_of_the_mask(area: float, used: float) -> None:
    images = {1: {"id": 1, "width": 100, "height": 100}}
    mask = [[0, 0, 50, 0, 50, 50, 0, 50, 0, 99, 0, 0]]
    given = {**entry(1, 3, (0, 0, 50, 99)), "image_id": 1, "segmentation": mask, "area": area}
    found, changed = usable_annotation(given, images, {3})
    assert found["area"] == pytest.approx(used, rel=0.02)
    assert bool(changed) == (area != used)
    alone, told = usable_annotation({**given, "segmentation": None}, images, {3})
    assert alone["area"] == pytest.approx(4950 if area <= 1 else area)  # a mask may fill less
    assert len(told) == 1 + (area <= 1)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is not in COCO format: its list 'images'"),
        (
            '{"images": [{"id": 1, "file_name": "a", "width": 0, "height": 3}], "annotations": [], "categories": []}',
            r"images\[0\] must have an integer above 0 as its width, got 0",
        ),
        (
            '{"images": [], "annotations": [], "categories": []}',
            "its list 'images' is missing or empty",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        CocoImages(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("section", "change", "sentence"),
    [
        ("images", {"id": "a"}, r"images\[0\] must have a 64-bit integer as its id, got 'a'"),
        (
            "images",
            {"id": 2**63},
            r"images\[0\] must have a 64-bit integer as its id, got 92233720",
        ),
        ("images", {"file_name": 7}, r"images\[0\] must have a text as its file_name, got 7"),
        (
            "images",
            {"file_name": f"{2:012d}.png"},
            "two entries of 'images' have the file_name '000000000002.png'",
        ),
        ("categories", {"name": None}, r"categories\[0\] must have a text as its name, got None"),
        ("categories", {"name": "cat"}, "two entries of 'categories' have the name 'cat'"),
    ],
)
def test_ids_are_integers_and_names_are_texts_of_their_own(
    tmp_path: Path, section: str, change: dict[str, Any], sentence: str
) -> None:
    file = write_coco(tmp_path) / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content[section][0].update(change)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence):
        CocoImages(file)


def test_missing_files_and_double_ids_of_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.json"):
        CocoImages(tmp_path / "a.json")
    file = write_coco(tmp_path, entry(1, 1, (1, 1, 5, 5))) / "annotations/instances_val2017.json"
    assert len(CocoImages(file).by_image[1]) == 3  # nobody needs the ids of annotations
    content = json.loads(file.read_text())
    content["images"].append(content["images"][0])
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="two entries of 'images' have the id 1"):
        CocoImages(file)


@given(
    hnp.arrays(
        np.uint8,
        st.tuples(st.just(2), st.integers(1, 9), st.integers(1, 9)),
        elements=st.integers(0, 1),
    )
)
def test_masks_survive_their_run_length_codes(masks: np.ndarray) -> None:
    _, height, width = masks.shape
    codes = encode_masks(masks)
    assert json.loads(json.dumps(codes)) == codes
    assert np.array_equal(
        draw_masks([{"segmentation": code} for code in codes], height, width), masks
    )
    for code in codes:
        whole = {**entry(1, 1, (0, 0, 1, 1)), "segmentation": code}
        assert usable_annotation(whole, {1: {"width": width, "height": height}}, {3})[1] == []


def test_nothing_to_draw_is_an_empty_stack() -> None:
    assert draw_masks([], 4, 5).shape == (0, 4, 5)
    assert encode_masks(np.zeros((0, 4, 5), np.uint8)) == []
    assert draw_masks([crowd(1, 1)], 40, 48).sum() == 40 * 24
