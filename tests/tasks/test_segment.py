"""The segmentation task: loss, masks, training with recipes, evaluation, initial weights, other models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dgt.runs import load_recipe, load_run
from dgt.tasks.network import ModelSettings
from dgt.tasks.segment import (
    SEGMENT,
    SegmentationTest,
    build_segmenter,
    predict_labels,
    segmentation_loss,
)
from dgt.training import evaluate, fit
from dgt_command import main

SHORT = (
    "--schedule.epochs=1",
    "--schedule.warmup_epochs=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
)
SMALL = (
    "--data.image_size=32",
    "--data.scale=[32,32]",
    "--data.batch_size=4",
    "--data.train_size=8",
    "--data.val_size=4",
    '--model.head={"channels":16,"auxiliary_channels":8}',
    *SHORT,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on scenes, trained through the command line."""
    folder = tmp_path_factory.mktemp("segment") / "run"
    weights = "--model.head.class_weights=[0.5,1,1,1,1,1,1,1,2]"
    assert main(["train", "scenes_segment", *SMALL, weights, f"--out={folder}"]) == 0
    return folder


def test_loss_is_the_mean_over_labeled_pixels() -> None:
    logits, labels = torch.randn(2, 4, 5, 6), torch.randint(0, 4, (2, 5, 6))
    assert torch.allclose(segmentation_loss(logits, labels), F.cross_entropy(logits, labels))
    ignored = labels.clone()
    ignored[0] = 255
    assert torch.allclose(
        segmentation_loss(logits, ignored), F.cross_entropy(logits[1:], labels[1:])
    )
    assert float(segmentation_loss(logits, torch.full_like(labels, 255))) == 0.0
    assert segmentation_loss(logits.half(), labels).dtype == torch.float32
    weights = [0.5, 2.0, *[1.0] * (logits.shape[1] - 2)]
    expected = F.cross_entropy(logits, labels, torch.tensor(weights))
    assert torch.allclose(segmentation_loss(logits, labels, weights), expected)


def test_a_run_is_evaluated_as_it_was_in_training(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert results["task"] == "segment"
    found = evaluate(run)
    for name in ("miou", "mean_accuracy", "accuracy"):
        assert found[name] == pytest.approx(results["metrics"][name])
    assert found["images"] == 4
    of_classes = [value for name, value in found.items() if name.startswith("iou/")]
    assert found["miou"] == pytest.approx(np.mean(of_classes), abs=1e-6)
    tested = evaluate(
        run, ["--data.test.scales=[0.5,1.0]", "--data.test.flip=true", "--data.test.window=32"]
    )
    assert 0 <= tested["miou"] <= 1


def test_an_output_of_nan_is_never_right(run: Path) -> None:
    loaded = load_run(run)
    torch.nn.init.constant_(loaded.network.decode_head.classifier.bias, torch.nan)
    data = loaded.recipe.data
    data.setup("validate")
    metrics = SEGMENT.metrics(data)
    for images, targets in data.val_dataloader():
        metrics.update(loaded.network, images, targets)
    found = metrics.compute()
    assert found["accuracy"] == found["miou"] == 0
    with pytest.raises(ValueError, match="the image: the model's output is not a number"):
        SEGMENT.predict(loaded, torch.zeros(3, 32, 32, dtype=torch.uint8), 1)


def test_evaluate_prints_its_measures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run / "checkpoints" / "best.ckpt"), "--data.batch_size=1"]) == 0
    assert "mIoU" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--data.test.scales=[]"]) == 2
    assert "data.test.scales must be at least one number above 0" in capsys.readouterr().err
    assert main(["visualize", str(run), "image.png", "--out", "figure.png"]) == 2
    assert "only classifiers can be inspected" in capsys.readouterr().err


def test_help_tells_the_keys_of_the_recipes_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "camvid", "--help"]) == 0
    assert "--data.test.window" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "--data.test.window" not in capsys.readouterr().out


def test_predict_writes_numbers_and_colors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.effect_noise((90, 57), 60).convert("RGB").save(tmp_path / "noise.png")
    (tmp_path / "notes.jpg").write_text("no image")
    images = [str(tmp_path / name) for name in ("noise.png", "notes.jpg", "nothing.png")]
    assert main(["predict", str(run), *images, "--top-k", "1"]) == 2
    assert "--top-k is for classifiers" in capsys.readouterr().err
    assert main(["predict", str(run), *images, "--out", str(tmp_path / "out"), "--json"]) == 1
    printed = capsys.readouterr()
    first, broken, missing = json.loads(printed.out)
    assert "cannot be read as an image" in broken["error"]
    assert "does not exist" in missing["error"]
    with Image.open(tmp_path / "out" / "noise_labels.png") as opened:
        labels = np.asarray(opened)
    assert labels.shape == (57, 90)
    assert labels.max() < 9
    shares = dict(first["classes"])
    assert sum(shares.values()) == pytest.approx(1)
    assert [Path(path).name for path in first["files"]] == ["noise_labels.png", "noise_overlay.png"]
    assert min(Image.open(first["files"][1]).size) > 200


