"""Other keys at fixed weights: rows report what was measured and are reused; the model is unchanged afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import dgt
from dgt.runs.model import export_model, make_record
from dgt.runs.recipe import load_recipe
from dgt.tasks import TASKS
from dgt.utils.errors import UserError
from studies import fixed_weights, replacement_pairs
from studies import replacement as replacing
from studies.fixed_weights import ahead, compare, markdown, shares_right
from studies.key_choice import key_choice, swapped
from studies.key_selectors import SELECTORS, Operands, attend_by
from studies.replacement import replacement

SMALL_DGT = "{stem_width: 8, dims: [16, 32, 64, 64], num_heads: [1, 2, 2, 2], depths: [1, 1, 1, 1], num_groups: 4}"
CLASSIFY = [
    "--model.name=dgt_nano",
    f"--model.args={SMALL_DGT}",
    "--data.image_size=32",
    "--model.args.stem_stride=1",
]


def make_run(folder: Path, recipe: str, *keys: str) -> Path:
    """An untrained model in the form of a finished run."""
    torch.manual_seed(0)
    settings = load_recipe(recipe, keys)
    names = [str(number) for number in range(8)]
    network = TASKS[settings.task].build(settings.model, len(names), settings.data["image_size"])
    export_model(folder / "model", network, make_record(settings, names))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DGT with layers of 256, 64, and 16 tokens."""
    return make_run(tmp_path_factory.mktemp("run"), "scenes", *CLASSIFY)


def read(folder: Path, name: str = "key_choice") -> dict[str, Any]:
    """The results in a folder."""
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return content


