"""Folders of weights: packed from a run, found by name, checked, published; errors are clear sentences."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import dgt  # noqa: F401  (registers the models)
from dgt.acceleration import AttentionSite, Measurement, Report, Setting
from dgt.data.scenes import KINDS
from dgt.runs import load_recipe, load_run, predict
from dgt.runs.model import export_model, make_record
from dgt.tasks import TASKS
from dgt.tasks.network import build_classifier
from dgt.training import evaluate
from dgt.utils.errors import UserError
from dgt.utils.records import wilson
from dgt.weights import SHIPPED, check_weights, default_models, find_weights, list_weights
from dgt.weights.folder import FILES, SUMS, VARIABLE, write_sums
from dgt_command import main
from tools.weights import main as tool
from tools.weights_card import about_data, jackknife
from tools.weights_pack import LeftOut, Packing, make_weights, to_half, without_folders
from tools.weights_publish import publish

SCENES = list_weights()["dgt_nano.scenes"]
PHOTOGRAPHS = list_weights()["dgt_nano.imagenette"]
KEYS = ["--data.image_size=32", "--data.val_size=48", "--data.batch_size=8", "--data.cache=false"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run as `fit` writes it, of a model that saw one batch of noise."""
    folder = tmp_path_factory.mktemp("runs") / "trial"
    recipe = load_recipe("scenes", [*KEYS, f"--out={folder}", "--trainer.accelerator=cpu"])
    torch.manual_seed(0)
    network = build_classifier(recipe.model, len(KINDS), 32).train()
    with torch.no_grad():
        network(torch.randn(4, 3, 32, 32))
    export_model(folder / "model", network.eval(), make_record(recipe, list(KINDS)))
    (folder / "recipe.yaml").write_text(f"name: scenes\nout: {folder}\n")
    (folder / "log.txt").write_text("epoch 1/1\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    measured = evaluate(folder)
    results: dict[str, Any] = {
        "recipe": "scenes",
        "task": "classify",
        "model": "dgt_nano",
        "seed": 0,
        "epochs": 1,
    }
    results |= {
        "steps": 1,
        "seconds": 36.0,
        "device": "cpu",
        "precision": "32-true",
        "parameters": 2_239_304,
    }
    results |= {"versions": {"torch": "2.11"}, "command": f"dgt train scenes --out {folder}"}
    results["metrics"] = {name: measured[name] for name in ("loss", "top1", "top5")}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.fixture(scope="module")
def packed(run: Path) -> Path:
    """The run packed as a folder of weights."""
    return make_weights(run, run.parent / "weights" / "dgt_nano.imagenette", Packing(half=True))


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """Another one, for damaging."""
    return Path(shutil.copytree(packed, tmp_path / packed.name))


def test_a_run_is_packed_with_its_story(run: Path, packed: Path) -> None:
    results = check_weights(packed)
    assert sorted(path.name for path in packed.iterdir()) == sorted([*FILES, SUMS])
    top1 = results["evaluation"]["metrics"]["top1"]
    assert top1["low"] < top1["value"] < top1["high"]
    assert top1["value"] == evaluate(packed)["top1"]
    card = (packed / "README.md").read_text()
    assert f"| top-1 | {100 * top1['value']:.2f} % |" in card
    assert "0.01 hours on cpu" in card
    small, whole = (
        path.stat().st_size
        for path in (packed / "model.safetensors", run / "model/model.safetensors")
    )
    assert small < 0.55 * whole


def test_weights_for_larger_images_are_measured_on_them(run: Path, tmp_path: Path) -> None:
    packed = make_weights(run, tmp_path / "dgt_nano.large", Packing(image_size=64))
    evaluation = check_weights(packed)["evaluation"]
    assert load_run(packed).recipe.data.image_size == 64
    assert evaluation["metrics"]["top1"]["value"] == evaluate(packed)["top1"]
    pairs = zip(evaluation["labels"].split(), evaluation["predicted"].split(), strict=True)
    assert sum(label == guess for label, guess in pairs) / 48 == evaluate(packed)["top1"]
    card = (packed / "README.md").read_text()
    assert "at the end of the training, at 32 px" in card
    assert "On 48 images of 64 px" in card


def test_no_folder_of_this_machine_is_published(run: Path, packed: Path) -> None:
    for path in packed.iterdir():
        assert str(run.parent).encode() not in path.read_bytes()
    assert without_folders(
        "dgt train /a/b/run.yaml --data.root=/data/of me/x 1/2 https://host/a/b"
    ) == ("dgt train run.yaml --data.root=of me/x 1/2 https://host/a/b")


def test_nothing_half_written_is_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "dgt_nano.trial"
    worse = Path(shutil.copytree(run, tmp_path / "worse"))
    results = json.loads((worse / "results.json").read_text())
    (worse / "results.json").write_text(json.dumps(results | {"metrics": {"top1": 0.99}}))
    assert tool(["make", str(worse), "--out", str(out)]) == 2
    assert "the run's top-1 is 99.00 %, that of what would be packed" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    (worse / "results.json").unlink()
    with pytest.raises(UserError, match=r"is not a finished run: it has no results\.json"):
        make_weights(worse, out)
    with pytest.raises(FileExistsError, match="is no earlier folder of weights"):
        make_weights(run, worse)


def test_data_that_nobody_described_needs_a_description(run: Path, tmp_path: Path) -> None:
    assert about_data(["auto", "imagenette128"])["license_id"] == "other"
    with pytest.raises(UserError, match=r"data of recipe 'mine' lacks data, .*: give --about FILE"):
        about_data(["auto", "mine"])
    about = {"data": "Mine.", "license": "None.", "license_id": "other"}
    with pytest.raises(UserError, match="the description lacks limits"):
        about_data(["auto", "mine"], about)
    assert about_data(["auto", "mine"], about | {"limits": "All."})["data"] == "Mine."
    (tmp_path / "about.yaml").write_text("data: [")
    with pytest.raises(UserError, match="is not valid UTF-8 YAML"):
        make_weights(run, tmp_path / "out", Packing(about=tmp_path / "about.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_included_weights_are_whole_and_small(name: str) -> None:
    folder = list_weights()[name]
    check_weights(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 7e6


def test_the_weights_of_scenes_are_as_good_as_their_card_says() -> None:
    top1 = check_weights(SCENES)["evaluation"]["metrics"]["top1"]
    assert top1["value"] > 0.95
    assert evaluate(SCENES, ["--data.val_size=100"])["top1"] > 0.9


def test_the_accuracy_on_photographs_is_that_of_the_predictions() -> None:
    evaluation = check_weights(PHOTOGRAPHS)["evaluation"]
    labels, predicted = (evaluation[key].split() for key in ("labels", "predicted"))
    right = [label == guess for label, guess in zip(labels, predicted, strict=True)]
    top1 = evaluation["metrics"]["top1"]["value"]
    assert len(right) == 3925
    assert sum(right) / len(right) == pytest.approx(top1)


def test_timm_cannot_build_the_segmenter() -> None:
    with pytest.raises(UserError, match="contains no classifier, which timm needs"):
        timm.create_model("dgt_nano.camvid", pretrained=True)
    network = load_run("dgt_nano.camvid").network
    assert network(torch.rand(1, 3, 90, 120)).shape == (1, 11, 90, 120)


def test_the_segmenter_knows_streets(shared_data: Path) -> None:
    found = evaluate(
        "dgt_nano.camvid", [f"--data.root={shared_data / 'camvid'}", "--data.val_size=10"]
    )
    assert found["miou"] > 0.5
    assert found["accuracy"] > 0.85


def test_the_weights_know_photographs(shared_data: Path) -> None:
    root = shared_data / "imagenette128"
    found = evaluate("dgt_nano.imagenette", [f"--data.root={root}", "--data.val_size=200"])
    assert found["top1"] > 0.8
    dogs = sorted((root / "val" / "n02102040").iterdir())[:3]
    names = [row.classes[0][0] for row in predict(load_run("dgt_nano.imagenette"), dogs)]
    assert names.count("English springer (n02102040)") >= 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md", "log.txt"])
def test_a_changed_file_is_reported(copy: Path, name: str) -> None:
    (copy / name).write_bytes((copy / name).read_bytes() + b" ")
    with pytest.raises(UserError, match=rf"{name} does not match its checksum in SHA256SUMS"):
        check_weights(copy)
    if name in ("model.safetensors", "config.json"):
        with pytest.raises(UserError, match="does not match its checksum in SHA256SUMS"):
            load_run(copy)


def test_a_missing_file_and_damaged_sums_are_reported(copy: Path, tmp_path: Path) -> None:
    (copy / "log.txt").unlink()
    with pytest.raises(UserError, match=r"log\.txt is missing"):
        check_weights(copy)
    lines = (copy / SUMS).read_text().splitlines(keepends=True)
    (copy / SUMS).write_text("".join(line for line in lines if "log.txt" not in line))
    with pytest.raises(UserError, match=r"lacks the checksum of log\.txt"):
        check_weights(copy)
    (copy / SUMS).write_bytes(b"\xff\n\n")
    with pytest.raises(UserError, match=r"lacks the checksum of model\.safetensors"):
        check_weights(copy)
    with pytest.raises(UserError, match="is not a weights folder: it has no SHA256SUMS"):
        check_weights(tmp_path)


def test_an_incomplete_card_is_reported(copy: Path) -> None:
    card = (copy / "README.md").read_text()
    rows = [line for line in card.splitlines() if not line.startswith("| top-5")]
    for text, message in (
        ("\n".join(rows), "lists 1 metrics with an interval, but 2 were measured"),
        (card.partition("## Not good for")[0], "is incomplete: it lacks 'Not good for'"),
        ("", "it lacks 'Use', 'Data', 'License', 'Training', 'Metrics', 'Not good for'"),
    ):
        (copy / "README.md").write_text(text)
        write_sums(copy)
        with pytest.raises(UserError, match=message):
            check_weights(copy)


def test_timm_opens_them_by_name(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `local-dir:` does, with the classes and image size of the training."""
    monkeypatch.setenv(VARIABLE, str(packed.parent))
    images = torch.rand(2, 3, 32, 32)
    for folder in (packed, SCENES):
        named, local = (
            timm.create_model(name, pretrained=True).eval()
            for name in (folder.name, f"local-dir:{folder}")
        )
        with torch.no_grad():
            assert torch.equal(named(images), local(images))
        assert tuple(named.pretrained_cfg["label_names"]) == KINDS
        assert named.pretrained_cfg["input_size"] == local.pretrained_cfg["input_size"]
        assert next(named.parameters()).dtype == torch.float32
    assert timm.create_model("dgt_nano.scenes", pretrained=True, num_classes=5)(images).shape == (
        2,
        5,
    )
    features = timm.create_model("dgt_nano.scenes", pretrained=True, features_only=True)
    assert [each.shape[1] for each in features(images)] == [32, 64, 128, 256]
    given = {"source": "local-dir", "file": str(SCENES), "num_classes": 8}
    chosen = timm.create_model("dgt_nano.imagenette", pretrained=True, pretrained_cfg_overlay=given)
    assert chosen.num_classes == 8


def test_without_a_tag_or_without_pretrained_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert timm.create_model("dgt_nano").num_classes == 1000
    assert timm.create_model("dgt_nano.imagenette").num_classes == 10
    assert timm.list_pretrained("dgt_*") == [PHOTOGRAPHS.name, SCENES.name]
    names = r"dgt_nano\.imagenette or dgt_nano\.scenes"
    with pytest.raises(UserError, match=f"the name of trained weights, {names}, got dgt_nano$"):
        timm.create_model("dgt_nano", pretrained=True)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for dgt_tiny"):
        timm.create_model("dgt_tiny", pretrained=True)
    with pytest.raises(UserError, match=r"'dgt_nano.other' .*DGT_WEIGHTS .* dgt_nano.scenes"):
        find_weights("dgt_nano.other")


def test_wrong_weights_are_refused_by_timm_too(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(copy.parent))
    with pytest.raises(UserError, match="set by DGT_WEIGHTS, has none"):
        find_weights("dgt_nano.other")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architecture": "dgt_tiny"}))
    with pytest.raises(UserError, match="does not match its checksum in SHA256SUMS"):
        timm.create_model(copy.name, pretrained=True)
    write_sums(copy)
    with pytest.raises(UserError, match="contains weights of 'dgt_tiny', not of 'dgt_nano'"):
        timm.create_model(copy.name, pretrained=True)


def test_the_newest_run_goes_before_the_shipped_weights(tmp_path: Path) -> None:
    assert [path for path, _ in default_models(tmp_path)] == [PHOTOGRAPHS]
    (shown,) = default_models(tmp_path, shipped=SCENES.name)
    assert shown[0] == SCENES
    for name in ("first", "second"):
        export = tmp_path / name / "model"
        export.mkdir(parents=True)
        (export / "model.safetensors").touch()
    os.utime(tmp_path / "first" / "model" / "model.safetensors", (2e9, 2e9))
    found = list(default_models(tmp_path))
    assert [path.name for path, _ in found] == ["first", "second", PHOTOGRAPHS.name]
    assert ["in the future: check the clock" in line for _, line in found] == [True, False, False]


def test_weights_are_named_where_a_model_is_asked_for(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(copy.parent))
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((90, 70), 60).convert("RGB").save("photo.jpg")
    assert main(["predict", copy.name, "photo.jpg"]) == 0
    assert main(["evaluate", copy.name, "--json"]) == 0
    assert main(["evaluate", "dgt_nano.nothing"]) == 2
    assert "or the name of weights, dgt_nano" in capsys.readouterr().err
    assert load_run("dgt_nano.scenes").source.parent == SCENES


def test_predict_needs_no_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((90, 70), 60).convert("RGB").save("photo.jpg")
    assert main(["predict", "photo.jpg", "--top-k", "1"]) == 0
    told = capsys.readouterr()
    assert "no model given and no suitable run in runs/: using dgt_nano.imagenette" in told.err
    assert told.out.startswith("photo.jpg\n")
    shutil.copytree(run, tmp_path / "runs" / "mine")
    assert main(["predict", "photo.jpg", "photo.jpg"]) == 0
    assert "using the newest suitable run, runs/mine" in capsys.readouterr().err
    assert main(["predict", "runs/mine", "photo.jpg"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["predict", "runs/mine"]) == 2
    assert (
        capsys.readouterr().err
        == "dgt: error: 'runs/mine' is interpreted as the model: add image files after it\n"
    )
    assert main(["predict", "missing.jpg"]) == 2
    assert "there is no image file or folder 'missing.jpg'" in capsys.readouterr().err
    assert main(["predict", "nowhere", "photo.jpg"]) == 2
    assert (
        "weights, dgt_nano.camvid, dgt_nano.imagenette, dgt_nano.scenes" in capsys.readouterr().err
    )


def test_the_command_lists_checks_and_publishes(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(copy.parent))
    assert main(["weights", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {*SHIPPED, copy.name}
    assert list_weights()[copy.name] == copy
    with pytest.raises(UserError, match=f"the name of trained weights, .*{copy.name}"):
        timm.create_model("dgt_nano", pretrained=True)
    assert main(["weights", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        path.name: check_weights(path) for path in list_weights().values()
    }
    assert main(["weights", "check", str(copy)]) == 0
    assert " MB  top-1 " in capsys.readouterr().out
    assert tool(["publish", str(copy), "--repo", "someone/dgt", "--dry-run"]) == 0
    assert "would upload to someone/dgt, a dry run:\n  model.safetensors" in capsys.readouterr().out
    for run, words, message in (
        (tool, ["make", str(copy)], "Missing option '--out'"),
        (main, ["weights", "check"], "Missing argument 'FOLDER'"),
        (tool, ["publish", "nowhere", "--repo", "a/b"], "Directory 'nowhere' does not exist"),
        (main, ["weights", "list", "--data.root", "x"], "No such option '--data.root'"),
        (tool, ["publish", str(copy), "--repo", "dgt"], "repo must be USER/NAME, got 'dgt'"),
        (tool, ["publish", str(copy), "--repo", "a b/c"], "repo must be USER/NAME"),
    ):
        assert run(words) == 2
        assert message in capsys.readouterr().err


def test_publishing_uploads_the_files_and_nothing_else(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    class Hub:
        def __init__(self, token: str) -> None:
            calls.append({"token": token})

        def create_repo(self, repo: str, exist_ok: bool) -> None:
            calls.append({"repo": repo})

        def upload_folder(self, **arguments: Any) -> None:
            if "refused" in arguments["repo_id"]:
                raise ConnectionError("403\nForbidden")
            calls.append(arguments)

    monkeypatch.setattr("tools.weights_publish.HfApi", Hub)
    monkeypatch.setattr("tools.weights_publish.get_token", lambda: None)
    with pytest.raises(UserError, match="needs a token of the hub: `hf auth login`, or"):
        publish(copy, "someone/dgt_nano.scenes")
    assert calls == []
    monkeypatch.setattr("tools.weights_publish.get_token", lambda: "secret")
    (copy / "notes.txt").write_text("mine")
    assert "hf-hub:someone/dgt" in publish(copy, "someone/dgt")
    assert "notes.txt" not in calls[-1]["allow_patterns"]
    with pytest.raises(UserError, match="publishing to someone/refused failed: 403 Forbidden"):
        publish(copy, "someone/refused")


def test_intervals() -> None:
    """Wilson's interval from the textbook formula at 0 and 1/2; a mean's jackknife is its standard error times t."""
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.0, 10)[0] == 0.0
    assert wilson(0.0, 10)[1] == pytest.approx(0.2775, abs=1e-4)
    values = [0.1 * number for number in range(10)]
    mean = sum(values) / 10
    low, high = jackknife(mean, [(sum(values) - value) / 9 for value in values])
    spread = (sum((value - mean) ** 2 for value in values) / 9 / 10) ** 0.5
    assert (high - low) / 2 == pytest.approx(2.262 * spread)


def test_parts_are_left_out_in_turn(run: Path) -> None:
    """48 images in 6 batches: with the third part left out, two batches are missing."""
    whole = evaluate(run, metrics=lambda data: LeftOut(TASKS["classify"], data, 3))
    assert whole == {**evaluate(run), "left_out": whole["left_out"]}
    for name in ("loss", "top1"):
        assert sum(part[name] for part in whole["left_out"]) / 3 == pytest.approx(whole[name])
    with pytest.raises(UserError, match=r"data\.batch_size: expected at least 7 batches .* got 6"):
        evaluate(run, metrics=lambda data: LeftOut(TASKS["classify"], data, 7))


def test_numbers_that_float16_cannot_hold_are_refused() -> None:
    assert to_half(torch.ones(2, 2)).dtype == torch.float16
    assert to_half(torch.ones(2)).dtype == to_half(torch.ones(2, 3, 4)).dtype == torch.float32
    assert to_half(torch.ones(2, 2, dtype=torch.int64)).dtype == torch.int64
    with pytest.raises(UserError, match="numbers that float16 cannot"):
        to_half(torch.full((2, 2), 1e6))


def test_a_plan_is_measured_and_packed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a timm model's run, since DGT's own attention is not accelerated; too few keys to preserve its outputs."""
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    words = [
        "--model.name=vit_tiny_patch16_224",
        f"--model.args={json.dumps(sizes)}",
        "--model.drop_path_rate=0",
    ]
    recipe = load_recipe("scenes", [*KEYS, *words, "--trainer.accelerator=cpu"])
    vit = Path(shutil.copytree(run, tmp_path / "vit"))
    torch.manual_seed(0)
    network = build_classifier(recipe.model, len(KINDS), 32).eval()
    network.blocks[
        0
    ].attn.qkv.weight.data *= 50  # otherwise attention is uniform, and groups are exact
    shutil.rmtree(vit / "model")
    export_model(vit / "model", network, make_record(recipe, list(KINDS)))
    results = json.loads((vit / "results.json").read_text())
    (vit / "results.json").write_text(json.dumps(results | {"metrics": evaluate(vit)}))
    sizes = {"heads": 2, "tokens": 65, "key_tokens": 65, "channels": 8}
    grouped = Measurement(Setting("groups", groups=4, keys=1))
    layers = [AttentionSite("blocks.0.attn", prefix_tokens=1, measurement=grouped, **sizes)]
    layers += [AttentionSite("blocks.1.attn", reason="no faster")]
    report = Report(0.1, layers, predicted_error=0.09, measured_error=0.095)
    report.save(tmp_path / "plan.json")
    out = tmp_path / "vit.trial"
    packed = ["--plan", str(tmp_path / "plan.json")]
    assert tool(["make", str(vit), "--out", str(out), *packed]) == 0
    told = check_weights(out)["evaluation"]
    assert told["plan"]["grouped"] == 1
    assert told["plan"]["attentions"] == 2
    assert set(told["plan"]["metrics"]) == set(told["metrics"])
    card = (out / "README.md").read_text()
    assert (
        f"With the plan, on these images: top-1 {100 * told['plan']['metrics']['top1']:.2f} %"
        in card
    )
    assert 'dgt.apply_plan(model, "vit.trial/plan.json")' in card
    assert "plan.json" in publish(out, "a/b", dry_run=True)
    capsys.readouterr()
    for more in ([], ["--plan", str(out / "plan.json")]):
        assert main(["evaluate", str(out), "--json", *more]) == 0
    plain, accelerated = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert plain["loss"] != accelerated["loss"]
    assert accelerated["top1"] == told["plan"]["metrics"]["top1"]
    assert tool(["make", str(run), "--out", str(tmp_path / "no.plan"), *packed]) == 2
    assert (
        "model must have the plan's layers, but has no 'blocks.0.attn'" in capsys.readouterr().err
    )
    assert not (tmp_path / "no.plan").exists()
    (out / "plan.json").unlink()
    with pytest.raises(UserError, match=r"plan\.json is missing"):
        check_weights(out)
