"""Shards: the folder's images in the folder's order, resumable, checksummed, honest about damage."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dgt.data.classification import ClassificationData
from dgt.data.decoding import BrokenImage
from dgt.data.images import ImageFolder, available_splits, open_images
from dgt.data.sharding import verify_shards, write_shards
from dgt.data.shards import OPEN_FILES, ShardImages
from dgt_command import main

QUIET = {"report": lambda line: None}


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for name in ("ant", "bee"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{number}.PNG")
    return tmp_path / "images"


@pytest.fixture
def shards(source, tmp_path):
    write_shards(source, tmp_path / "shards", samples=6, workers=2, **QUIET)
    return tmp_path / "shards"


def batches(root, workers=0):
    data = ClassificationData(str(root), image_size=32, batch_size=4, num_workers=workers, seed=3)
    data.setup()
    return data.train_dataloader()


def spoil(path, at=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


class TestReading:
    def test_images_labels_and_order_are_the_folders(self, source, shards):
        assert available_splits(shards) == ("train", "val")
        for split in ("train", "val"):
            folder, packed = ImageFolder(source, split), open_images(shards, split)
            assert isinstance(packed, ShardImages)
            assert (packed.class_names, len(packed)) == (folder.class_names, len(folder))
            for index in range(len(folder)):
                (picture, label), (expected, expected_label) = packed[index], folder[index]
                assert label == expected_label
                assert picture.tobytes() == expected.tobytes()
                assert packed.name(index).endswith(os.path.relpath(folder.samples[index][0], source / split) + "]")

    @pytest.mark.parametrize("workers", [0, 1])
    def test_batches_are_those_of_the_folder_after_a_resumption_too(self, source, shards, workers):
        expected = list(batches(source))
        loader = batches(shards, workers)
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(2)]
        resumed = batches(shards)
        resumed.load_state_dict(loader.state_dict())
        for (image, target), (right, right_target) in zip([*seen, *resumed], expected, strict=True):
            assert torch.equal(image, right)
            assert torch.equal(target, right_target)

    def test_the_convention_of_webdataset(self, source, shards):
        with tarfile.open(shards / "train-000000.tar") as tar:
            members = tar.getmembers()
            assert [member.name.partition(".")[2] for member in members] == ["png", "cls"] * 6
            number = int(members[0].name[:9])
            content, label = (tar.extractfile(member).read() for member in members[:2])
        path, expected = ImageFolder(source).samples[number]
        assert content == Path(path).read_bytes()
        assert int(label) == expected

    def test_more_shards_than_may_be_open(self, source, tmp_path, monkeypatch):
        write_shards(source, tmp_path / "many", samples=1, **QUIET)
        monkeypatch.setattr("dgt.data.shards.OPEN_FILES", 3)
        images = ShardImages(tmp_path / "many")
        assert all(not isinstance(images[index][0], BrokenImage) for index in range(len(images)))
        assert len(images._files) == 3 < OPEN_FILES


class TestWriting:
    def test_goes_on_where_it_was_with_the_same_bytes(self, source, shards):
        before = {path.name: path.read_bytes() for path in shards.iterdir()}
        (shards / "train-000001.tar").unlink()
        (shards / "train-000002.index").write_bytes(b"")
        (shards / "shards.json").unlink()
        (shards / ".val-000000.tar.x.part").write_bytes(b"half")
        with pytest.raises(ValueError, match=r"no .*shards\.json: no folder of shards, or one that"):
            open_images(shards, "train")
        done = write_shards(source, shards, samples=6, **QUIET)
        assert (done.written, done.kept, done.images, done.broken) == (2, 3, 26, 0)
        assert {path.name: path.read_bytes() for path in shards.iterdir()} == before

    def test_other_images_need_another_folder(self, source, shards):
        Image.new("RGB", (40, 40)).save(source / "train" / "ant" / "new.png")
        with pytest.raises(ValueError, match="is a shard of other images than those now in"):
            write_shards(source, shards, samples=6, **QUIET)

    def test_broken_images_are_kept_and_listed(self, source, tmp_path):
        spoilt = source / "train" / "bee" / "4.PNG"
        spoilt.write_bytes(b"no image")
        out = tmp_path / "out"
        assert write_shards(source, out, check=False, **QUIET).broken is None
        done = write_shards(source, out, **QUIET)  # looked at now, so written again
        assert (done.written, done.broken) == (2, 1)
        assert (out / "broken_images.txt").read_text().split("\t")[1].endswith("train-000000.tar[bee/4.PNG]")
        picture, label = open_images(out, "train")[14]
        assert label == 1
        assert picture.path.endswith("train-000000.tar[bee/4.PNG]")
        assert "not an image" in picture.reason

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"samples": 0}, "samples must be at least 1, got 0"),
            ({"workers": 0}, "workers must be at least 1, got 0"),
            ({"out": "inside"}, "out must lie outside the folder of the images"),
            ({"source": "train"}, "found no folder in a folder"),
        ],
    )
    def test_bad_arguments_are_named(self, source, tmp_path, change, message):
        change = {key: source / value if isinstance(value, str) else value for key, value in change.items()}
        with pytest.raises(ValueError, match=message):
            write_shards(**{"source": source, "out": tmp_path / "out", **QUIET, **change})

    def test_an_unreadable_source_leaves_no_half_shard(self, source, tmp_path):
        (source / "train" / "ant" / "gone.png").symlink_to(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match="gone"):
            write_shards(source, tmp_path / "out", samples=100, workers=1, **QUIET)
        assert {path.name for path in (tmp_path / "out").iterdir()} <= {"val-000000.tar", "val-000000.index"}


class TestDamage:
    def test_a_changed_byte_is_a_broken_image(self, shards):
        images = ShardImages(shards)
        spoil(shards / "train-000000.tar", int(images.entries[images.shard_of == 0]["offset"][0]) + 100)
        broken = [images[index][0] for index in range(len(images)) if isinstance(images[index][0], BrokenImage)]
        assert [picture.reason for picture in broken] == ["train-000000.tar is damaged: the image's checksum differs"]

    def test_every_damage_is_found(self, shards):
        assert verify_shards(shards, **QUIET) == []
        spoil(shards / "train-000001.tar")
        spoil(shards / "train-000002.index")
        (shards / "train-000003.tar").write_bytes((shards / "train-000003.tar").read_bytes()[:-1])
        (shards / "val-000000.tar").unlink()
        told = []
        damaged = verify_shards(shards, report=told.append)
        assert [tar.name for tar in damaged] == [f"train-00000{n}.tar" for n in (1, 2, 3)] + ["val-000000.tar"]
        assert "expected" in told[2]

    @pytest.mark.parametrize(
        ("damage", "error", "message"),
        [
            (lambda path: (path / "train-000000.tar").unlink(), FileNotFoundError, "no shard"),
            (lambda path: os.truncate(path / "train-000000.tar", 700), ValueError, "has 700 bytes, expected"),
            (lambda path: spoil(path / "train-000000.index"), ValueError, "its checksum is not the one in"),
            (lambda path: (path / "train-000000.index").unlink(), FileNotFoundError, "the index of"),
            (lambda path: (path / "shards.json").write_text("{"), ValueError, "does not describe shards"),
            (lambda path: (path / "shards.json").write_text("[]"), ValueError, "does not describe shards"),
        ],
    )
    def test_opening_tells_what_is_wrong(self, shards, damage, error, message):
        damage(shards)
        with pytest.raises(error, match=message):
            open_images(shards, "train")

    def test_another_format_and_another_split(self, shards):
        with pytest.raises(ValueError, match=r"split: .test. is not in .*: train, val"):
            open_images(shards, "test")
        manifest = json.loads((shards / "shards.json").read_text())
        (shards / "shards.json").write_text(json.dumps({**manifest, "format": 9}))
        with pytest.raises(ValueError, match="expected format 1 with classes and shards, got format 9"):
            open_images(shards, "train")


def test_the_command_line(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["shard", str(source), out, "--samples", "10"]) == 0
    assert "26 images in 3 shards; 0 of them broken" in capsys.readouterr().out
    assert main(["shard", "--verify", out]) == 0
    spoil(tmp_path / "out" / "train-000000.tar")
    assert main(["shard", "--verify", out]) == 1
    assert "1 damaged: delete them and run `dgt shard` again" in capsys.readouterr().out
    assert main(["shard", str(source)]) == 2
    assert "name the folder of the shards: dgt shard DIR OUT" in capsys.readouterr().err
