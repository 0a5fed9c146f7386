"""`python -m studies.content_selection`: a tiny run, resuming, and errors."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--seeds", "1", "--epochs", "1", "--train-size", "32", "--sizes", "32", "64"]


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    """The module, imported from the root of the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("studies.content_selection")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of flat colors, with four training and two test images each."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 4), ("val", 2)):
        for name, color in (("blue", (20, 30, 200)), ("red", (210, 20, 30))):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                shade = tuple(min(255, channel + 9 * number) for channel in color)
                Image.new("RGB", (40, 36), shade).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def words(images: Path) -> list[str]:
    return ["--data", str(images), *TINY, "--data.batch_size", "4", "--data.num_workers", "0"]


@pytest.fixture(scope="module")
def done(study: ModuleType, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of one seed and one epoch."""
    out = tmp_path_factory.mktemp("study") / "out"
    assert study.main([*words, "--out", str(out)]) == 0
    return out


def test_every_kind_is_trained_tested_and_compared(study: ModuleType, done: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    tested = {(row["kind"], row["size"], row["test"]) for row in summary["rows"]}
    assert tested == {
        (kind, test.size, test.name)
        for kind in study.KINDS
        for test in study.tests_of(kind, (32, 64))
    }
    beside = {
        row["kind"]: row["beside all keys"]
        for row in summary["rows"]
        if row["test"] == "as-trained"
    }
    assert beside["all keys"]["ahead"] == 0
    assert all(pair["seeds"] == [0] for pair in beside.values())
    assert (done / "summary.png").stat().st_size > 1000
    assert "random keys" in (done / "summary.md").read_text()


def test_logits_are_kept_for_every_image(done: Path) -> None:
    with np.load(done / "logits" / "groups" / "seed-0" / "64-k-4-remainder.npz") as content:
        assert content["logits"].shape == (4, 2)
        assert content["labels"].tolist() == [0, 0, 1, 1]


@torch.no_grad()
def test_all_keys_with_groups_are_global_attention(study: ModuleType, done: Path) -> None:
    """With k equal to the number of tokens no key is left for the residual key: same results with and without it."""
    run = study.load_run(done / "runs" / "groups" / "seed-0")
    images = torch.randn(2, 3, 64, 64)
    found = []
    for residual_keys in (0, 1):
        test = study.Test(64, "", top_k=256, residual_keys=residual_keys)
        with study.changed(run.network, test, 32):
            found.append(run.network(images))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    layers = study.compared_layers(run.network)
    assert [(layer.top_k, layer.residual_keys) for layer in layers] == [(32, 0)] * 2


def test_what_is_done_is_not_done_again(
    study: ModuleType, done: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "fit", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(study, "evaluate", lambda *_, **__: pytest.fail("tested again"))
    (done / "summary.json").unlink()
    assert study.main([*words, "--out", str(done)]) == 0
    assert (done / "summary.json").is_file()


def test_a_lost_test_alone_is_repeated(
    study: ModuleType, done: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between two tests: the finished training is reused."""
    lost = done / "logits" / "windows" / "seed-0" / "64-as-trained.npz"
    before = lost.read_bytes()
    lost.unlink()
    tested = []
    evaluate = study.evaluate
    monkeypatch.setattr(study, "evaluate", lambda *a, **k: (tested.append(1), evaluate(*a, **k)))
    assert study.main([*words, "--out", str(done)]) == 0
    assert len(tested) == 1
    assert lost.read_bytes() == before


def test_a_kind_that_another_process_works_on_is_left_to_it(
    study: ModuleType,
    words: list[str],
    tmp_path: Path,
    at_work: Callable[[Path], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = []
    monkeypatch.setattr(study, "train", lambda study, kind, seed: trained.append(kind))
    monkeypatch.setattr(study, "load_run", lambda run: None)
    monkeypatch.setattr(study, "measure", lambda *_: None)
    at_work(tmp_path / "logits" / "all-keys" / "seed-0")
    (tmp_path / "settings.json").write_text(
        json.dumps(study.parse([*words, "--out", "x"]).settings())
    )
    assert study.main([*words, "--out", str(tmp_path)]) == 0
    assert trained == [kind for kind in study.KINDS if kind != "all keys"]
    assert "all keys, seed 0: another process is at work on it" in capsys.readouterr().out


def test_bad_input_is_refused_in_a_sentence(
    study: ModuleType, done: Path, words: list[str], check_folders: Callable[..., None]
) -> None:
    check_folders(study, words, done, Path("train"))


def test_an_unknown_option_is_refused(
    study: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.parse([*words, "--out", "x", "--epoch", "2"])
    assert "unknown argument '--epoch'" in capsys.readouterr().err


def test_seeds_of_another_folder_are_counted_and_not_trained_again(
    study: ModuleType,
    done: Path,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(study, "fit", lambda *_, **__: pytest.fail("trained again"))
    summary = done / "summary.json"
    assert study.main([*words, "--out", str(tmp_path / "out"), "--earlier", str(summary)]) == 0
    assert _results(tmp_path / "out" / "summary.json") == _results(summary)


def _results(summary: Path) -> tuple[object, object]:
    content = json.loads(summary.read_text())
    return content["rows"], content["losses"]


def test_seeds_of_two_folders_are_averaged(study: ModuleType) -> None:
    of = sys.modules["studies.content_selection_summary"]
    answers = {
        (kind, 32, "as-trained"): {seed: np.arange(100) % every == 0 for seed in (0, 1)}
        for kind, every in (("groups", 4), ("all keys", 5), ("nothing", 10))
    }
    both = of.results_of(answers)
    first = {place: {0: seeds[0]} for place, seeds in both.items()}
    second = {place: {1: seeds[1]} for place, seeds in both.items()}
    assert of.merged(second, first) == of.merged(both, {})
    assert list(of.merged(second, first)["groups", 32, "as-trained"]) == [0, 1]


def test_an_earlier_summary_of_something_else_is_refused(
    study: ModuleType,
    done: Path,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": []}))
    for path, *changed in (
        (other,),
        (tmp_path / "missing.json",),
        (done / "summary.json", "--epochs", "2"),
    ):
        arguments = [*words, *changed, "--out", str(tmp_path / "out"), "--earlier", str(path)]
        assert study.main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "--earlier must be the summary.json of this study" in lines[0]
        assert not (tmp_path / "out").exists()


def test_intervals_over_images_count_an_image_once(study: ModuleType) -> None:
    """Four copies of a seed tell no more about images than one."""
    of = sys.modules["studies.content_selection_summary"]
    ahead = of.points_ahead(np.arange(100) % 4 == 0, np.arange(100) % 5 == 0)
    found = {seed: of.Found(0.25, {"all keys": ahead}) for seed in range(4)}
    one = of.compare({0: found[0]}, "all keys")
    four = of.compare(found, "all keys")
    assert one["ahead"] == pytest.approx(5.0)
    assert four["half_over_images"] == pytest.approx(one["half_over_images"])
    assert four["half_over_seeds"] == pytest.approx(0.0)
    assert one["half_over_seeds"] is None