def test_a_stopped_experiment_goes_on_with_the_k_that_is_missing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every k is measured once, and the same command measures nothing again; with k = L all selectors agree."""
    words = ["--run", str(run), "--images=2"]
    key_choice([*words, "--top_k=300"], 1, tmp_path)
    key_choice([*words, "--top_k=300,8"], 1, tmp_path)
    content = read(tmp_path)
    assert [row["top_k"] for row in content["rows"]] == [300] * 8 + [8] * 8
    assert list(content["tokens"].values()) == [256, 64, 16]
    assert content["images"] == 2
    assert {"command", "device", "versions", "settings", "metric", "score"} < set(content)
    for row in content["rows"][:8]:
        assert (row["agreement"], row["score"]) == (1, content["score"])
        assert row["divergence"] < 1e-6
        assert row["error"] < 1e-5
    assert max(row["error"] for row in content["rows"][8:]) > 1e-3
    assert all(
        set(right) <= set("01") and len(right) == 2
        for row in content["rows"]
        for right in row["right"]
    )
    assert [row["right"] for row in content["rows"][:8]] == [content["right"]] * 8
    monkeypatch.setattr(fixed_weights, "measure", None)
    key_choice([*words, "--top_k=8"], 1, tmp_path)
    assert read(tmp_path) == content
    text = (tmp_path / "key_choice.md").read_text(encoding="utf-8")
    assert text == markdown(content)
    assert text.count("| groups, remainder |") == 5
    assert "| groups | +0.0 ± 0.0 |" in text
    with pytest.raises(UserError, match="has other settings"):
        key_choice([*words[:2], "--images=1"], 1, tmp_path)


def test_right_images_are_compared_in_pairs() -> None:
    """By hand: two draws of one row, one of the other; the differences of four images are 1, 0.5, 0, and -1."""
    mean, half = ahead({"right": ["1110", "1010"]}, {"right": ["0011"]})
    assert shares_right(["1110", "1010"]) == [1, 0.5, 1, 0]
    assert mean == pytest.approx((1 + 0.5 + 0 - 1) / 4)
    deviation = np.std([1, 0.5, 0, -1], ddof=1)
    assert half == pytest.approx(3.182446 * deviation / 2, rel=2e-3)  # t to two decimals


def test_swapped_layers_do_as_the_layers_themselves_and_are_put_back() -> None:
    """With groups and a layer's own k, the model's output does not change."""
    torch.manual_seed(0)
    model = timm.create_model("dgt_nano", num_classes=4, stem_stride=1).eval()
    dgt.set_attention(model, top_k=7)
    images = torch.randn(2, 3, 32, 32)
    names = []

    def answer(given: Operands) -> torch.Tensor:
        names.append(given.name)
        return attend_by("groups", 7, given)

    with torch.no_grad():
        own = model(images)
        with swapped(model, answer):
            torch.testing.assert_close(model(images), own)
        assert names == list(dgt.models.inspect.attention_layers(model))
        names.clear()
        assert torch.equal(model(images), own)
    assert not names


def test_agreement_divergence_and_error_are_those_of_each_image() -> None:
    """For classifiers and label maps, call by call."""
    full = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    own = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    agreement, divergence, error = compare([own, own], [full, full])
    assert agreement.tolist() == [1, 0, 1, 0]
    log = full[1].log_softmax(0) - own[1].log_softmax(0)
    torch.testing.assert_close(
        divergence, torch.stack([torch.zeros(()), (full[1].softmax(0) * log).sum()]).repeat(2)
    )
    torch.testing.assert_close(error, torch.tensor([0, 2**0.5] * 2))
    maps = torch.randn(2, 3, 4, 5)
    changed = maps.clone()
    changed[0, :, 0] = changed[0, :, 0].flip(0)
    agreement, _, _ = compare([changed], [maps])
    assert agreement[1] == 1
    assert agreement[0] == pytest.approx(
        1 - (changed.argmax(1) != maps.argmax(1))[0].sum().item() / 20
    )


def test_a_segmenter_is_measured_too(tmp_path: Path) -> None:
    """By mIoU, on the built-in scenes."""
    model = [
        "--model.name=dgt_nano",
        f"--model.args={SMALL_DGT}",
        "--model.head={channels: 8, auxiliary_channels: 8}",
    ]
    run = make_run(tmp_path / "run", "scenes_segment", *model, "--data.image_size=32")
    key_choice(["--run", str(run), "--images", "2", "--top_k", "4"], 2, tmp_path / "out")
    content = read(tmp_path / "out")
    assert (content["metric"], content["settings"]["seeds"], len(content["rows"])) == ("mIoU", 2, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a trained model: give --run RUN"),
        (["--run", "nowhere"], "there is no checkpoint, run folder or model folder 'nowhere'"),
        (["--run", "RUN", "--top_k", "4,0"], "top_k must be at least 1, got 0"),
        (
            ["--run", "RUN", "--top_k", "few"],
            "expected --run, --images, --top_k or --data.KEY, each with its value",
        ),
        (["--run", "RUN", "--images", "0"], "images must be at least 1"),
        (["--run", "RUN", "--model.name", "x"], "expected --run, .*, got --model.name x"),
        (["--run", "RUN", "--data.rot", "x"], "unknown recipe key 'data.rot'"),
    ],
)
def test_wrong_words_are_one_sentence(
    run: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    """Before anything is measured."""
    with pytest.raises((UserError, FileNotFoundError), match=message) as error:
        key_choice([str(run) if word == "RUN" else word for word in words], 1, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "key_choice.json").exists()


def test_a_run_without_groups_or_of_a_detector_is_one_sentence(tmp_path: Path) -> None:
    """There is nothing to select, or no logits to compare."""
    peer = make_run(
        tmp_path / "peer",
        "scenes",
        "--model.name=test_resnet",
        "--model.args={}",
        "--data.image_size=32",
    )
    with pytest.raises(UserError, match="must contain DGAttention layers, got a ResNet"):
        key_choice(["--run", str(peer)], 1, tmp_path / "out")


def test_a_vit_gets_every_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller ViT with random weights on a folder of label maps: all rows exist, including groups with k-means."""
    shape = {**replacing.SHAPE, "img_size": (48, 64), "embed_dim": 16, "depth": 1, "num_heads": 2}
    monkeypatch.setattr(replacing, "SHAPE", shape)
    monkeypatch.setattr(replacing, "GRID", (6, 8))
    monkeypatch.setattr(replacing, "GROUPS", 4)
    torch.manual_seed(0)
    weights = timm.models.VisionTransformer(**shape).state_dict()
    torch.save(
        {name if name.startswith("head.") else f"trunk.{name}": weights[name] for name in weights},
        tmp_path / "w",
    )
    for split, count in (("train", 3), ("val", 2)):
        for kind, mode in (("images", "RGB"), ("labels", "L")):
            (tmp_path / kind / split).mkdir(parents=True)
            for number in range(count):
                size = (64, 48, 3) if mode == "RGB" else (64, 48)
                pixels = torch.randint(11, size, dtype=torch.uint8).numpy()
                image = to_image(pixels.swapaxes(0, 1))
                image.save(tmp_path / kind / split / f"{number}.png")
    words = [
        "--weights",
        str(tmp_path / "w"),
        f"--data.root={tmp_path}",
        "--percent=25",
        "--data.scale=[64, 48]",
    ]
    replacement(words, 1, tmp_path / "out")
    content = read(tmp_path / "out", "replacement")
    assert [row["choice"] for row in content["rows"]] == list(SELECTORS)
    assert {row["top_k"] for row in content["rows"]} == {12}
    assert content["tokens"] == {"vit.blocks.0.attn": 48}
    error = {row["choice"]: row["error"] for row in content["rows"]}
    assert error["groups, remainder"] < min(error["groups"], error["random, one for all"])


def to_image(pixels: Any) -> Any:
    """An image of pixels."""
    from PIL import Image

    return Image.fromarray(pixels)


@pytest.mark.parametrize("name", ["", "nowhere", "text"])
def test_weights_of_something_else_are_one_sentence(tmp_path: Path, name: str) -> None:
    """Missing, no such file, or not weights."""
    (tmp_path / "text").write_text("weights")
    with pytest.raises(
        UserError,
        match=r"--weights must be a file of the weights that benchmarks/accelerate_camvid\.py",
    ):
        replacement(["--weights", str(tmp_path / name)], 1, tmp_path / "out")


def test_pairs_without_weights_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pairs.json"
    words = [
        "--weights",
        str(tmp_path / "none.pt"),
        "--data.root",
        str(tmp_path),
        "--out",
        str(out),
    ]
    assert replacement_pairs.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("replacement_pairs: error: --weights must be a file")
    assert told.count("\n") == 1
    assert not out.exists()
