"""Opening trained models, and all the ways in which a file can be wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from dgt.models.heads.backbone import build_backbone
from dgt.models.inspect import attention_layers
from dgt.runs import load_recipe, load_run
from dgt.runs.checkpoints import read_checkpoint, step_checkpoints
from dgt.runs.model import compare_preparation, export_model, initialize, make_record, pretraining
from dgt.runs.recipe import parse_recipe
from dgt.training import Result
from dgt.utils.errors import LOGGER, UserError
from dgt.weights.folder import MODEL, SUMS, VARIABLE


@pytest.mark.parametrize(
    "place",
    ["", "model", "model/config.json", "model/model.safetensors", "checkpoints/step-00000008.ckpt"],
)
def test_each_of_a_runs_files_opens_the_same_model(finished: Result, place: str) -> None:
    run, whole = load_run(finished.folder / place), load_run(finished.folder)
    assert run.recipe == whole.recipe
    assert run.class_names == whole.class_names
    assert not run.network.training
    weights = whole.network.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in run.network.state_dict().items())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("test_vit", {}),
        ("beit_base_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2}),
        ("deit_tiny_distilled_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2}),
        ("cait_xxs24_224", {"depth": 1, "depth_token_only": 1, "embed_dim": 32, "num_heads": 2}),
    ],
)
def test_position_embeddings_are_resampled_to_another_size_of_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, arguments: dict[str, int]
) -> None:
    model = {"name": name, "args": arguments}
    caplog.set_level("INFO", LOGGER.name)
    recipe = parse_recipe({"model": model, "data": {"root": "x", "image_size": 32}})
    trained = timm.create_model(name, num_classes=2, img_size=32, **arguments).eval()
    export_model(tmp_path, trained, make_record(recipe, ["a", "b"]))
    larger = load_run(tmp_path, ["--data.image_size=64"]).network
    assert "trained with data.image_size 32: its position embeddings are resampled" in caplog.text
    assert larger(torch.zeros(1, 3, 64, 64)).shape == (1, 2)
    other = timm.create_model(name, num_classes=2, img_size=64, **arguments)
    initialize(other, tmp_path, ["a", "b"])
    weights = larger.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in other.state_dict().items())
    for key, value in trained.state_dict().items():
        if value.shape == weights[key].shape:
            assert torch.equal(value, weights[key])
        elif value.dim() == 3:  # smooth, with the tokens before it as they were
            torch.testing.assert_close(
                value.mean((0, 1)), weights[key].mean((0, 1)), atol=0.02, rtol=0
            )


def test_what_cannot_be_resampled_is_refused_with_the_size(tmp_path: Path) -> None:
    recipe = parse_recipe(
        {"model": {"name": "crossvit_tiny_240"}, "data": {"root": "x", "image_size": 240}}
    )
    small = {"embed_dim": (16, 32), "num_heads": (2, 2), "depth": [[1, 1, 0]]}
    trained = timm.create_model("crossvit_tiny_240", num_classes=2, **small)
    export_model(tmp_path, trained, make_record(recipe, ["a", "b"]))
    other = timm.create_model("crossvit_tiny_240", num_classes=2, img_size=480, **small)
    with pytest.raises(ValueError, match=r"trained with data\.image_size 240"):
        initialize(other, tmp_path, ["a", "b"])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint, .* '.*none\.ckpt'"):
        load_run(tmp_path / "none.ckpt")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint, .* a folder with one of model"):
        load_run(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.98])
@pytest.mark.parametrize("place", ["checkpoints/step-00000008.ckpt", "model/model.safetensors"])
def test_a_truncated_file(finished: Result, tmp_path: Path, place: str, share: float) -> None:
    shutil.copytree(finished.folder / "model", tmp_path, dirs_exist_ok=True)
    whole = (finished.folder / place).read_bytes()
    cut = tmp_path / Path(place).name
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=rf"{cut.name} .*truncated or damaged"):
        load_run(cut)


def test_a_file_that_is_not_ours(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="was not written by this version of `dgt train`"):
        load_run(tmp_path / "foreign.ckpt")
    torch.save({"dgt": Path("code")}, tmp_path / "objects.ckpt")
    with pytest.raises(ValueError, match=r"is truncated or damaged .*, or contains Python objects"):
        load_run(tmp_path / "objects.ckpt")
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json was written neither by `dgt train`"):
        load_run(tmp_path)


def test_a_folder_as_timm_writes_it_by_default(tmp_path: Path) -> None:
    network = timm.create_model("test_resnet", num_classes=2).eval()
    save_for_hf(network, str(tmp_path), {"label_names": ["cat", "dog"]})
    assert not (tmp_path / "model.safetensors").exists()
    images = torch.rand(1, 3, 64, 64)
    for place in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "config.json"):
        run = load_run(place)
        assert run.class_names == ["cat", "dog"]
        assert torch.equal(run.network(images), network(images))
    torch.save({"weights": Path("code")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is truncated .*, or contains Python"):
        load_run(tmp_path)


@pytest.mark.parametrize("lost", ["recipe", "class_names", "model"])
def test_a_record_that_lacks_a_part(finished: Result, tmp_path: Path, lost: str) -> None:
    stored = read_checkpoint(step_checkpoints(finished.folder)[0])
    if lost == "model":
        stored.pop("model_ema", None)
    del (stored if lost == "model" else stored["dgt"])[lost]
    torch.save(stored, tmp_path / "partial.ckpt")
    with pytest.raises(ValueError, match=r"partial\.ckpt is truncated or damaged"):
        load_run(tmp_path / "partial.ckpt")


def test_weights_of_another_model(finished: Result, tmp_path: Path) -> None:
    stored = read_checkpoint(step_checkpoints(finished.folder)[0])
    stored["dgt"]["recipe"]["model"]["name"] = "test_vit"
    torch.save(stored, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt .* than model 'test_vit'.*Missing key"):
        load_run(tmp_path / "other.ckpt")


def test_a_model_folder_of_another_shape(finished: Result, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "model", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dgt"]["class_names"] = ["a", "b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"size mismatch .*Size\(\[8, .*Size\(\[2, "):
        load_run(tmp_path)


def test_a_backbone_starts_from_a_classifier_of_its_architecture(finished: Result) -> None:
    source = load_run(finished.folder).network.state_dict()
    network = nn.Module()
    network.backbone = build_backbone("test_resnet")
    initialize(network, finished.folder, ["road"], "segment")
    loaded = network.backbone.model.state_dict()
    assert loaded
    assert all(torch.equal(value, source[key]) for key, value in loaded.items())
    network.backbone = build_backbone("resnet10t")
    with pytest.raises(ValueError, match=r"model\.init_from: .* backbone: .* size mismatch"):
        initialize(network, finished.folder, ["road"], "segment")


@pytest.mark.parametrize("task", ["classify", "segment", "detect"])
def test_that_first_weights_saw_images_of_another_scale_is_said(
    task: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"mean": [0, 0, 0], "std": [1, 1, 1]}
    before, now = parse_recipe({"data": data}), parse_recipe({"task": task})
    same = {"data": data}
    if task == "detect":
        same = {"model": {"head": {"options": {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}}}}
    compare_preparation(now, now, "weights")
    compare_preparation(parse_recipe({"task": task, **same}), before, "weights")
    assert caplog.records == []
    compare_preparation(now, before, "weights")
    place = "model.head.options.image_mean" if task == "detect" else "data.mean"
    (record,) = caplog.records
    assert "images of mean [0.0, 0.0, 0.0] and std [1.0, 1.0, 1.0]" in record.message
    assert f"set {place} and" in record.message


def test_how_timm_prepared_images_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", LOGGER.name)
    model = timm.create_model("test_resnet")
    model.pretrained_cfg |= {"crop_pct": 0.5, "interpolation": "nearest"}
    model.pretrained_cfg |= {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    compare_preparation(parse_recipe({}), pretraining(model), "timm's")
    assert "data.crop_ratio 0.5, here 0.875" in caplog.text
    assert "data.augmentation.interpolation nearest, here bicubic" in caplog.text
    assert "mean" not in caplog.text
    model.pretrained_cfg["crop_pct"] = 1.15  # as of VOLO; no recipe can say so
    assert pretraining(model).data.augmentation.interpolation == "nearest"
    wrapped = nn.Module()
    wrapped.backbone = build_backbone("test_resnet")  # which saw another mean
    compare_preparation(parse_recipe({"task": "segment"}), pretraining(wrapped), "timm's")
    assert "images of mean [0.5, 0.5, 0.5]" in caplog.text


@pytest.mark.parametrize(
    "change", [{"in_chans": 1}, {"input_size": [3, 32, 48]}, {"crop_mode": "squash"}]
)
def test_a_preparation_that_is_not_ours_is_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    model = timm.create_model("test_resnet", num_classes=2, in_chans=change.pop("in_chans", 3))
    model.pretrained_cfg |= change
    save_for_hf(model, str(tmp_path))
    if "crop_mode" in change:
        load_run(tmp_path)
        assert "has crop_mode 'squash'" in caplog.text
        return
    with pytest.raises(UserError, match="only squares of 3 channels are read"):
        load_run(tmp_path)


@pytest.mark.parametrize("before", [0, 1])
def test_another_number_of_residual_keys_than_in_training_is_reported(
    before: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights fit with and without, so that only what they were trained with can tell."""
    name, other = "dgt_nano.imagenette", 1 - before
    run = load_run("dgt_nano.scenes")
    settings = replace(run.recipe.model, args=run.recipe.model.args | {"residual_keys": before})
    recipe = replace(run.recipe, model=settings)
    folder = tmp_path / name
    export_model(folder, run.network, make_record(recipe, run.class_names))
    sums = [(sha256((folder / file).read_bytes()).hexdigest(), file) for file in MODEL]
    (folder / SUMS).write_text("".join(f"{digest}  {file}\n" for digest, file in sums))
    monkeypatch.setenv(VARIABLE, str(tmp_path))

    def open_all(**arguments: int) -> list[nn.Module]:
        words = [f"--model.args.{key}={value}" for key, value in arguments.items()]
        fresh = timm.create_model("dgt_nano", num_classes=8, **arguments)
        initialize(fresh, folder, run.class_names)
        named = timm.create_model(name, pretrained=True, **arguments)
        return [load_run(folder, words).network, fresh, named]

    open_all(residual_keys=before)
    assert caplog.records == []
    networks = open_all(residual_keys=other)
    told = f"was trained with residual_keys {before}, and is used with {other}: its weights fit"
    assert [told in record.message for record in caplog.records] == [True] * 3
    for network in networks:
        assert {layer.residual_keys for layer in attention_layers(network).values()} == {other}


def test_weights_that_share_memory_are_exported_each_by_its_name(tmp_path: Path) -> None:
    """Two layers with one weight, a view of it, and rows of one tensor that do not overlap."""
    recipe = load_recipe("scenes")
    network = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "c", "d")})
    network["b"].weight = network["a"].weight
    network["c"].weight = nn.Parameter(network["a"].weight.detach().T)
    rows = torch.arange(8.0).view(2, 4)
    network["a"].bias, network["d"].bias = nn.Parameter(rows[0]), nn.Parameter(rows[1])
    export_model(tmp_path, network, make_record(recipe, ["x"]))
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = network.state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
