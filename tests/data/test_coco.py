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

from .coco_files import SIZES, crowd, entry, write_coco

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
    assert [told in note for note in reader.notes] == [True] * (told is not None)


def test_reasons_are_counted(tmp_path: Path) -> None:
    extra = [
        entry(70, 1, (1, 1, 5, 5), area=-16),
        entry(71, 1, (1, 1, 5, 5), area=-16),
        entry(72, 1, (1, 1, 5, 5), segmentation=[]),
        entry(73, 98, (1, 1, 5, 5)),
        entry(74, 99, (1, 1, 5, 5)),
    ]
    found = CocoImages(write_coco(tmp_path, *extra) / "annotations" / "instances_val2017.json")
    used, left_out = found.notes
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
            r"images\[0\] must have a 64-bit integer as its id, got 9223372036854775808",
        ),
        ("images", {"file_name": 7}, r"images\[0\] must have a text as its file_name, got 7"),
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


def test_run_length_codes_are_those_of_coco() -> None:
    """The same text as COCO's own code writes, for runs of any length."""
    library = pytest.importorskip("faster_coco_eval.core.mask")
    generator = np.random.default_rng(0)
    for height, width, share in [
        (1, 1, 1.0),
        (5, 7, 0.5),
        (300, 400, 0.001),
        (300, 400, 0.999),
        (97, 640, 0.0),
    ]:
        mask = (generator.random((height, width)) < share).astype(np.uint8)
        mask[height // 3 : height // 2, width // 4 : width // 2] ^= 1
        expected = library.encode(np.asfortranarray(mask))
        (found,) = encode_masks(mask[None])
        assert found == {"size": [height, width], "counts": str(expected["counts"], "ascii")}


def test_nothing_to_draw_is_an_empty_stack() -> None:
    assert draw_masks([], 4, 5).shape == (0, 4, 5)
    assert encode_masks(np.zeros((0, 4, 5), np.uint8)) == []
    assert draw_masks([crowd(1, 1)], 40, 48).sum() == 40 * 24
