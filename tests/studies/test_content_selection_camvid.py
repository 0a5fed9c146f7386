"""`python -m studies.content_selection_camvid`: a tiny run, resuming, and errors."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((64, 48), (40, 60))  # of the two images of each split


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    """The module, imported from the root of the checkout, with small tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        module = importlib.import_module("studies.content_selection_camvid")
        patch.setattr(module, "SCALES", {64: 48, 96: 72})
        yield module


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two halves, dark and light, that are two classes."""
    folder = tmp_path_factory.mktemp("images")
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


@pytest.fixture(scope="module")
def words(images: Path) -> list[str]:
    tiny = [
        "--data.classes",
        '["dark", "light"]',
        "--data.batch_size",
        "2",
        "--data.image_size",
        "32",
    ]
    return ["--data", str(images), "--seeds", "1", "--epochs", "1", *tiny]


@pytest.fixture(scope="module")
def done(study: ModuleType, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of one seed and one epoch."""
    out = tmp_path_factory.mktemp("study") / "out"
    assert study.main([*words, "--out", str(out)]) == 0
    return out


def test_every_kind_is_trained_tested_and_compared(study: ModuleType, done: Path) -> None:
    rows = json.loads((done / "summary.json").read_text())["rows"]
    tested = [(row["kind"], row["width"], row["test"]) for row in rows]
    assert tested == [place for kind in study.KINDS for place in study.tests_of(kind)]
    assert all(row["beside all keys"]["seeds"] == [0] for row in rows)
    dense = [row for row in rows if row["kind"] == "all keys"]
    assert [row["beside all keys"]["ahead"] for row in dense] == [[0.0], [0.0]]
    assert "Swin of its size" in (done / "summary.md").read_text()


def test_every_pixel_of_every_image_is_counted(done: Path) -> None:
    with np.load(done / "confusions" / "groups" / "seed-0" / "96-residual-key.npz") as content:
        counts = content["confusions"]
    assert counts.shape == (2, 2, 2)
    for image, (width, height) in zip(counts, SIZES, strict=True):
        half = width // 2 * height
        assert image.sum(axis=1).tolist() == [width * height - half, half]


@torch.no_grad()
def test_groups_with_all_keys_are_tested_as_such(study: ModuleType, done: Path) -> None:
    run = study.load_run(done / "runs" / "groups" / "seed-0")
    images = torch.randn(1, 3, 64, 64)
    found = {}
    for test in ("as-trained", *study.TESTS):
        with study.changed(run.network, study.Place("groups", 64, test)):
            found[test] = run.network(images)
    layers = study.compared_layers(run.network.backbone.model)
    assert [(layer.top_k, layer.residual_keys) for layer in layers] == [(64, 0)] * 2
    assert (found["all-keys"] - found["as-trained"]).norm() > 0
    with study.changed(run.network, study.Place("groups", 64, "all-keys")):
        for layer in layers:
            layer.residual_keys = 1
        torch.testing.assert_close(run.network(images), found["all-keys"], rtol=1e-4, atol=1e-4)


def test_a_residual_key_in_training_moves_the_centroids_and_gets_gradients(
    study: ModuleType,
) -> None:
    models = importlib.import_module("studies.content_selection_models")
    options = {"num_heads": 2, "num_groups": 4, "top_k": 3}
    torch.manual_seed(0)
    plain, layer = (models.GroupAttention(count, dim=8, **options).train() for count in (0, 1))
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 6, 5, 8)
    assert (layer(x) - plain(x)).norm() > 0
    layer(x).square().sum().backward()
    assert layer.qkv.weight.grad.norm() > 0
    assert layer.group_counts.sum() == 2 * 2 * 2 * 30  # two calls, of two images and two heads
    layer.top_k = 30
    layer.eval()
    dense = torch.nn.functional.scaled_dot_product_attention(
        *layer.split_heads(x), scale=layer.scale
    )
    torch.testing.assert_close(layer(x), layer.merge_heads(dense, x), rtol=1e-4, atol=1e-5)


def test_a_lost_test_alone_is_repeated(
    study: ModuleType, done: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between two tests: the finished training is reused."""
    lost = done / "confusions" / "random-keys" / "seed-0" / "96-as-trained.npz"
    with np.load(lost) as content:
        before = content["confusions"]
    lost.unlink()
    tested = []
    evaluate = study.evaluate
    monkeypatch.setattr(study, "evaluate", lambda *a, **k: (tested.append(1), evaluate(*a, **k)))
    assert study.main([*words, "--out", str(done)]) == 0
    assert len(tested) == 1
    with np.load(lost) as content:
        assert np.array_equal(content["confusions"], before)


def test_kinds_that_are_not_asked_for_are_not_trained(
    study: ModuleType, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(study, "work_on", lambda study, kind, seed: begun.append(kind))
    kinds = ["--kinds", "groups", "all keys"]
    assert study.main([*words, "--seeds", "2", "--out", str(tmp_path / "out"), *kinds]) == 0
    assert begun == ["groups", "all keys"] * 2


def test_bad_input_is_refused_in_a_sentence(
    study: ModuleType, done: Path, words: list[str], check_folders: Callable[..., None]
) -> None:
    check_folders(study, words, done, Path("images/train"))
