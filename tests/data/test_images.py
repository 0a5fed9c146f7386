"""Readers of labeled images, and what they say about bad folders and files."""

import io
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dgt.data.classification import ClassificationData
from dgt.data.image_io import BrokenImage, BrokenImages, decode_image, open_image
from dgt.data.readers import ImageFolder, available_splits, open_images


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    for split, classes in (("train", ("cat", "ant", "bee")), ("val", ("ant", "cat"))):
        for number, name in enumerate(classes):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (40, 50), (number, index, 0)).save(
                    tmp_path / split / name / f"{index}.png"
                )
    return tmp_path


def png_of_16_bits(values: np.ndarray) -> bytes:
    """A PNG file of (H, W, channels), which Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    height, width, channels = values.shape
    color = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


class TestImageFolder:
    def test_classes_are_sorted_and_labels_follow(self, folder):
        images = ImageFolder(folder, "train")
        assert images.class_names == ("ant", "bee", "cat")
        assert [label for _, label in (images[i] for i in range(len(images)))] == [0, 0, 1, 1, 2, 2]
        assert images[0][0].size == (40, 50)

    def test_a_split_keeps_the_labels_it_is_given(self, folder):
        images = ImageFolder(folder, "val", ("ant", "bee", "cat"))
        assert [images[i][1] for i in range(4)] == [0, 0, 2, 2]

    def test_unknown_class_of_a_split(self, folder):
        with pytest.raises(ValueError, match="not in the training split: cat"):
            ImageFolder(folder, "val", ("ant", "bee"))

    def test_no_root(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere has no folder 'train'; it has: none"):
            ImageFolder(tmp_path / "nowhere")

    def test_no_split_names_those_found(self, folder):
        with pytest.raises(FileNotFoundError, match=r"has no folder 'dev'; it has: train, val"):
            ImageFolder(folder, "dev")

    def test_no_classes(self, tmp_path):
        (tmp_path / "train").mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / "train" / "lost.png")
        with pytest.raises(ValueError, match="one folder per class"):
            ImageFolder(tmp_path)

    def test_empty_class_is_fine_an_empty_split_is_not(self, folder):
        (folder / "train" / "dog").mkdir()
        assert len(ImageFolder(folder).class_names) == 4
        (folder / "empty" / "dog").mkdir(parents=True)
        with pytest.raises(ValueError, match="no images in any of the 1 class folders"):
            ImageFolder(folder, "empty")

    def test_unreadable_files_are_marked(self, folder):
        good = (folder / "train" / "ant" / "0.png").read_bytes()
        bad = {"1.png": good[: len(good) // 2], "2.jpg": bytes(range(256)), "3.png": b""}
        for name, content in bad.items():
            (folder / "train" / "ant" / name).write_bytes(content)
        images = ImageFolder(folder)
        items = [images[i] for i in range(4)]
        assert isinstance(items[0][0], Image.Image)
        assert [
            Path(item.path).name for item in items[1:] if isinstance(item, BrokenImage)
        ] == list(bad)
        assert all(item.reason for item in items[1:])


class TestDecoding:
    @pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "I;16"])
    def test_every_mode_becomes_rgb(self, mode):
        kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
        image = decode_image(encode(Image.new(mode, (8, 8)), kind))
        assert (image.mode, image.size) == ("RGB", (8, 8))

    def test_sixteen_bits_are_scaled(self):
        gray = Image.fromarray(np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16))
        assert np.asarray(decode_image(encode(gray)))[..., 0].tolist() == [[0, 100], [200, 255]]

    @pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
    @pytest.mark.parametrize("kind", ["PNG", "TIFF"])
    def test_gray_has_the_bits_that_are_said_or_all(self, bits: int, kind: str) -> None:
        ramp = np.tile(np.arange(256), (2, 1))
        values = ramp * (2**bits - 1) // 255
        if kind == "TIFF":
            stream = io.BytesIO()
            Image.fromarray(values.astype(np.int32)).save(stream, "TIFF")
            content = stream.getvalue()
        else:
            content = png_of_16_bits(values[..., None])
        decoded = np.asarray(decode_image(content, bits)).astype(int)
        assert np.abs(decoded - ramp[..., None]).max() <= 1
        dark = np.asarray(decode_image(content))[..., 0]
        assert np.array_equal(dark, values * 255 // 65535)  # whatever else the image has

    def test_what_does_not_fit_the_bits_is_refused(self) -> None:
        with pytest.raises(ValueError, match="from 4095 to 4095 do not fit in 8 bits"):
            decode_image(png_of_16_bits(np.full((2, 2, 1), 4095)), 8)
        colors = png_of_16_bits(np.full((2, 2, 3), 4095))
        assert np.asarray(decode_image(colors)).max() == 15
        with pytest.raises(ValueError, match=r"higher 8 are read, and data\.bits is 12"):
            decode_image(colors, 12)
        stream = io.BytesIO()
        Image.fromarray(np.zeros((2, 2), np.uint16)).save(stream, "TIFF", tiffinfo={262: 0})
        with pytest.raises(ValueError, match="with 0 for white"):
            decode_image(stream.getvalue())

    @pytest.mark.parametrize("channels", [1, 2, 3])
    def test_that_nothing_says_the_bits_is_said(self, folder, channels: int) -> None:
        (folder / "train" / "ant" / "z.png").write_bytes(
            png_of_16_bits(np.zeros((2, 2, channels), int))
        )
        assert [note for note in ImageFolder(folder, "train").notes if "set data.bits" in note]
        for reader in (ImageFolder(folder, "train", bits=12), ImageFolder(folder, "val")):
            assert not any("bits" in note for note in reader.notes)

    def test_what_the_format_says_of_bits_holds(self) -> None:
        dark = np.tile(np.arange(0, 1020, 4), (2, 1)).astype(">u2")  # of 4095
        pgm = f"P5 {dark.shape[1]} 2 4095 ".encode() + dark.tobytes()
        assert np.asarray(decode_image(pgm)).max() == 63
        assert np.asarray(decode_image(pgm, 16)).max() == 63

    def test_transparent_is_white(self):
        assert decode_image(encode(Image.new("RGBA", (2, 2), (9, 9, 9, 0)))).getpixel((0, 0)) == (
            255,
            255,
            255,
        )

    @pytest.mark.parametrize("kind", [np.uint8, np.uint16])
    def test_a_gray_that_is_transparent_is_white(self, kind: type) -> None:
        gray = Image.fromarray(np.array([[7, 8]], kind))
        decoded = np.asarray(decode_image(encode(gray, transparency=8), 8))
        assert decoded[0, :, 0].tolist() == [7, 255]

    def test_float_pixels_are_refused(self):
        with pytest.raises(ValueError, match="floating-point"):
            decode_image(encode(Image.new("F", (8, 8)), "TIFF"))


@pytest.mark.parametrize("inside", [True, False])
def test_the_python_layout_of_cifar_10_is_a_data_set(tmp_path, inside, monkeypatch):
    """Read as torchvision does, which checks the files; an incomplete copy gives a clear error."""
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").touch()
    root = tmp_path / "cifar-10-batches-py" if inside else tmp_path
    for use in (available_splits, lambda place: open_images(place, "train")):
        with pytest.raises(ValueError, match=r"data\.root: .* is not a complete copy of CIFAR"):
            use(root)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)

    def whole(place, train, download):
        assert (place, download) == (str(tmp_path.resolve()), False)
        return SimpleNamespace(data=pixels, targets=[1, 0, 1], classes=["cat", "dog"])

    monkeypatch.setattr("torchvision.datasets.CIFAR10", whole)
    assert available_splits(root) == ("test", "train")
    reader = open_images(root, "test", train_split="train")
    assert reader.class_names == ("cat", "dog")
    image, label = reader[0]
    assert label == 1
    assert np.array_equal(np.asarray(image), pixels[0])


def test_nothing_at_root(tmp_path):
    for use in (available_splits, lambda root: open_images(root, "train")):
        with pytest.raises(
            FileNotFoundError, match=r"data\.root: (folder .* does not exist|expected a folder)"
        ):
            use(tmp_path / "nowhere")


class TestLedger:
    def test_list_is_written(self, tmp_path):
        report = BrokenImages("train", 10, 1.0)
        report.record([BrokenImage("b.jpg", "two\nlines"), BrokenImage("a.jpg", "cut")])
        data = ClassificationData(dataset="scenes")
        data.broken_images["train"] = report
        assert data.write_broken_images(tmp_path / "broken.txt") == 2
        assert (
            tmp_path / "broken.txt"
        ).read_text() == "train\ta.jpg\tcut\ntrain\tb.jpg\ttwo lines\n"
        assert [path.name for path in tmp_path.iterdir()] == ["broken.txt"]

    def test_a_root_that_moved_counts_each_image_once(self, folder, tmp_path_factory):
        data, moved = (
            ClassificationData(root=str(root), batch_size=2, max_broken_share=1)
            for root in (
                folder,
                shutil.copytree(folder, tmp_path_factory.mktemp("elsewhere") / "root"),
            )
        )
        data.setup()
        data.broken_images["train"].record([BrokenImage(data.reader.samples[0][0], "why")])
        moved.setup()
        moved.load_state_dict(data.state_dict())
        moved.broken_images["train"].record([BrokenImage(moved.reader.samples[0][0], "why")])
        assert list(moved.broken_images["train"].broken) == [moved.reader.samples[0][0]]


def test_a_folder_in_the_place_of_an_image_is_not_called_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be an image file, but is a folder$"):
        open_image(tmp_path)
