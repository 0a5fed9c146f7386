"""`python -m studies.residual_training`: tiny runs, what they leave, and what is made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from studies import residual_training as study
from studies.residual_summary import confusion, correct, read_records, summarize

SIZES = ((64, 48), (40, 60))  # of the two segmented images


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Two classes of flat colors, with four training and two test images each."""
    folder = tmp_path / "classes"
    for split, count in (("train", 4), ("val", 2)):
        for name, color in (("blue", (20, 30, 200)), ("red", (210, 20, 30))):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                shade = tuple(min(255, channel + 9 * number) for channel in color)
                Image.new("RGB", (40, 36), shade).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """Images of two halves, dark and light, that are two classes."""
    folder = tmp_path / "labels"
    for split in ("train", "val"):
        for number, size in enumerate(SIZES):
            for part, kind, dark, light in (
                ("images", "RGB", (9, 9, 9), (240, 240, 240)),
                ("labels", "L", 0, 1),
            ):
                (folder / part / split).mkdir(parents=True, exist_ok=True)
                picture = Image.new(kind, size, dark)
                picture.paste(light, (0, 0, size[0] // 2, size[1]))
                picture.save(folder / part / split / f"{number}.png")
    return folder


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both studies with small images and tests, in float32."""
    few = {
        "data.batch_size": 2,
        "data.num_workers": 0,
        "data.image_size": 32,
        "trainer.precision": "32-true",
        "schedule.warmup_epochs": 1,
    }
    tests = {
        "imagenette": {32: {"data.image_size": 32}, 64: {"data.image_size": 64}},
        "camvid": {64: {"data.scale": "[64, 48]"}},
    }
    for name, about in study.DATA_SETS.items():
        more = {} if name == "imagenette" else {"data.classes": '["dark", "light"]'}
        small = about._replace(keys=few | more, tests=tests[name])
        monkeypatch.setitem(study.DATA_SETS, name, small)


def words(name: str, data: Path, out: Path, *kinds: str) -> list[str]:
    folders = ["--data", str(data), "--out", str(out), "--records", str(out / "records")]
    return [name, *folders, "--seeds", "0", "--epochs", "1", "--kinds", *kinds]


def record(out: Path, name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((out / "records" / f"{name}-seed-0.json").read_text())
    return content


def test_a_run_leaves_one_record_and_is_made_once(
    classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = words("imagenette", classes, tmp_path, "all keys", "groups, 16 residual keys")
    assert study.main(arguments) == 0
    for name in ("imagenette-all-keys", "imagenette-groups-16-residual-keys"):
        found = record(tmp_path, name)
        assert found["precision"] == "32-true"
        assert set(found["tests"]) == {"32", "64"}
        assert len(correct(found["tests"]["64"])) == 4
    rows = summarize(read_records(tmp_path / "records"))["rows"]
    compared = [(row["size"], row["kind"]) for row in rows]
    kinds = ("all keys", "groups, 16 residual keys")
    assert compared == [(size, kind) for size in (32, 64) for kind in kinds]
    monkeypatch.setattr(study, "make", lambda *_: pytest.fail("made again"))
    assert study.main(arguments) == 0


def test_every_pixel_of_every_image_is_counted(labels: Path, tmp_path: Path) -> None:
    assert study.main(words("camvid", labels, tmp_path, "groups, 1 residual key")) == 0
    counts = confusion(record(tmp_path, "camvid-groups-1-residual-key")["tests"]["64"])
    assert counts.shape == (2, 2, 2)
    for image, (width, height) in zip(counts, SIZES, strict=True):
        half = width // 2 * height
        assert image.sum(axis=1).tolist() == [width * height - half, half]


def test_a_run_of_another_process_is_left_to_it(
    classes: Path,
    tmp_path: Path,
    at_work: Callable[[Path], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(study, "make", lambda run, *_: made.append(run.kind))
    at_work(tmp_path / "imagenette-groups-seed-0")
    assert study.main(words("imagenette", classes, tmp_path, "groups", "random keys")) == 0
    assert made == ["random keys"]


def test_data_that_are_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(words("camvid", tmp_path, tmp_path / "out", "groups")) == 2
    assert "--data must hold the folder images/train" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
