"""Images with label maps: both layouts, batches as functions of (seed, epoch, item), wrong files named."""

from __future__ import annotations

import shutil
import string
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dgt.data.image_io import BrokenImage, BrokenImagesError
from dgt.data.label_maps import LabelMapFolder, read_class_names
from dgt.data.segmentation import (
    SegmentationAugmentation,
    SegmentationData,
    SegmentationTest,
    choose_crop,
    distort_colors,
    fitting_size,
)

CLASSES = ["wall", "floor", "lamp"]
LETTERS = string.ascii_lowercase[:21]


def save(folder: Path, split: str, name: str, labels: np.ndarray, maps: str = "labels") -> None:
    """An image whose red channel is 60 times its label, as PNG, and its label map."""
    (folder / "images" / split).mkdir(parents=True, exist_ok=True)
    (folder / maps / split).mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((*labels.shape, 3), dtype=np.uint8)
    pixels[..., 0] = np.where(labels == 255, 0, 60 * labels)
    Image.fromarray(pixels).save(folder / "images" / split / f"{name}.png")
    Image.fromarray(labels).save(folder / maps / split / f"{name}.png")


def some_labels(rng: np.random.Generator, height: int = 48, width: int = 64) -> np.ndarray:
    """Rectangles of three classes, and some unlabeled pixels."""
    labels = np.zeros((height, width), dtype=np.uint8)
    labels[height // 3 :, : width // 2] = 1
    labels[: height // 4, width // 3 :] = 2
    labels[rng.integers(height), rng.integers(width)] = 255
    return labels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten training and three validation images in the plain layout."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for index in range(count):
            save(tmp_path, split, f"{index:02d}", some_labels(rng))
    return tmp_path


def open_data(root: Path | None, **options: object) -> SegmentationData:
    """A data module of small crops, set up."""
    small = {
        "classes": CLASSES,
        "image_size": 32,
        "scale": (64, 48),
        "batch_size": 4,
        "num_workers": 0,
    }
    data = SegmentationData(None if root is None else str(root), **{**small, **options})
    data.setup()
    return data


class TestReading:
    def test_the_plain_layout(self, folder: Path) -> None:
        reader = LabelMapFolder(folder, "train", CLASSES)
        assert len(reader) == 10
        image, labels = reader[3]
        assert image.size == (64, 48)
        assert set(np.unique(labels)) == {0, 1, 2, 255}
        assert np.array_equal(np.asarray(image)[..., 0], np.where(labels == 255, 0, 60 * labels))

    def test_in_ade20ks_layout_zero_is_ignored_and_the_rest_moves_down(
        self, tmp_path: Path
    ) -> None:
        stored = np.array([[0, 1], [2, 3]], dtype=np.uint8).repeat(20, 0).repeat(20, 1)
        save(tmp_path, "training", "ADE_train_1", stored, "annotations")
        labels = LabelMapFolder(tmp_path, "training", CLASSES)[0][1]
        assert labels[::20, ::20].tolist() == [[255, 0], [1, 2]]
        kept = LabelMapFolder(tmp_path, "training", [*CLASSES, "door"], zero_is_ignored=False)[0][1]
        assert np.array_equal(kept, stored)

    def test_255_is_ignored_in_ade20ks_layout_too(self, tmp_path: Path) -> None:
        save(tmp_path, "training", "a", np.array([[255, 1], [0, 3]], dtype=np.uint8), "annotations")
        assert LabelMapFolder(tmp_path, "training", CLASSES)[0][1].tolist() == [[255, 0], [255, 2]]

    def test_a_palette_is_read_by_its_numbers(self, folder: Path) -> None:
        path = folder / "labels" / "train" / "00.png"
        numbers = np.asarray(Image.open(path))
        image = Image.fromarray(numbers)
        image.putpalette([7] * 768)
        image.save(path)
        assert np.array_equal(LabelMapFolder(folder, "train", CLASSES)[0][1], numbers)

    def test_splits_are_found_by_their_usual_names(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        for split in ("training", "validation"):
            for name in "abcd":
                save(tmp_path, split, name, 1 + some_labels(rng).clip(max=2), "annotations")
        (tmp_path / "classes.txt").write_text("wall\nfloor\nlamp\n\n")
        data = open_data(tmp_path, classes=None)
        assert data.class_names == tuple(CLASSES)
        assert [data.broken_images[part].split for part in ("train", "val")] == [
            "training",
            "validation",
        ]

    def test_classes_of_ade20ks_own_list(self, tmp_path: Path) -> None:
        lines = [
            "Idx\tRatio\tTrain\tVal\tStuff\tName",
            "1\t0.2\t1\t1\t1\twall",
            "2\t0.1\t1\t1\t1\tbuilding, edifice",
        ]
        (tmp_path / "objectInfo150.txt").write_text("\n".join(lines))
        assert read_class_names(tmp_path) == ("wall", "building")

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("wall\n\nlamp\n", "line 2 is empty"),
            ("\nwall\nlamp\n", "line 1 is empty"),
            ("1 wall\n2 lamp\n", "numbers are others, as of '1 wall'"),
            ("1: lamp\n0: wall\n", "numbers are others"),
            ("wall 0\nlamp 1\n", "numbers stand behind their names, as of 'wall 0'"),
            ("traffic light, 2\nlamp, 1\n", "numbers stand behind"),
        ],
    )
    def test_classes_whose_lines_may_be_other_labels(
        self, tmp_path: Path, text: str, told: str
    ) -> None:
        (tmp_path / "classes.txt").write_text(text)
        with pytest.raises(ValueError, match=told):
            read_class_names(tmp_path)
        for names in (("10", "5", "1 cent"), ("class 0", "class 1"), ("Boeing 737", "Airbus 320")):
            (tmp_path / "classes.txt").write_text("\n".join(names))
            assert read_class_names(tmp_path) == names

    def test_a_name_that_is_no_class_is_refused(self, folder: Path) -> None:
        """Else all names would be those of the labels one further."""
        names = ["__ignore__", "_background_", "lamp"]
        with pytest.raises(ValueError, match=r"^data\.classes must not have '__ignore__'"):
            LabelMapFolder(folder, "train", names)

    @pytest.mark.parametrize("listed", ["wall\nlamp\nfloor\n", "wall\nlamp\n"])
    def test_other_classes_than_the_root_lists_are_refused(self, folder: Path, listed: str) -> None:
        """As those of a recipe are that was written for other data."""
        (folder / "classes.txt").write_text(listed)
        with pytest.raises(ValueError, match=r"^data\.classes names 3 .* lists . \(wall, lamp"):
            open_data(folder)
        (folder / "classes.txt").write_text("wall\nfloor\nlampe\n")
        renamed = ["Wand", "Lampe", "Boden"]
        assert open_data(folder, classes=renamed).class_names == tuple(renamed)

    def test_one_class_alone_is_refused(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"data\.classes must be 2 to 255 different names"):
            LabelMapFolder(folder, "train", ["lane"])

    def test_classes_written_with_a_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfwall\r\nfloor\r\n")
        assert read_class_names(tmp_path) == ("wall", "floor")

    def test_camvid(self, shared_data: Path) -> None:
        if not (shared_data / "camvid").is_dir():
            pytest.skip("no CamVid in ../shared/data")
        data = open_data(
            shared_data / "camvid", classes=[str(label) for label in range(11)], scale=(480, 360)
        )
        assert [len(data.datasets[part]) for part in ("train", "val")] == [367, 101]
        images, targets = next(iter(data.train_dataloader()))
        assert images.shape == (4, 3, 32, 32)
        assert set(targets.labels.unique().tolist()) <= {*range(11), 255}


def read_all(folder: Path, **options: object) -> None:
    """Open both splits and read the validation images."""
    list(open_data(folder, **options).val_dataloader())


class TestWrongFiles:
    def fails(self, folder: Path, message: str, **options: object) -> None:
        """Opening and reading raises a ValueError with the message."""
        with pytest.raises(ValueError, match=message):
            read_all(folder, **options)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_label_out_of_range(self, folder: Path, workers: int) -> None:
        save(folder, "val", "01", np.full((48, 64), 7, dtype=np.uint8))
        message = r"labels/val/01.png: label 7 is not one of the 3 classes$"
        self.fails(folder, message, num_workers=workers)

    def test_a_label_out_of_range_in_ade20ks_layout(self, tmp_path: Path) -> None:
        save(tmp_path, "training", "a", np.full((40, 40), 4, dtype=np.uint8), "annotations")
        message = r"a\.png: label 4 is not one of the 3 classes$"
        self.fails(tmp_path, message, train_split="training", val_split="training")

    def test_another_size_than_the_image(self, folder: Path) -> None:
        Image.fromarray(np.zeros((20, 30), dtype=np.uint8)).save(
            folder / "labels" / "val" / "02.png"
        )
        message = r"labels/val/02.png: the label map has 30 x 20 pixels, but its image .*images/val/02.png has 64 x 48"
        self.fails(folder, message)

    def test_two_classes_of_one_name(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"data\.classes must be .*, got wall, floor, wall"):
            open_data(folder, classes=["wall", "floor", "wall"])

    @pytest.mark.parametrize(("kind", "told"), [("uint16", "I;16"), ("rgb", "RGB")])
    def test_label_maps_of_another_kind(self, folder: Path, kind: str, told: str) -> None:
        path = folder / "labels" / "val" / "00.png"
        if kind == "uint16":
            Image.fromarray(np.zeros((48, 64), dtype=np.uint16)).save(path)
        else:
            Image.new(kind.upper(), (64, 48)).save(path)
        wanted = r"expected a lossless .* one 8-bit channel \(gray or palette\)"
        message = rf"labels/val/00.png: {wanted}, got {told} in PNG$"
        self.fails(folder, message)

    def test_a_palette_of_grays_that_are_other_labels(self, folder: Path) -> None:
        """Reducing colors sorts them anew: what was 0, 1 and 2 are 2, 1 and 0."""
        path = folder / "labels" / "val" / "00.png"
        labels = np.array([[0, 1, 1, 2]] * 48, dtype=np.uint8).repeat(16, axis=1)
        Image.fromarray(labels).quantize(3).save(path)
        self.fails(folder, r"labels/val/00\.png: its palette has grays that may be the labels")
        Image.fromarray(labels).convert("P").save(path)
        read_all(folder)
        black_and_white = Image.fromarray(labels.clip(max=1))
        black_and_white.putpalette([0, 0, 0, 255, 255, 255])
        black_and_white.save(path)
        read_all(folder)

    def test_gray_of_four_bits(self, folder: Path) -> None:
        def chunk(kind: bytes, content: bytes) -> bytes:
            return (
                struct.pack(">I", len(content))
                + kind
                + content
                + struct.pack(">I", zlib.crc32(kind + content))
            )

        header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 48, 4, 0, 0, 0, 0))
        pixels = chunk(b"IDAT", zlib.compress(b"\0" * 33 * 48))  # a filter and 32 bytes per row
        (folder / "labels" / "val" / "00.png").write_bytes(
            b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")
        )
        self.fails(
            folder,
            r"labels/val/00.png: expected .* one 8-bit channel .*, got L with fewer bits in PNG$",
        )

    @pytest.mark.parametrize(
        ("name", "options", "told"),
        [
            ("00.jpg", {}, "L in JPEG"),
            ("00.avif", {}, "L in AVIF"),
            ("00.jp2", {}, "L in JPEG2000"),
            ("00.tif", {"compression": "jpeg"}, r"L in TIFF \(jpeg\)"),
        ],
    )
    def test_label_maps_that_may_have_lost_their_numbers(
        self, folder: Path, name: str, options: dict[str, str], told: str
    ) -> None:
        (folder / "labels" / "val" / "00.png").unlink()
        Image.new("L", (64, 48)).save(folder / "labels" / "val" / name, **options)
        self.fails(
            folder,
            rf"labels/val/{name}: expected a lossless label map, such as PNG, .* got {told}$",
        )

    def test_palettes_that_number_colors_anew_are_refused(self, folder: Path) -> None:
        black, red, green = [0, 0, 0], [128, 0, 0], [0, 128, 0]
        for name, palette in (("01", [*black, *red, *green]), ("02", [*black, *green, *red])):
            path = folder / "labels" / "train" / f"{name}.png"
            image = Image.fromarray(np.asarray(Image.open(path)))
            image.putpalette(palette)
            image.save(path)
        told = r"02\.png: its palette has another color for number 1 than that of .*01\.png"
        self.fails(folder, told)
        self.fails(folder, "number 1 than", classes=CLASSES[:2])
        image.putpalette([*black, *red, *green, 9, 9, 9])  # of what is no class
        image.save(path)
        read_all(folder)

    def test_missing_pairs(self, folder: Path) -> None:
        (folder / "labels" / "train" / "03.png").unlink()
        self.fails(
            folder,
            r"^1 files in .*images/train and .*labels/train have no .*: .*images/train/03.png$",
        )
        (folder / "images" / "train" / "03.png").rename(folder / "images" / "train" / "33.png")
        save(folder, "train", "03", np.zeros((48, 64), dtype=np.uint8))
        (folder / "images" / "train" / "33.png").unlink()
        (folder / "images" / "train" / "04.png").unlink()
        self.fails(
            folder,
            r"^1 files in .*images/train and .*labels/train have no .*: .*labels/train/04.png$",
        )

    def test_two_images_of_one_name(self, folder: Path) -> None:
        shutil.copy(folder / "images" / "val" / "00.png", folder / "images" / "val" / "00.jpg")
        self.fails(folder, r"two files have the same name: .*00.jpg and .*00.png")

    def test_nothing_there(self, folder: Path, tmp_path: Path) -> None:
        for place in ("images", "labels"):
            (folder / place / "empty").mkdir()
        self.fails(folder, r"no images in .*images/empty", val_split="empty")
        with pytest.raises(FileNotFoundError, match=r"no folder 'test'; it has: empty, train, val"):
            open_data(folder, val_split="test")
        with pytest.raises(FileNotFoundError, match=r"data\.root: folder .* does not exist"):
            open_data(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"classes of .* list them in data.classes"):
            open_data(folder, classes=None)
        (folder / "annotations").mkdir()
        with pytest.raises(ValueError, match="has the folders of several layouts"):
            open_data(folder)
        (folder / "images").rename(folder / "pictures")
        with pytest.raises(FileNotFoundError, match="expected the folders images and annotations"):
            open_data(folder)

    def test_unreadable_files_are_left_out_and_counted(self, folder: Path) -> None:
        (folder / "labels" / "val" / "00.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
        data = open_data(folder, max_broken_share=0.5)
        kept = [image for images, _ in data.val_dataloader() for image in images]
        assert len(kept) == 2
        assert list(data.broken_images["val"].broken) == [str(folder / "labels" / "val" / "00.png")]
        with pytest.raises(BrokenImagesError, match="1 of the 3 images of split 'val' cannot"):
            list(open_data(folder).val_dataloader())
        assert isinstance(LabelMapFolder(folder, "val", CLASSES)[0], BrokenImage)


class TestBatches:
    def test_workers_change_nothing_and_epochs_differ(self, folder: Path) -> None:
        passes = []
        for workers in (0, 2):
            loader = open_data(folder, num_workers=workers).train_dataloader()
            passes.append(
                [
                    [(images.clone(), targets.labels.clone()) for images, targets in loader]
                    for _ in range(2)
                ]
            )
        for one, other in zip(passes[0], passes[1], strict=True):
            for (images, labels), (same_images, same_labels) in zip(one, other, strict=True):
                assert torch.equal(images, same_images)
                assert torch.equal(labels, same_labels)
        assert not torch.equal(passes[0][0][0][0], passes[0][1][0][0])

    def test_whole_images_of_several_shapes(self, tmp_path: Path) -> None:
        shapes = [(48, 64), (64, 40), (50, 50), (32, 64)]
        for number, shape in enumerate(shapes):
            save(tmp_path, "train", str(number), np.full(shape, number % 3, np.uint8))
            save(tmp_path, "val", str(number), np.full(shape, number % 3, np.uint8))
        whole = SegmentationAugmentation(1.0, 1.0, 0.75, 0.5, 0.0)
        data = open_data(tmp_path, image_size=64, scale=(64, 64), augmentation=whole)
        ((_, targets),) = data.train_dataloader()
        seen = sorted(
            (int(each.min()), *size)
            for each, size in zip(targets.labels, targets.sizes.tolist(), strict=True)
        )
        expected = [(0, 48, 64), (0, 32, 64), (1, 64, 40), (2, 64, 64)]  # scaled to the frame
        assert seen == sorted(expected)

    def test_small_images_are_padded_with_nothing(self, folder: Path) -> None:
        shrink = SegmentationAugmentation(0.8, 0.8, 1.0, 0.5, 0.0)
        images, targets = next(
            iter(open_data(folder, image_size=64, augmentation=shrink).train_dataloader())
        )
        assert images.shape == (4, 3, 64, 64)
        assert targets.sizes.tolist() == [[38, 51]] * 4
        assert not images[:, :, 38:].any()
        assert not images[:, :, :, 51:].any()
        assert (targets.labels[:, 38:] == 255).all()
        assert (targets.labels[:, :, 51:] == 255).all()

    def test_image_and_labels_move_together(self, folder: Path) -> None:
        moved = SegmentationAugmentation(1.0, 1.0, 0.75, 0.5, 0.0)
        for images, targets in open_data(
            folder, augmentation=moved, mean=(0, 0, 0), std=(1, 1, 1)
        ).train_dataloader():
            labels = torch.where(targets.labels == 255, 0, targets.labels)
            assert torch.equal((images[:, 0] * 255 / 60).round().to(torch.uint8), labels)

    def test_validation_keeps_size_and_order(self, folder: Path) -> None:
        save(folder, "val", "01", np.zeros((50, 70), dtype=np.uint8))
        (images, labels), *_ = list(open_data(folder).val_dataloader())
        assert [tuple(image.shape) for image in images] == [(3, 48, 64), (3, 50, 70), (3, 48, 64)]
        assert [tuple(x.shape) for x in labels] == [(48, 64), (50, 70), (48, 64)]

    def test_scenes_need_no_files(self) -> None:
        data = open_data(
            None, classes=None, dataset="scenes", train_size=8, val_size=3, scale=(32, 32)
        )
        assert data.class_names[:2] == ("background", "disc")
        images, targets = next(iter(data.train_dataloader()))
        assert images.shape == (4, 3, 32, 32)
        assert targets.labels.max() <= 8

    def test_a_batch_of_one_cannot_train(self, folder: Path) -> None:
        data = open_data(folder, batch_size=1)
        assert len(list(data.val_dataloader())) == 3
        with pytest.raises(ValueError, match=r"data\.batch_size must be at least 2, got 1"):
            data.train_dataloader()


class TestTransforms:
    @given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0.5, 2.0))
    @settings(max_examples=60)
    def test_the_fitting_size_fits_and_keeps_the_shape(
        self, height: int, width: int, ratio: float
    ) -> None:
        size = fitting_size((height, width), (2048, 512), ratio)
        assert min(size) >= 32
        if min(size) > 32:
            assert max(size) <= 2048 * ratio
            assert min(size) <= 512 * ratio
            assert max(size) >= 2048 * ratio - 2 or min(size) >= 512 * ratio - 2
            assert size[0] / height == pytest.approx(size[1] / width, abs=1 / min(height, width))

    def test_mmsegmentations_sizes(self) -> None:
        assert fitting_size((512, 683), (2048, 512)) == (512, 683)
        assert fitting_size((683, 512), (2048, 512)) == (683, 512)
        assert fitting_size((600, 3000), (2048, 512)) == (410, 2048)
        assert fitting_size((256, 256), (2048, 512), 1.75) == (896, 896)

    def test_a_crop_avoids_one_class_alone(self) -> None:
        labels = torch.zeros(64, 256, dtype=torch.uint8)
        labels[:, 240:] = 1  # in few places a crop of 32 has a quarter of it
        shares = []
        for limit in (0.75, 1.0):
            places = [choose_crop(labels, 32, limit) for _ in range(60)]
            assert all(place[0] <= 32 and place[2:] == [32, 32] for place in places)
            shares.append(
                [
                    float((labels[:, left : left + 32] == 1).float().mean())
                    for _, left, _, _ in places
                ]
            )
        assert np.mean(np.array(shares[0]) > 0.25) > 2.5 * np.mean(np.array(shares[1]) > 0.25)

    def test_distortion_changes_colors_with_its_probability(self) -> None:
        image = torch.randint(0, 256, (3, 8, 9), dtype=torch.uint8)
        changed = distort_colors(image, 1.0)
        assert changed.dtype == torch.uint8
        assert not torch.equal(changed, image)
        assert torch.equal(distort_colors(image, 0.0), image)

    def test_distortion_never_mixes_gray_with_color(self) -> None:
        gray = torch.full((3, 4, 4), 100, dtype=torch.uint8)
        for _ in range(20):
            changed = distort_colors(gray, 0.5)
            assert int(changed.max()) - int(changed.min()) <= 2  # all channels change alike


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SegmentationData, {"root": "a", "scale": (512, 16)}, "scale must be at least 32, got 16"),
        (SegmentationTest, {"scales": (1.0, -1.0)}, r"data\.test\.scales must be at least one"),
        (
            SegmentationTest,
            {"window": 16},
            r"data\.test\.window must be null or at least 32, got 16",
        ),
        (SegmentationTest, {"window": 64, "stride": 65}, r"data\.test\.stride must be .*window"),
        (SegmentationAugmentation, {"min_ratio": 0.0}, r"data\.augmentation.*ratio"),
        (SegmentationAugmentation, {"min_ratio": 2.0, "max_ratio": 1.0}, "augmentation.*ratio"),
        (SegmentationAugmentation, {"flip": 1.5}, r"data\.augmentation.*flip"),
    ],
)
def test_bad_arguments(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_without_a_root_nothing_is_read() -> None:
    with pytest.raises(ValueError, match=r"data\.root: expected a folder with images/SPLIT"):
        SegmentationData().setup()


class TestLayouts:
    def test_cityscapes(self, tmp_path: Path) -> None:
        labels = np.full((40, 60), 18, dtype=np.uint8)
        for folder, end in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelTrainIds")):
            for split in ("train", "val"):
                place = tmp_path / folder / split / "aachen"
                place.mkdir(parents=True)
                Image.fromarray(labels).save(place / f"aachen_000000_000019_{end}.png")
                if folder == "gtFine":  # numbers of other classes, and colors
                    Image.fromarray(labels + 15).save(
                        place / "aachen_000000_000019_gtFine_labelIds.png"
                    )
                    (place / "aachen_000000_000019_gtFine_polygons.json").write_text("{}")
        data = open_data(tmp_path, classes=None, batch_size=2)
        assert (data.num_classes, data.class_names[18]) == (19, "bicycle")
        assert set(data.datasets["train"].reader[0][1].ravel()) == {18}
        for path in tmp_path.rglob("*labelTrainIds.png"):
            path.unlink()
        with pytest.raises(ValueError, match=r"Ids\.png are made by csCreateTrainIdLabelImgs"):
            open_data(tmp_path, classes=None)

    def test_pascal_voc(self, tmp_path: Path) -> None:
        for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
            (tmp_path / name).mkdir(parents=True)
        for number, split in ((1, "train"), (2, "val"), (3, None)):
            Image.new("RGB", (60, 40)).save(tmp_path / "JPEGImages" / f"2007_{number}.jpg")
            if split is not None:
                map_path = tmp_path / "SegmentationClass" / f"2007_{number}.png"
                Image.new("P", (60, 40), 20).save(map_path)
                (tmp_path / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(
                    f"2007_{number}\n"
                )
        data = open_data(tmp_path, classes=None)
        assert (len(data.datasets["train"]), data.class_names[20]) == (1, "tvmonitor")
        (tmp_path / "classes.txt").write_text("\n".join(f"kind {letter}" for letter in LETTERS))
        assert open_data(tmp_path, classes=None).class_names[20] == "kind u"
        (tmp_path / "classes.txt").rename(tmp_path / "labelmap.txt")
        with pytest.raises(ValueError, match=r"has a list of classes, labelmap\.txt"):
            open_data(tmp_path, classes=None)
        assert open_data(tmp_path, classes=list(LETTERS)).class_names == tuple(LETTERS)
        (tmp_path / "labelmap.txt").unlink()
        (tmp_path / "ImageSets" / "Segmentation" / "train.txt").write_text("2007_1\n2007_3\n")
        with pytest.raises(ValueError, match=r"1 names in .* have no image .*: 2007_3"):
            open_data(tmp_path, classes=None)

    def test_a_label_map_of_another_size_is_refused_before_anything_runs(
        self, folder: Path
    ) -> None:
        save(folder, "train", "05", some_labels(np.random.default_rng(0)))
        Image.new("L", (64, 47)).save(folder / "labels" / "train" / "05.png")
        with pytest.raises(ValueError, match=r"05\.png: the label map has 64 x 47 pixels"):
            open_data(folder)