def test_a_classifier_can_be_the_start(tmp_path: Path) -> None:
    few = [
        "--data.train_size=16",
        "--data.val_size=8",
        "--data.batch_size=8",
        "--data.image_size=32",
        *SHORT,
    ]
    classifier = fit(load_recipe("scenes", [*few, f"--out={tmp_path / 'classifier'}"]))
    frozen = ["--optimizer.lr=1e-12", "--schedule.warmup_lr=0", "--schedule.min_lr=0"]
    init = f"--model.init_from={classifier.folder}"
    segmenter = fit(
        load_recipe("scenes_segment", [*SMALL, *frozen, init, f"--out={tmp_path / 'segmenter'}"])
    )
    first, second = load_run(classifier.folder).network, load_run(segmenter.folder).network
    weights = dict(second.backbone.model.named_parameters())
    shared = [name for name, _ in first.named_parameters() if name in weights]
    assert len(shared) > 100
    assert all(
        torch.allclose(weights[name], dict(first.named_parameters())[name], atol=1e-6)
        for name in shared
    )
    with pytest.raises(
        ValueError, match=r"model.init_from: .* contains the weights of a model other than"
    ):
        fit(
            load_recipe(
                "scenes_segment",
                [*SMALL, init, "--model.name=test_resnet", f"--out={tmp_path / 'no'}"],
            )
        )


@pytest.mark.parametrize("name", ["test_resnet", "swin_tiny_patch4_window7_224"])
def test_a_peer_trains_on_the_same_recipe(name: str, tmp_path: Path) -> None:
    small = '{"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}'
    arguments = [f"--model.args={small}"] if name.startswith("swin") else []
    result = fit(
        load_recipe(
            "scenes_segment",
            [*SMALL, f"--model.name={name}", *arguments, f"--out={tmp_path / 'r'}"],
        )
    )
    assert 0 <= result.metrics["miou"] <= 1


def test_padded_batches_train(tmp_path: Path) -> None:
    shrink = [
        "--data.augmentation.min_ratio=0.5",
        "--data.augmentation.max_ratio=1.5",
        "--data.image_size=64",
    ]
    result = fit(
        load_recipe(
            "scenes_segment", [*SMALL, *shrink, "--data.scale=[64,64]", f"--out={tmp_path / 'r'}"]
        )
    )
    assert np.isfinite(result.metrics["miou"])


def test_wrong_label_maps_stop_a_run_with_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        for name in "abcd":
            for place, kind in (("images", "RGB"), ("labels", "L")):
                (tmp_path / place / split).mkdir(parents=True, exist_ok=True)
                Image.new(kind, (40, 40), 9 if kind == "L" else "red").save(
                    tmp_path / place / split / f"{name}.png"
                )
    command = [
        "train",
        "camvid_cpu",
        f"--data.root={tmp_path}",
        "--data.classes=[a,b]",
        *SMALL,
        "--data.val_size=4",
    ]
    assert main([*command, "--data.train_size=4", f"--out={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("dgt: error: ")
    assert "label 9 is not one of the 2 classes" in told
    assert "\n" not in told


def test_a_validation_without_a_labeled_pixel_is_reported(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, kind in (("images", "RGB"), ("labels", "L")):
        (tmp_path / place / "val").mkdir(parents=True)
        Image.new(kind, (40, 40), "white").save(tmp_path / place / "val" / "a.png")
    names = ",".join(load_run(run).class_names)
    place = [
        f"--data.root={tmp_path}",
        "--data.dataset=auto",
        f"--data.classes=[{names}]",
        "--data.val_size=1",
    ]
    assert main(["evaluate", str(run), *place]) == 2
    assert "label maps of the validation set have no labeled pixels" in capsys.readouterr().err


def test_heads_take_three_arguments() -> None:
    settings = ModelSettings("test_resnet", head={"width": 3})
    with pytest.raises(ValueError, match=r"keys among channels, .*, class_weights, got width"):
        build_segmenter(settings, 3, 32)
    for weights in ([1, 2], [1, 2, 0], [1, 2, "3"], 3):
        settings = ModelSettings("dgt_nano", head={"channels": 8, "class_weights": weights})
        with pytest.raises(ValueError, match=r"model.head.class_weights must be 3 numbers above 0"):
            build_segmenter(settings, 3, 32)


def test_several_scales_of_a_network_in_bfloat16() -> None:
    """Mixed precision gives bfloat16 logits, which torch cannot downsample on a CPU."""
    images = torch.linspace(-4, 4, 64).expand(1, 3, 48, 64)

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0], -x[:, 0]], 1).bfloat16()

    found = predict_labels(
        network, images, (64, 48), SegmentationTest(scales=(0.5, 1.0, 2.0), flip=True)
    )
    assert torch.equal(found[0], (images[0, 0] < 0).long())
