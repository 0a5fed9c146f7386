"""`python -m studies.camvid_hours`: tiny runs, interrupted and not, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from dgt.runs.folder import RESULTS
from studies import camvid_hours as study

SIZE = (48, 64)


@pytest.fixture
def streets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of two halves, dark and light, that are two classes; a study of a few steps."""
    for name, value in {
        "SIZE": SIZE,
        "PARTS": 2,
        "STEPS": {study.ALL_KEYS: 2, study.GROUPS: 4},
        "HELD_OUT_EVERY": 3,
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


def run(streets: Path, out: Path, *words: str) -> int:
    for kind in study.KINDS:
        weights = out / f"weights-{study.name_of(kind)}"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / RESULTS).write_text('{"metrics": {"top1": 0.5}}')
    folders = ["--data", str(streets), "--out", str(out), "--records", str(out / "records")]
    return study.main(["train", *folders, "--seeds", "0", *words])


@pytest.fixture(autouse=True)
def _random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No first weights: training them takes longer than a test."""
    build = study.build
    monkeypatch.setattr(
        study, "build", lambda kind, _weights, names, seed: build(kind, None, names, seed)
    )


def test_both_kinds_leave_a_record_and_an_interrupted_run_goes_on(
    streets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stopped after its first part ends with the weights of a run at one stroke."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(streets, whole) == 0
    record = json.loads((whole / "records" / "groups-1-residual-key-seed-0.json").read_text())
    figure = tmp_path / "figure.png"
    assert study.main(["figure", "--records", str(whole / "records"), "--figure", str(figure)]) == 0
    assert Image.open(figure).width > 100
    assert [point["step"] for point in record["curve"]] == [2, 4]
    assert record["epochs"] == 4 * study.BATCH / 4
    assert 0 <= record["validation"]["miou"] <= 1
    test = study.Run.test

    def stop(self: study.Run, images: object) -> dict[str, float]:
        if self.step == 4:
            raise KeyboardInterrupt
        return test(self, images)  # type: ignore[arg-type]

    monkeypatch.setattr(study.Run, "test", stop)
    with pytest.raises(KeyboardInterrupt):
        run(streets, stopped, "--kinds", study.GROUPS)
    monkeypatch.setattr(study.Run, "test", test)
    assert run(streets, stopped, "--kinds", study.GROUPS) == 0
    name = "groups-1-residual-key-seed-0.pt"
    one, other = (torch.load(out / name, weights_only=True) for out in (whole, stopped))
    for key, value in one["network"].items():
        assert torch.equal(value, other["network"][key]), key


def test_kinds_of_one_seed_see_the_same_images(streets: Path) -> None:
    data = study.read(streets)
    assert (len(data.training), len(data.held_out), len(data.validation)) == (4, 2, 2)
    first = [study.batch_of(data, 0, step)[0] for step in range(4)]
    again = [study.batch_of(data, 0, step)[0] for step in range(4)]
    other = [study.batch_of(data, 1, step)[0] for step in range(4)]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_unfinished_weights_are_refused(
    streets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training of weights that was asked to stop leaves checkpoints, and no error."""
    (tmp_path / "weights-all-keys" / "checkpoints").mkdir(parents=True)
    folders = ["--data", str(streets), "--out", str(tmp_path), "--records", str(tmp_path)]
    assert study.main(["train", *folders]) == 2
    assert "must hold finished weights of 'all keys'" in capsys.readouterr().err


def test_images_of_another_size_are_refused(
    streets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, kind in (("images", "RGB"), ("labels", "L")):
        Image.new(kind, (50, 40)).save(streets / part / "val" / "1.png")
    assert run(streets, tmp_path / "out") == 2
    assert "must hold images of 64x48, got one of 50x40" in capsys.readouterr().err
