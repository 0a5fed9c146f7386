"""The classification data module: batches are functions of (seed, epoch, index), and bad data gives clear errors."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dgt.data.classification import ClassificationData
from dgt.data.image_io import BrokenImagesError
from dgt.data.loader import EpochBatches
from dgt.data.transforms import Augmentation, crop_long, evaluation_transform, training_transform

SHARED = Path(__file__).parents[2] / "../shared/data"
PLAIN = Augmentation(None, 0, 0, 0, 0, 0, 0, 1, 0)  # the center square, hard labels


def scenes(**options):
    data = ClassificationData(
        **{
            "dataset": "scenes",
            "image_size": 32,
            "batch_size": 8,
            "num_workers": 0,
            "train_size": 20,
            "val_size": 10,
        }
        | options
    )
    data.setup()
    return data


def batches(loader):
    return [(images.clone(), targets.clone()) for images, targets in loader]


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, c) and torch.equal(b, d)
        for (a, b), (c, d) in zip(first, second, strict=True)
    )


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for name in ("ant", "bee"):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (36, 44, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{index:02d}.png")
    return tmp_path


def folder_data(root, **options):
    data = ClassificationData(
        str(root),
        **{"image_size": 32, "batch_size": 4, "num_workers": 0, "augmentation": PLAIN} | options,
    )
    data.setup()
    return data


class TestDeterminism:
    def test_workers_change_nothing(self):
        passes = []
        for workers in (0, 2):
            loader = scenes(num_workers=workers).train_dataloader()
            # The second epoch reuses the same workers.
            passes.append([batches(loader) for _ in range(2)])
        assert equal(passes[0][0], passes[1][0])
        assert equal(passes[0][1], passes[1][1])
        assert not equal(passes[0][0], passes[0][1])

    def test_another_seed_is_another_order_of_the_same_images(self):
        first, second = (
            scenes(seed=seed, augmentation=PLAIN, batch_size=20).train_dataloader()
            for seed in (0, 1)
        )
        (first_images, _), (second_images, _) = batches(first)[0], batches(second)[0]
        assert not torch.equal(first_images, second_images)
        keys = [
            sorted(image.sum().item() for image in images)
            for images in (first_images, second_images)
        ]
        assert keys[0] == keys[1]

    def test_global_random_state_is_left_alone(self):
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        expected = torch.rand(1), np.random.rand()  # noqa: NPY002
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        batches(scenes().train_dataloader())
        assert (torch.rand(1), np.random.rand()) == expected  # noqa: NPY002

    def test_cache_changes_nothing(self, folder):
        plain, cached = (
            batches(folder_data(folder, cache=cache).train_dataloader()) for cache in (False, True)
        )
        assert equal(plain, cached)


class TestTargets:
    def test_mixed_targets_are_soft_and_sum_to_one(self):
        seen = []
        for images, targets in scenes().train_dataloader():
            assert images.shape == (8, 3, 32, 32)
            assert targets.shape == (8, 8)
            assert torch.allclose(targets.sum(dim=1), torch.ones(8))
            seen.append(targets.sort(dim=1).values[:, -2:])
        assert torch.cat(seen)[:, 0].max() > 0.05  # a second class has weight somewhere

    def test_smoothing_alone_is_soft_too(self):
        data = scenes(augmentation=Augmentation(mixup=0, cutmix=0, smoothing=0.1))
        _, targets = next(iter(data.train_dataloader()))
        assert torch.allclose(targets.max(dim=1).values, torch.full((8,), 0.9 + 0.1 / 8))

    def test_labels_are_hard_without_mixing_and_in_validation(self):
        data = scenes(augmentation=PLAIN)
        for loader in (data.train_dataloader(), data.val_dataloader()):
            images, targets = next(iter(loader))
            assert images.dtype == torch.float32
            assert targets.dtype == torch.int64
            assert targets.shape == (8,)

    def test_odd_batches_cannot_be_mixed(self):
        with pytest.raises(ValueError, match=r"data\.batch_size must be even with .*, got 7"):
            scenes(batch_size=7)


class TestSplitsAndSizes:
    def test_folders_are_found(self, folder):
        data = folder_data(folder)
        assert data.class_names == ("ant", "bee")
        assert sum(len(targets) for _, targets in data.val_dataloader()) == 10

    def test_validation_keeps_the_training_classes(self, folder):
        for path in (folder / "val" / "ant").iterdir():
            path.unlink()
        (folder / "val" / "ant").rmdir()
        data = ClassificationData(str(folder), image_size=32, num_workers=0)
        data.setup("validate")
        assert data.class_names == ("ant", "bee")
        assert {int(label) for _, labels in data.val_dataloader() for label in labels} == {1}

    def test_subset_is_the_start_of_one_permutation(self, folder):
        def images_of(**options):
            loader = folder_data(folder, **options).train_dataloader()
            return {image.sum().item() for images, _ in loader for image in images}

        small = images_of(train_size=8)
        again = images_of(train_size=8, seed=3)
        large = images_of(train_size=16)
        assert len(small) == 8
        assert small == again
        assert small < large

    def test_subset_larger_than_its_split(self, folder):
        message = r"data\.train_size: expected at most 24, the images of split 'train', got 25"
        with pytest.raises(ValueError, match=message):
            folder_data(folder, train_size=25)

    def test_too_few_for_a_batch(self, folder):
        with pytest.raises(ValueError, match="24 training images do not fill one batch of 32"):
            folder_data(folder, batch_size=32).train_dataloader()

    def test_no_validation_split(self, folder):
        (folder / "val").rename(folder / "held-out")
        with pytest.raises(FileNotFoundError, match=r"no folder 'val'; it has: held-out, train"):
            folder_data(folder)
        assert len(folder_data(folder, val_split="held-out").val_dataloader()) == 3

    def test_names_that_differ_only_in_case_or_spaces_are_said(self, folder):
        names = sorted(path.name for path in (folder / "train").iterdir())
        for name in names[:2]:
            shutil.copytree(folder / "train" / name, folder / "train" / f"{name.title()} ")
        (note,) = [note for note in folder_data(folder).notes if "only in case" in note]
        assert all(f"'{name.title()} ' and '{name}'" in note for name in names[:2])

    def test_a_validation_on_the_training_split_is_said(self, folder):
        said = "split 'train' is that of training and of validation"
        assert any(note.startswith(said) for note in folder_data(folder, val_split="train").notes)
        assert not any(note.startswith("split") for note in folder_data(folder).notes)

    def test_a_class_without_training_images(self, folder):
        (folder / "train" / "cat" / "deeper").mkdir(parents=True)
        (folder / "train" / "cat" / "notes.txt").write_text("no image")
        with pytest.raises(ValueError, match=r"class folders of .*train without images: cat \("):
            folder_data(folder)
        (folder / "train" / "cat").rename(folder / "val" / "ant" / "cat")
        assert folder_data(folder).class_names == ("ant", "bee")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dataset": "auto"}, r"data\.root: expected"),
            (
                {"root": "here"},
                r"data\.root: expected .* 'auto', none .*, got 'here' with 'scenes'",
            ),
            ({"dataset": "imagenet"}, r"data\.dataset must be one of auto, scenes, got 'imagenet'"),
            ({"image_size": 16}, r"data\.image_size must be at least 32, got 16"),
            ({"crop_ratio": 0.0}, r"data\.crop_ratio"),
            ({"max_broken_share": 2.0}, r"data\.max_broken_share must"),
            ({"std": (0.2, 0.0, 0.2)}, r"data\.std must be above 0 .*, got 0.2, 0.0, 0.2"),
            ({"std": (58.4, 57.1, 57.4)}, r"data\.std must be above 0 and at most 1, of pixels in"),
            ({"mean": (123.7, 116.3, 103.5)}, r"data\.mean must be at least 0 and at most 1, of"),
            ({"mean": (float("nan"), 0.4, 0.4)}, r"data\.mean must be .*, got nan, 0.4, 0.4"),
        ],
    )
    def test_bad_arguments_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            scenes(**options)


class TestAugmentation:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"erasing": 1.5}, "erasing must lie in"),
            ({"min_scale": 0}, "min_scale must lie in"),
            ({"interpolation": "cubic"}, "interpolation must be one of"),
            ({"rand_augment": "strong"}, "rand_augment must be .*, got 'strong'"),
            ({"rand_augment": "rand-m9-x5"}, "rand_augment must be .*, got 'rand-m9-x5'"),
            ({"rand_augment": "rand_m9"}, "rand_augment must be .*, got 'rand_m9'"),
            ({"rand_augment": ""}, "rand_augment must be .*, got ''"),
        ],
    )
    def test_bad_settings_are_named(self, options, message):
        with pytest.raises(ValueError, match=rf"data\.augmentation\.{message}"):
            Augmentation(**options)

    def test_rand_augment_at_its_strongest(self):
        transform = training_transform(32, Augmentation("rand-m10-n8-inc1", erasing=0))
        image = Image.new("RGB", (40, 40), (200, 100, 50))
        assert all(transform(image).shape == (3, 32, 32) for _ in range(60))

    def test_of_a_very_long_image_the_middle_is_seen(self):
        long = Image.new("RGB", (20000, 10))
        long.paste((255, 255, 255), (9990, 0, 10010, 10))
        for transform in (evaluation_transform(32), training_transform(32, PLAIN)):
            image = transform(long)
            assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
            assert image[:, :, 8:-8].min() > 240
        wide = Image.new("RGB", (16 * 40, 40))
        assert crop_long(wide) is wide

    def test_pad_and_crop_only_moves_the_image(self):
        plain = scenes(augmentation=PLAIN, train_size=8, crop_ratio=1.0).train_dataloader()
        moved = scenes(
            augmentation=Augmentation(None, 0, 0, 0, 0, 0, 0, 1, 0, pad_crop=2), train_size=8
        )
        (images, _), (shifted, _) = batches(plain)[0], batches(moved.train_dataloader())[0]
        for image, other in zip(images, shifted, strict=True):
            padded = torch.nn.functional.pad(image, (2, 2, 2, 2), mode="reflect")
            windows = [padded[:, y : y + 32, x : x + 32] for y in range(5) for x in range(5)]
            assert any(torch.equal(window, other) for window in windows)

    def test_without_augmentation_training_shows_what_validation_shows(self, folder):
        (folder / "val").rename(folder / "unused")
        data = folder_data(folder, val_split="train", batch_size=24, crop_ratio=1.0)
        (train, _), (val, _) = (
            batches(data.train_dataloader())[0],
            batches(data.val_dataloader())[0],
        )
        assert sorted(image.sum().item() for image in train) == sorted(
            image.sum().item() for image in val
        )


class TestBrokenImages:
    def corrupt(self, folder, count, split="train"):
        names = sorted((folder / split / "ant").iterdir())[:count]
        for number, path in enumerate(names):
            content = path.read_bytes()
            path.write_bytes((b"", b"\x00\x01random", content[: len(content) // 3])[number % 3])
        return names

    @pytest.mark.parametrize("workers", [0, 2])
    def test_counted_listed_and_left_out(self, folder, tmp_path, workers):
        corrupted = self.corrupt(folder, 3)
        data = folder_data(folder, max_broken_share=0.2, num_workers=workers)
        loader = data.train_dataloader()
        for _ in range(2):
            assert sum(len(images) for images, _ in loader) == 24 - 3
        assert data.write_broken_images(tmp_path / "broken_images.txt") == 3
        listed = (tmp_path / "broken_images.txt").read_text().splitlines()
        assert [line.split("\t")[:2] for line in listed] == [
            ["train", str(path)] for path in corrupted
        ]

    @pytest.mark.parametrize("split", ["train", "val"])
    def test_stops_above_the_share(self, folder, split):
        self.corrupt(folder, 3, split)
        data = folder_data(folder, max_broken_share=0.1)
        loader = data.train_dataloader() if split == "train" else data.val_dataloader()
        with pytest.raises(BrokenImagesError, match=r"max_broken_share = 10\.00%(.|\n)*00\.png"):
            batches(loader)

    def test_mixing_goes_on_with_an_even_number(self, folder):
        self.corrupt(folder, 1)
        data = folder_data(folder, max_broken_share=0.2, augmentation=Augmentation())
        assert sorted(len(images) for images, _ in data.train_dataloader()) == [2, 4, 4, 4, 4, 4]

    def test_a_validation_batch_with_nothing_left_is_skipped_a_training_batch_stops(self, folder):
        self.corrupt(folder, 1)
        data = folder_data(folder, batch_size=1, max_broken_share=1.0, val_split="train")
        assert len(batches(data.val_dataloader())) == 23
        with pytest.raises(BrokenImagesError, match="too few readable images in a training batch"):
            batches(data.train_dataloader())

    def test_cached_images_are_counted_too(self, folder):
        self.corrupt(folder, 3)
        with pytest.raises(BrokenImagesError, match="of the 24 images of split 'train'"):
            batches(folder_data(folder, max_broken_share=0.1, cache=True).train_dataloader())


class TestSharingAmongProcesses:
    def test_ranks_together_see_what_one_process_sees(self):
        alone = list(EpochBatches(50, 12, seed=1, training=True))
        ranks = [
            list(EpochBatches(50, 4, seed=1, training=True, rank=rank, world_size=3))
            for rank in range(3)
        ]
        assert {len(rank) for rank in ranks} == {len(alone)}
        for number, batch in enumerate(alone):
            assert [key.item for rank in ranks for key in rank[number]] == [
                key.item for key in batch
            ]

    def test_validation_images_are_seen_once(self):
        ranks = [
            EpochBatches(11, 2, seed=1, training=False, rank=rank, world_size=3)
            for rank in range(3)
        ]
        assert sorted(key.item for rank in ranks for batch in rank for key in batch) == list(
            range(11)
        )
        assert [len(list(rank)) for rank in ranks] == [len(rank) for rank in ranks]


@pytest.mark.parametrize("cut_at", [5, 8])
def test_a_loader_goes_on_where_another_stopped(cut_at):
    loader = scenes(train_size=40).train_dataloader()
    whole = [images.sum().item() for _ in range(3) for images, _ in loader]
    assert len(set(whole)) == len(whole) == 15
    cut = scenes(train_size=40).train_dataloader()
    endless = (images.sum().item() for _ in range(3) for images, _ in cut)
    seen = [next(endless) for _ in range(cut_at)]
    resumed = scenes(train_size=40).train_dataloader()
    resumed.load_state_dict(cut.state_dict())
    left = [images.sum().item() for _ in range(3) for images, _ in resumed]
    assert (seen + left)[:15] == whole


@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason=f"no {SHARED / 'cifar10'}")
def test_real_packed_images():
    data = ClassificationData(
        str(SHARED / "cifar10"),
        image_size=32,
        batch_size=16,
        num_workers=0,
        train_size=64,
        val_size=32,
        cache=True,
    )
    data.setup()
    assert data.num_classes == 10
    assert len(batches(data.train_dataloader())) == 4


class TestClassMap:
    @pytest.fixture
    def flat(self, tmp_path):
        for index, name in enumerate(("n01", "n02", "n03")):
            (tmp_path / "train" / name).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(tmp_path / "train" / name / "0.png")
            (tmp_path / "val").mkdir(exist_ok=True)
            Image.new("RGB", (40, 40)).save(tmp_path / "val" / f"ILSVRC2012_val_{index}.png")
        return tmp_path

    def open_val(self, root, text):
        (root / "map.txt").write_text(text)
        data = ClassificationData(
            str(root), image_size=32, num_workers=0, val_class_map=str(root / "map.txt")
        )
        data.setup("validate")
        return [label for _, label in data.datasets["val"].reader.samples]

    def test_names_the_classes_of_images_that_lie_together(self, flat):
        named = [f"ILSVRC2012_val_{index}.png" for index in range(3)]
        assert self.open_val(flat, "n03\nn01\nn02\n") == [2, 0, 1]
        for between in (" ", "\t", ", "):
            lines = [
                between.join(pair) for pair in zip(named[::-1], ("n01", "n02", "n03"), strict=True)
            ]
            assert self.open_val(flat, "\n".join(lines)) == [2, 1, 0]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("n03\nn01\n", "has 2 lines of a class alone for 3 images"),
            ("n03\nn01\nn09\n", "classes that are not in the training split: n09"),
            (
                "ILSVRC2012_val_0.png n01\nILSVRC2012_val_1.png n02\n",
                "has no line for ILSVRC2012_val_2",
            ),
            (
                "ILSVRC2012_val_0.png n01\nILSVRC2012_val_1.png n02\nILSVRC2012_val_2.png n02\nx.png n01",
                "lines without an image: x.png",
            ),
            ("a b\nn01\n", "must have a file and its class in each line, got 'n01'"),
        ],
    )
    def test_that_does_not_fit_is_refused(self, flat, text, told):
        with pytest.raises(ValueError, match=told):
            self.open_val(flat, text)

    @pytest.mark.parametrize("names", [["2", "10", "1"], ["b", "C", "a"], ["f", "\xe9", "g"]])
    def test_that_goes_by_an_order_of_several_is_refused(self, tmp_path, names):
        for name in ("n01", "n02"):
            (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "val").mkdir()
        for name in names:
            Image.new("RGB", (40, 40)).save(tmp_path / "val" / f"{name}.png")
        with pytest.raises(ValueError, match="sort in several ways"):
            self.open_val(tmp_path, "n01\nn02\nn01\n")
        lines = [f"{name}.png n02" for name in names]
        assert self.open_val(tmp_path, "\n".join(lines)) == [1, 1, 1]
        with pytest.raises(ValueError, match=rf"has several lines for {names[0]}\.png"):
            self.open_val(tmp_path, "\n".join([*lines, f"{names[0]}.png n01"]))

    def test_is_asked_for_where_images_lie_together(self, flat):
        with pytest.raises(ValueError, match=r"data\.val_class_map names the class of each"):
            ClassificationData(str(flat), image_size=32, num_workers=0).setup("validate")


class TestFoldersInFolders:
    def save(self, root, *places):
        for place in places:
            (root / place).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(root / place / "0.png")
        return ClassificationData(str(root), image_size=32, batch_size=2, num_workers=0)

    def test_one_class_is_refused(self, tmp_path):
        data = self.save(tmp_path, "train/train/cat", "train/train/dog", "val/train/cat")
        with pytest.raises(ValueError, match="only one class to train on, 'train'"):
            data.setup("fit")

    def test_several_folders_in_a_class_are_said(self, tmp_path):
        places = ("train/pet/cat", "train/pet/dog", "train/cow/images", "val/cow/images")
        data = self.save(tmp_path, *places)
        data.setup("fit")
        (note,) = data.notes
        assert "1 class folders" in note
        assert "pet (cat, dog)" in note
