"""`visualize`: one block, all blocks, and one block over a training run; options that exclude each other."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dgt
from dgt.data.loader import Key
from dgt.data.scenes import KINDS
from dgt.runs import LoadedRun, load_recipe
from dgt.runs.recipe import build_data
from dgt.tasks.network import build_classifier
from dgt.training import fit
from dgt_command.visualize import View, draw_training, visualize


def make_run(seed: int, name: str = "dgt_nano") -> LoadedRun:
    """A run as `load_run` returns it, of a model with random weights."""
    torch.manual_seed(seed)
    recipe = load_recipe("scenes", ["--model.name", name])
    network = build_classifier(recipe.model, len(KINDS), 64).eval()
    return LoadedRun(network, recipe, list(KINDS), Path(f"checkpoints/epoch{seed}.ckpt"))


RUNS = [make_run(0), make_run(1), make_run(2)]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image file in a folder of its own."""
    (tmp_path / "in").mkdir()
    Image.effect_noise((90, 70), 60).convert("RGB").save(tmp_path / "in" / "image.png")
    return tmp_path / "in" / "image.png"


@pytest.mark.parametrize(
    ("runs", "name", "options"),
    [
        (1, "a.png", {}),
        (1, "a.svg", {"block": 0}),
        (1, "a.png", {"all_blocks": True}),
        (1, "a.png", {"all_blocks": True, "head": 3}),
        (3, "a.png", {}),
        (3, "a.pdf", {"as_map": True, "block": 2, "head": 1}),
    ],
)
def test_every_kind_is_written(
    tmp_path: Path, image: Path, runs: int, name: str, options: dict[str, Any]
) -> None:
    visualize(RUNS[:runs], [image], tmp_path / name, View(**options))
    assert sorted(os.listdir(tmp_path)) == [name, "in"]
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize("as_map", [False, True])
def test_a_training_moves(tmp_path: Path, image: Path, as_map: bool) -> None:
    visualize(RUNS, [image], tmp_path / "a.gif", View(as_map=as_map))
    with Image.open(tmp_path / "a.gif") as opened:
        frames = []
        for frame in range(opened.n_frames):
            opened.seek(frame)
            frames.append(np.asarray(opened.convert("RGB")))
    assert len(frames) == 3
    assert (frames[0] != frames[1]).any()
    assert (frames[1] != frames[2]).any()


@pytest.mark.parametrize(
    ("runs", "images", "name", "options", "message"),
    [
        (1, 1, "a.gif", {}, "a GIF shows how groups change"),
        (1, 1, "a.txt", {}, "path must end in one of"),
        (2, 2, "a.png", {}, "need exactly one image, got 2"),
        (2, 1, "a.png", {"all_blocks": True}, "need exactly one checkpoint, got 2"),
        (1, 1, "a.png", {"all_blocks": True, "block": 1}, "block must not be given"),
        (1, 1, "a.png", {"block": 99}, "block must lie in 0 to 5"),
        (1, 1, "a.png", {"block": 0, "head": 1}, "head must lie in 0 to 0"),
        (0, 1, "a.png", {}, "at least one checkpoint"),
        (1, 1, "a.png", {"all_blocks": True, "head": 8}, "head must lie in 0 to 3"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    image: Path,
    runs: int,
    images: int,
    name: str,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        visualize(RUNS[:runs], [image] * images, tmp_path / name, View(**options))
    assert os.listdir(tmp_path) == ["in"]


def test_a_model_whose_attention_was_replaced(tmp_path: Path, image: Path) -> None:
    network = timm.create_model(
        "vit_tiny_patch16_224", num_classes=len(KINDS), img_size=64, patch_size=8, depth=2
    )
    dgt.replace_attention(network.eval(), num_groups=4, top_k=5)
    run = replace(make_run(0), network=network)
    for options in ({}, {"all_blocks": True}, {"block": 1, "as_map": True}):
        visualize([run], [image], tmp_path / "a.png", View(**options))
        assert (tmp_path / "a.png").stat().st_size > 5000


def test_validation_images_are_drawn_as_the_model_sees_them() -> None:
    """They are cropped once, by the data: TensorBoard shows the predictions on the images that are measured."""
    run = make_run(0)
    run = replace(run, recipe=load_recipe("scenes", ["--data.crop_ratio", "0.5"]))
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
    seen: list[torch.Tensor] = []
    hook = run.network.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    drawn = draw_training(run, [image])
    hook.remove()
    mean, std = (
        torch.tensor(getattr(run.recipe.data, name)).view(3, 1, 1) for name in ("mean", "std")
    )
    assert len(seen) == 2  # for its classes, and for its groups
    for pixels in seen:
        torch.testing.assert_close(pixels[0], (image / 255 - mean) / std)
    assert sorted(drawn) == ["groups", "predictions/0"]
    assert all(
        one.dtype == np.uint8 and one.shape[2] == 3 and min(one.shape[:2]) > 100
        for one in drawn.values()
    )


def test_a_training_hands_on_the_images_of_its_validation(tmp_path: Path) -> None:
    given: list[torch.Tensor] = []
    options = ["--out", str(tmp_path / "run"), "--schedule.epochs", "1", "--data.train_size", "64"]
    options += ["--data.val_size", "16", "--data.batch_size", "32", "--data.num_workers", "0"]

    def draw(run: LoadedRun, images: list[torch.Tensor]) -> dict[str, Any]:
        given.extend(images)
        return {}

    recipe = load_recipe("scenes", [*options, "--data.crop_ratio", "0.5"])
    fit(recipe, draw=draw)
    data = build_data(recipe)
    data.setup("validate")
    assert len(given) == 4
    for index, image in enumerate(given):
        assert torch.equal(image, data.datasets["val"][Key(0, 0, index)][0])


def test_a_model_without_groups(tmp_path: Path, image: Path) -> None:
    for options in ({}, {"all_blocks": True}):
        with pytest.raises(ValueError, match="'test_resnet' has no dynamic group attention"):
            visualize([make_run(0, "test_resnet")], [image], tmp_path / "a.png", View(**options))
