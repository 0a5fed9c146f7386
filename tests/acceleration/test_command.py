"""`dgt accelerate`: names, folders of timm and of transformers, images, and outputs that cannot be written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import nn

from dgt_command import accelerate as app
from dgt_command import main

SIZE = 96


def vit() -> nn.Module:
    sizes = {
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "img_size": SIZE,
        "num_classes": 5,
        "patch_size": 4,
    }
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def opened(size: int, **config: Any) -> app.OpenedModel:
    """The model as opened for images of one size."""
    return app.OpenedModel(vit(), {"input_size": (3, size, size), **config}, {})


def test_images_that_cannot_be_read_are_left_out(tmp_path, monkeypatch, caplog) -> None:
    for number in range(3):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "9.png").write_bytes(b"no image")
    monkeypatch.setattr(app, "_open", lambda name, size: opened(size))
    caplog.set_level("INFO", logger="dgt")
    report = app.accelerate_model("vit", tmp_path, 0.1, SIZE, 4)
    assert len(report.layers) == 2
    assert "9.png: is not an image" in caplog.text
    assert "settings of each call, run 1 of at most 2\n" in caplog.text
    assert "original outputs, run 1 of at most 1; at most about" in caplog.text
    # Where nothing is faster, without the kernels or on a busy machine, the search ends before that.
    if any(layer.setting.choice == "groups" for layer in report.layers):
        assert "error propagation from blocks.0.attn, run 1 of at most 3; at most" in caplog.text
    monkeypatch.setattr(app, "_open", lambda name, size: opened(size))
    with pytest.raises(ValueError, match=r"accept the inputs, got a \(1, 3, 32, 32\) .*: Inp"):
        app.accelerate_model("vit", tmp_path, 0.1, 32, 4)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2 readable images, but .* has 1"):
        app.accelerate_model("vit", tmp_path, 0.1, SIZE, 4)


def saved(folder, processor: bool = True) -> str:
    """A transformers folder, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision = transformers.SiglipVisionConfig(**sizes, image_size=96, patch_size=8)
    text = transformers.SiglipTextConfig(**sizes, vocab_size=50, max_position_embeddings=8)
    config = transformers.SiglipConfig(text_config=text.to_dict(), vision_config=vision.to_dict())
    transformers.SiglipModel(config).save_pretrained(folder)
    if processor:
        transformers.SiglipImageProcessor(
            image_mean=[0.1] * 3, image_std=[0.2] * 3
        ).save_pretrained(folder)
    return str(folder)


@pytest.mark.usefixtures("slow_attention")
def test_folders_of_transformers(tmp_path, caplog, monkeypatch) -> None:
    """The vision tower of an image-text model, at its own size and at another."""
    for number in range(4):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / f"{number}.png")
    name = saved(tmp_path / "model")
    report = app.accelerate_model(name, tmp_path, 0.5, None, 4)
    assert [
        (row.name, row.tokens)
        for row in report.layers
        if row.num_prefix_tokens == 0 and row.reason == ""
    ] == [
        ("encoder.layers.0.self_attn", 144),
        ("encoder.layers.1.self_attn", 144),
    ]
    assert "no processor" not in caplog.text
    report = app.accelerate_model(name, tmp_path, 0.5, 128, 4)
    assert report.layers[0].tokens == 256
    with pytest.raises(ValueError, match=r"model must accept the inputs, got .*: "):
        app.accelerate_model(name, tmp_path, 0.5, 4, 4)
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="model must accept the inputs"):
        app.accelerate_model(name, tmp_path, 0.5, 4, 4)
    assert (
        "has no image processor: images are normalized with ImageNet's mean and std" in caplog.text
    )
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"model '.*model' cannot be loaded: "):
        app.accelerate_model(name, tmp_path, 0.5, None, 4)


