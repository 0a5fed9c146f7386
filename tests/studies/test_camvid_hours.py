"""`python -m studies.camvid_hours`: tiny runs, interrupted and not, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from studies import camvid_hours as study

SIZE = (48, 64)
SECONDS = {study.GROUPS: 1.5, study.ALL_KEYS: 3.0, study.CROPS: 3.0}


@pytest.fixture
def streets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of two halves, dark and light, that are two classes; a study of a few steps."""
    for name, value in {
        "SIZE": SIZE,
        "PARTS": 2,
        "MINUTES": 0.1,
        "HELD_OUT_EVERY": 3,
        "CROPS_BATCH": 3,
    }.items():
        monkeypatch.setattr(study, name, value)
    folder = tmp_path / "streets"
    for split, count in (("train", 6), ("val", 2)):
        for number in range(count):
            for part, kind, dark, light in (
                ("images", "RGB", (9 * number, 9, 9), (240, 240, 9 * number)),
                ("labels", "L", 0, 1),
            ):
                (folder / part / split).mkdir(parents=True, exist_ok=True)
                picture = Image.new(kind, SIZE[::-1], dark)
                picture.paste(light, (0, 0, 20 + number, SIZE[0]))
                picture.save(folder / part / split / f"{number}.png")
    return folder


def run(streets: Path, out: Path, *kinds: str) -> int:
    """Train some kinds, by times that are already measured."""
    records = out / "records"
    records.mkdir(parents=True, exist_ok=True)
    (records / study.TIMES).write_text(json.dumps({"seconds_a_step": SECONDS}))
    folders = ["--data", str(streets), "--out", str(out), "--records", str(records)]
    return study.main(["train", *folders, "--seeds", "0", "--kinds", *kinds])


def record_of(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / "records" / f"{name}-seed-0.json").read_text())


def test_runs_leave_records_and_an_interrupted_one_goes_on(
    streets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stopped after its first part ends with the weights of a run at one stroke."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(streets, whole, study.GROUPS, study.ALL_KEYS, study.LONGER) == 0
    record = record_of(whole, "groups-1-residual-key")
    figure = tmp_path / "figure.png"
    assert study.main(["figure", "--records", str(whole / "records"), "--figure", str(figure)]) == 0
    assert Image.open(figure).width > 100
    assert [point["step"] for point in record["curve"]] == [2, 4]
    assert record["epochs"] == 4 * study.BATCH / 4
    assert 0 <= record["validation"]["miou"] <= 1
    assert record_of(whole, "all-keys")["steps"] == 2
    assert record_of(whole, "all-keys-as-many-steps-as-groups")["steps"] == 4
    test = study.Run.test

    def stop(self: study.Run, images: object) -> dict[str, float]:
        if self.step == 4:
            raise KeyboardInterrupt
        return test(self, images)  # type: ignore[arg-type]

    monkeypatch.setattr(study.Run, "test", stop)
    with pytest.raises(KeyboardInterrupt):
        run(streets, stopped, study.GROUPS)
    monkeypatch.setattr(study.Run, "test", test)
    assert run(streets, stopped, study.GROUPS) == 0
    name = "groups-1-residual-key-seed-0.pt"
    one, other = (torch.load(out / name, weights_only=True) for out in (whole, stopped))
    for key, value in one["network"].items():
        assert torch.equal(value, other["network"][key]), key


def test_all_arms_begin_as_the_same_function_and_end_as_others(streets: Path) -> None:
    data = study.read(streets)
    images = study.batch_of(data, 0, 0)[0]
    before, after = [], []
    for kind in study.ARMS:
        made = study.Run(kind, 0, data)
        with torch.inference_mode():
            before.append(made.network.eval()(images))
            made.network.train()
        made.train(3, 9)
        with torch.inference_mode():
            after.append(made.network.eval()(images))
    assert all(torch.equal(before[0], each) for each in before)
    assert not before[0].isnan().any()
    distinct = after[:-1]  # the last is all keys again, for other steps
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(distinct, 2))
    assert torch.equal(after[-1], after[-2])


def test_training_on_crops_is_that_of_the_recipe(streets: Path, tmp_path: Path) -> None:
    assert run(streets, tmp_path, study.CROPS) == 0
    record = record_of(tmp_path, "all-keys-on-crops")
    assert (record["epochs"], record["steps"]) == (1, 2)
    assert 0 <= record["validation"]["miou"] <= 1


def test_times_are_measured_a_kind_at_a_time(streets: Path, tmp_path: Path) -> None:
    folders = ["--data", str(streets), "--records", str(tmp_path), "--rounds", "1"]
    for kinds in (["no attention", "mean key"], [study.GROUPS]):
        assert study.main(["times", *folders, "--kinds", *kinds]) == 0
    seconds = json.loads((tmp_path / study.TIMES).read_text())["seconds_a_step"]
    assert list(seconds) == ["no attention", study.GROUPS, "mean key"]
    assert all(value > 0 for value in seconds.values())


def test_kinds_of_one_seed_see_the_same_images(streets: Path) -> None:
    data = study.read(streets)
    assert (len(data.training), len(data.held_out), len(data.validation)) == (4, 2, 2)
    first = [study.batch_of(data, 0, step)[0] for step in range(4)]
    again = [study.batch_of(data, 0, step)[0] for step in range(4)]
    other = [study.batch_of(data, 1, step)[0] for step in range(4)]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_steps_without_times_are_refused(
    streets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--data", str(streets), "--out", str(tmp_path), "--records", str(tmp_path)]
    assert study.main(["train", *folders]) == 2
    assert "must hold times.json" in capsys.readouterr().err


def test_images_of_another_size_are_refused(
    streets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, kind in (("images", "RGB"), ("labels", "L")):
        Image.new(kind, (50, 40)).save(streets / part / "val" / "1.png")
    assert run(streets, tmp_path / "out", study.GROUPS) == 2
    assert "must hold images of 64x48, got one of 50x40" in capsys.readouterr().err
