"""Hugging Face data sets as a data root: the same batches as from folders, and clear errors."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from dgt.data.classification import ClassificationData
from dgt.data.image_io import BrokenImage, BrokenImagesError
from dgt.data.readers import HubImages, ImageFolder, available_splits, open_images

NAMES = ["ant", "bee"]


@pytest.fixture(autouse=True)
def quiet_cache(tmp_path_factory, monkeypatch):
    """Do not use the user's cache or the network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for name in NAMES:
            (tmp_path / "folders" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (36, 44, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(
                    tmp_path / "folders" / split / name / f"{index:02d}.png"
                )
    return tmp_path / "folders"


def rows(folder, split):
    images = ImageFolder(folder, split)
    return {
        "image": [{"bytes": Path(path).read_bytes(), "path": None} for path, _ in images.samples],
        "label": [label for _, label in images.samples],
    }


def as_dataset(columns, label=None, image=None):
    features = {
        "image": image or datasets.Image(),
        "label": label or datasets.ClassLabel(names=NAMES),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def write_parquet(splits, root):
    (root / "data").mkdir(parents=True)
    for split, table in splits.items():
        table.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")
    return root


@pytest.fixture(params=["save_to_disk", "parquet"])
def stored(request, folder, tmp_path):
    splits = {split: as_dataset(rows(folder, split)) for split in ("train", "val")}
    if request.param == "parquet":
        return write_parquet(
            {"train": splits["train"], "validation": splits["val"]}, tmp_path / "hub"
        )
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "hub")
    return tmp_path / "hub"


def open_data(root, workers=0, **options):
    data = ClassificationData(
        str(root), image_size=32, batch_size=4, num_workers=workers, seed=3, **options
    )
    data.setup()
    return data


def test_images_labels_and_order_are_the_folders(stored, folder):
    assert set(available_splits(stored)) in ({"train", "val"}, {"train", "validation"})
    reader, expected = open_images(stored, "train"), ImageFolder(folder, "train")
    assert isinstance(reader, HubImages)
    assert (len(reader), reader.class_names) == (20, ("ant", "bee"))
    for index in range(20):
        (image, label), (right, right_label) = reader[index], expected[index]
        assert label == right_label
        assert image.tobytes() == right.tobytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_folders_after_a_resumption_too(stored, folder, workers):
    expected = list(open_data(folder).train_dataloader())
    loader = open_data(stored, workers).train_dataloader()
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(2)]
    resumed = open_data(stored).train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    for (images, targets), (right, right_targets) in zip([*seen, *resumed], expected, strict=True):
        assert torch.equal(images, right)
        assert torch.equal(targets, right_targets)
    for (images, labels), (right, right_labels) in zip(
        open_data(stored).val_dataloader(), open_data(folder).val_dataloader(), strict=True
    ):
        assert torch.equal(images, right)
        assert torch.equal(labels, right_labels)


@pytest.mark.parametrize(
    ("kind", "options"), [("torch", {"columns": ["label"]}), ("arrow", {}), ("pandas", {})]
)
def test_the_format_that_a_set_was_saved_with_changes_nothing(folder, tmp_path, kind, options):
    table = as_dataset(rows(folder, "val"))
    datasets.DatasetDict(train=table.with_format(kind, **options)).save_to_disk(tmp_path / "hub")
    found, expected = open_images(tmp_path / "hub", "train"), ImageFolder(folder, "val")
    for index in range(len(expected)):
        assert found[index][1] == expected[index][1]
        assert found[index][0].tobytes() == expected[index][0].tobytes()


@pytest.mark.parametrize("name", ["hub[1]", "hub*", "hub?"])
def test_a_name_that_is_a_pattern_below_is_refused(folder, tmp_path, name):
    """Or else another folder that fits it would be read."""
    write_parquet({"train": as_dataset(rows(folder, "val"))}, tmp_path / name)
    with pytest.raises(ValueError, match="takes for a pattern or for several addresses"):
        available_splits(tmp_path / name)


def test_a_subset_is_that_of_the_folders(stored, folder):
    kept = [
        sorted(
            images.sum().item() for images, _ in open_data(root, train_size=8).train_dataloader()
        )
        for root in (stored, folder)
    ]
    assert kept[0] == kept[1]


def test_one_split_saved_alone(folder, tmp_path):
    table = as_dataset(rows(folder, "val"))
    table.save_to_disk(tmp_path / "alone")
    assert available_splits(tmp_path / "alone") == ("train",)
    assert len(open_images(tmp_path / "alone", "train")) == 6
    with pytest.raises(ValueError, match=r"split: .* has no split 'val'; it has: train"):
        open_images(tmp_path / "alone", "val")


def test_broken_bytes_are_counted_and_named(folder, tmp_path):
    columns = rows(folder, "train")
    columns["image"][3] = {"bytes": b"no image", "path": None}
    columns["image"][5] = None
    root = write_parquet(
        {"train": as_dataset(columns), "val": as_dataset(rows(folder, "val"))}, tmp_path / "hub"
    )
    reader = open_images(root, "train")
    assert reader[3].path == f"{root}[train:3]"
    assert "is not an image" in reader[3].reason
    assert reader[5] == BrokenImage(f"{root}[train:5]", "is missing")
    data = open_data(root, max_broken_share=0.2)
    list(data.train_dataloader())
    assert data.write_broken_images(tmp_path / "broken.txt") == 2
    with pytest.raises(BrokenImagesError, match=r"2 of the 20 images of split 'train' cannot"):
        list(open_data(root, max_broken_share=0.05).train_dataloader())


class TestColumns:
    def fails(self, table, tmp_path, message, **options):
        with pytest.raises(ValueError, match=message):
            open_images(write_parquet({"train": table}, tmp_path / "hub"), "train", **options)

    def test_no_image_column(self, tmp_path):
        table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
        self.fails(
            table, tmp_path, "has no image column: name one of text, label as data.image_column"
        )

    def test_no_label_column(self, folder, tmp_path):
        table = as_dataset(rows(folder, "val")).remove_columns("label")
        self.fails(table, tmp_path, "has no label column: name one of image as data.label_column")

    def test_an_unknown_column(self, folder, tmp_path):
        message = "has no image column 'img': name one of image, label as data.image_column"
        self.fails(as_dataset(rows(folder, "val")), tmp_path, message, image_column="img")

    def test_a_column_of_something_else(self, folder, tmp_path):
        message = r"data\.image_column: 'label' of .* does not hold images"
        self.fails(as_dataset(rows(folder, "val")), tmp_path, message, image_column="label")
        table = as_dataset(rows(folder, "val"), datasets.Value("string"))
        several = (
            as_dataset(rows(folder, "val"))
            .remove_columns("label")
            .add_column("label", [[0, 1]] * 6)
        )
        for place, other in (("texts", table), ("lists", several)):
            with pytest.raises(ValueError, match=r"data\.label_column: 'label' .* class numbers"):
                open_images(write_parquet({"train": other}, tmp_path / place), "train")

    def test_two_columns_to_choose_from(self, folder, tmp_path):
        table = as_dataset(rows(folder, "val"))
        table = table.add_column("coarse", [1] * 6).cast_column(
            "coarse", datasets.ClassLabel(names=["a", "b", "c"])
        )
        root = write_parquet({"train": table}, tmp_path / "hub")
        with pytest.raises(ValueError, match=r"several label columns \(label, coarse\): name one"):
            open_images(root, "train")
        assert open_images(root, "train", label_column="coarse").class_names == ("a", "b", "c")

    def test_labels_may_be_plain_numbers_and_images_plain_bytes(self, folder, tmp_path):
        columns = rows(folder, "val")
        columns["image"] = [image["bytes"] for image in columns["image"]]
        table = as_dataset(columns, datasets.Value("int32"), datasets.Value("binary"))
        reader = open_images(write_parquet({"train": table}, tmp_path / "hub"), "train")
        assert reader.class_names == ("0", "1")
        assert reader[0][0].size == (44, 36)

    @pytest.mark.parametrize("wrong", [-1, 2, None])
    def test_a_label_outside_the_classes(self, folder, tmp_path, wrong):
        columns = rows(folder, "val")
        good = as_dataset(columns)
        columns["label"][2] = wrong
        table = as_dataset(columns, datasets.Value("int64"))
        root = write_parquet(
            {"train": good.cast_column("label", datasets.Value("int64")), "val": table},
            tmp_path / "x",
        )
        with pytest.raises(ValueError, match=r"\[val\]: .* must lie in 0 to 1, got -?\d to -?\d"):
            open_images(root, "val", "train")

    def test_images_of_one_class_alone_are_not_trained_on(self, folder, tmp_path):
        """As of a set without folders of classes, whose library takes the splits' names for labels."""
        table = as_dataset(rows(folder, "val")).filter(lambda row: row["label"] == 1)
        root = write_parquet({"train": table, "validation": table}, tmp_path / "hub")
        with pytest.raises(ValueError, match=f"only one class to train on, '{NAMES[1]}'"):
            open_data(root)

    def test_splits_must_agree_on_their_classes(self, folder, tmp_path):
        val = as_dataset(rows(folder, "val"), datasets.ClassLabel(names=["bee", "ant"]))
        datasets.DatasetDict({"val": val}).save_to_disk(tmp_path / "hub")
        with pytest.raises(ValueError, match="differ from those of the training split: bee, ant"):
            HubImages(tmp_path / "hub", "val", NAMES)


class TestBadRoots:
    def test_damaged_parquet(self, stored):
        files = [*stored.rglob("*.parquet"), *stored.rglob("*.arrow")]
        for path in files:
            path.write_bytes(path.read_bytes()[:100])
        # with what is wrong, not only that something is
        wanted = r"data\.root: cannot read .* data set from .*hub \((?!DatasetGenerationError)"
        with pytest.raises(ValueError, match=wanted):
            open_images(stored, "train")

    def test_no_such_set_on_the_hub(self):
        with pytest.raises(ValueError, match=r"data\.root: cannot read .* set from nobody/nothing"):
            available_splits("nobody/nothing")