def test_models_of_timm_on_the_hub(tmp_path, monkeypatch) -> None:
    """timm opens the folder by its configuration: size, normalization, head, and names."""
    config = {
        "pretrained_cfg": {"mean": (0.1,) * 3, "std": (0.2,) * 3, "input_size": (3, SIZE, SIZE)}
    }
    options = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": SIZE, "num_classes": 5}
    model, create = timm.create_model("vit_tiny_patch16_224", **options), timm.create_model
    timm.models.save_for_hf(
        model, tmp_path, model_args=options, model_config=config, safe_serialization=True
    )
    monkeypatch.setattr(app, "check_on_hub", lambda *_: None)
    monkeypatch.setattr(
        app, "hf_hub_download", lambda name, file: {"timm/vit": str(tmp_path / file)}[name]
    )
    monkeypatch.setattr(
        timm,
        "create_model",
        lambda name, **more: create({"hf-hub:timm/vit": f"local-dir:{tmp_path}"}[name], **more),
    )
    network, found, _ = app._open("timm/vit", None)
    assert network.state_dict().keys() == model.state_dict().keys()
    assert [tuple(found[key]) for key in ("input_size", "mean", "std")] == [
        (3, SIZE, SIZE),
        (0.1,) * 3,
        (0.2,) * 3,
    ]


@pytest.mark.parametrize(
    ("settings", "mean", "warned"),
    [
        ({"do_normalize": False}, (0.0,) * 3, False),
        ({"image_mean": None}, None, True),
        ({}, (0.1,) * 3, False),
    ],
)
def test_the_normalization_of_a_processor(settings, mean, warned, tmp_path, caplog) -> None:
    name = saved(tmp_path)
    told = {
        "image_processor_type": "SiglipImageProcessor",
        "image_mean": [0.1] * 3,
        "image_std": [0.2] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**told, **settings}))
    assert app._open(name, None).config.get("mean") == mean
    assert ("no image processor" in caplog.text) == warned


def test_a_model_without_an_encoder_of_images_of_that_name(tmp_path) -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    parts = {f"{part}_config": sizes for part in ("text", "image", "multimodal")}
    transformers.FlavaModel(transformers.FlavaConfig(**parts)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be loaded: 'FlavaModel' .* 'vision_model'"):
        app._open(str(tmp_path), None)


def test_images_are_taken_from_all_over(tmp_path, monkeypatch) -> None:
    for number in range(7):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(app, "_open", lambda name, size: opened(8, mean=(0,) * 3, std=(1,) * 3))
    monkeypatch.setattr(
        app, "accelerate", lambda model, images, error: (255 * images[:, 0, 0, 0]).round().tolist()
    )
    for count, expected in ((4, [0, 1, 3, 5]), (2, [0, 3]), (9, [*range(7)])):
        assert app.accelerate_model("vit", tmp_path, 0.1, None, count) == expected


def test_images_of_sixteen_bits_are_taken_to_use_all(tmp_path, monkeypatch, caplog) -> None:
    """Which is said."""
    for number in range(2):
        Image.new("I;16", (8, 8), 4095).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(app, "_open", lambda name, size: opened(8, mean=(0,) * 3, std=(1,) * 3))
    monkeypatch.setattr(app, "accelerate", lambda model, images, error: images.unique().tolist())
    assert app.accelerate_model("vit", tmp_path, 0.1, None, 2) == pytest.approx([15 / 255])
    assert caplog.text.count("have 16 bits: values are taken to use all of them") == 1


def test_places_that_cannot_be_written_are_refused_first(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for options, message in (
        (["--out", str(tmp_path)], "--out .* cannot be written: it is a folder"),
        (
            ["--out", str(tmp_path / "file" / "plan")],
            "--out .* cannot be written: no file can be created in .*file",
        ),
        (
            ["--plot", str(tmp_path / "picture.txt")],
            r"--plot must end in \.png, \.pdf or \.svg, got .*picture\.txt",
        ),
    ):
        assert main(["accelerate", "none", "--images", str(tmp_path), *options]) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["vit_of_nobody", "no/such/folder"])
def test_names_of_no_model(name, tmp_path) -> None:
    for number in range(2):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{number}.png")
    with pytest.raises(ValueError, match=f"model must be a timm model, .* a folder, got '{name}'"):
        app.accelerate_model(name, tmp_path, 0.1, None, 4)
    with pytest.raises(ValueError, match="did you mean vit_small_patch16_224"):
        app.accelerate_model("vit_small_patch16_22", tmp_path, 0.1, None, 4)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"model '.*model' cannot be loaded: .*config\.json"):
        app.accelerate_model(str(tmp_path / "model"), tmp_path, 0.1, None, 4)
