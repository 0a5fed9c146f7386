"""A complete small training: the contents of its folder, reproducibility, and clear errors."""

from __future__ import annotations

import copy
import errno
import importlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from dgt.data.image_io import BrokenImagesError
from dgt.data.scenes import Scenes
from dgt.data.segmentation import SegmentationTest
from dgt.runs import LoadedRun, load_recipe, load_run, predict
from dgt.runs.checkpoints import read_checkpoint
from dgt.runs.folder import is_run, run_folder
from dgt.runs.recipe import parse_recipe
from dgt.runs.settings import to_yaml
from dgt.tasks import TASKS
from dgt.tasks.classify import read_image
from dgt.training import Result, evaluate, fit
from dgt.training.fabric import build_fabric
from dgt.training.fit import build_state, check_processes, check_sizes
from dgt.training.loop import Training
from dgt.training.state import Checkpoints, TrainingState
from dgt.utils.errors import LOGGER

from .conftest import SMALL


def test_the_run_folder_holds_everything(finished: Result) -> None:
    folder = finished.folder
    for name in ("recipe.yaml", "results.json", "metrics.jsonl", "checkpoints/best.ckpt"):
        assert (folder / name).is_file(), name
    assert list(folder.glob("events.*"))
    results = json.loads((folder / "results.json").read_text())
    assert results["metrics"] == finished.metrics
    assert (results["epochs"], results["steps"], results["global_batch"], results["seed"]) == (
        2,
        8,
        16,
        0,
    )
    assert {"python", "torch", "timm", "lightning-fabric"} <= set(results["versions"])
    assert load_recipe(folder / "recipe.yaml").to_dict() == {
        **load_run(folder).recipe.to_dict(),
        "name": "scenes",
    }


def test_timm_opens_the_model_folder(finished: Result) -> None:
    run = load_run(finished.folder)
    network = timm.create_model(f"local-dir:{finished.folder / 'model'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(network(images), run.network(images))
    assert network.pretrained_cfg["label_names"] == run.class_names
    assert tuple(network.pretrained_cfg["input_size"]) == (3, 32, 32)


def test_evaluation_finds_what_the_training_found(finished: Result) -> None:
    metrics = evaluate(finished.folder)
    assert (metrics["images"], metrics["broken_images"]) == (40, 0)
    for key in ("top1", "top5", "loss"):
        assert metrics[key] == pytest.approx(finished.metrics[key], rel=1e-5)
    assert (
        evaluate(finished.folder / "checkpoints" / "best.ckpt", ["--data.val_size", "8"])["images"]
        == 8
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "--optimizer.lr=1",
            r"recipe key 'optimizer\.lr' cannot be changed in an evaluation, only data\., ",
        ),
        ("--trainer.devices=2", r"recipe key 'trainer\.devices' cannot be changed"),
        ("--data.rot=x", r"unknown recipe key 'data\.rot'; did you mean data\.root"),
        ("--trainer.accelerator=abacus", "recipe section 'trainer' does not fit this machine"),
    ],
)
def test_an_evaluation_honours_or_refuses_every_key(
    finished: Result, override: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(finished.folder, [override])


def test_an_evaluation_takes_its_precision(finished: Result) -> None:
    exact = evaluate(finished.folder, ["--trainer.precision=32-true"])
    rough = evaluate(finished.folder, ["--trainer.precision=bf16-true"])
    assert 0 < abs(rough["loss"] - exact["loss"]) < 0.2


def test_an_evaluation_leaves_a_loaded_run_as_it_is(finished: Result) -> None:
    run = load_run(finished.folder)
    before = copy.deepcopy(run.network.state_dict())
    evaluate(run, ["--trainer.precision=bf16-true", "--data.val_size=8"])
    for name, value in run.network.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_a_model_of_one_size_is_measured_at_another(tmp_path: Path) -> None:
    network = "--model.args={window_size: 4, embed_dim: 8, depths: [1, 1], num_heads: [1, 1]}"
    few = [
        "--data.image_size=64",
        "--data.val_size=8",
        "--data.train_size=16",
        "--schedule.epochs=1",
        network,
    ]
    keys = [*SMALL, "--model.name=swin_tiny_patch4_window7_224", *few, f"--out={tmp_path / 'swin'}"]
    folder = fit(load_recipe("scenes", keys)).folder
    assert evaluate(folder, ["--data.image_size=128"])["images"] == 8


def test_the_same_recipe_gives_the_same_model(finished: Result, tmp_path: Path) -> None:
    again = fit(load_recipe("scenes", [*SMALL, f"--out={tmp_path / 'again'}"]))
    other = fit(load_recipe("scenes", [*SMALL, f"--out={tmp_path / 'other'}", "--seed=1"]))
    first = load_run(finished.folder).network.state_dict()
    assert all(
        torch.equal(value, first[key])
        for key, value in load_run(again.folder).network.state_dict().items()
    )
    assert any(
        not torch.equal(value, first[key])
        for key, value in load_run(other.folder).network.state_dict().items()
    )


def test_runs_without_a_place_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = [*SMALL, "--schedule.epochs=1", "--data.train_size=16", "--data.val_size=8"]
    assert [str(fit(load_recipe("scenes", few)).folder) for _ in range(2)] == [
        "runs/scenes",
        "runs/scenes-2",
    ]
    with pytest.raises(FileExistsError, match=r"which run .*: runs/scenes, runs/scenes-2$"):
        fit(load_recipe("scenes", few), resume=True)


@pytest.mark.parametrize(
    "name", ["plain", "010", "no", "Gr\N{LATIN SMALL LETTER O WITH DIAERESIS}sse"]
)
def test_a_run_is_known_by_its_name_however_a_recipe_has_it(tmp_path: Path, name: str) -> None:
    recipe = load_recipe("scenes", {"name": name})
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe.to_dict()))
    assert is_run(tmp_path, name)
    assert not is_run(tmp_path, "another")


def test_a_recipe_of_the_users_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "recipe.yaml"
    place.write_text("name: mine  # a note\nbase: scenes\n")
    with pytest.raises(FileExistsError, match="files that do not belong to a run"):
        run_folder(load_recipe(place, [f"--out={tmp_path}"]))


def test_numbers_of_a_training_that_saved_nothing_are_not_mixed_with_others(
    tmp_path: Path,
) -> None:
    recipe = load_recipe("scenes", {"out": str(tmp_path)})
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe.to_dict()))
    other = load_recipe("scenes", {"out": str(tmp_path), "optimizer.lr": 0.1})
    assert run_folder(other) == tmp_path
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    assert run_folder(recipe) == tmp_path
    for resume in (False, True):
        with pytest.raises(FileExistsError, match=r"started with optimizer\.lr .* now .* 0\.1"):
            run_folder(other, resume)


def test_resuming_needs_no_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr("timm.models._builder.load_pretrained", refuse)
    model = {"name": "test_resnet", "args": {"pretrained": True}}
    recipe = parse_recipe({"model": model, "trainer": {"accelerator": "cpu"}})
    fabric = build_fabric(recipe.trainer)
    data = SimpleNamespace(num_classes=2, batch_size=4)
    assert build_state(recipe, fabric, data, fresh=False).network is not None
    with pytest.raises(ValueError, match="no network"):
        build_state(recipe, fabric, data, fresh=True)


def test_a_model_is_opened_without_the_file_of_its_first_weights(tmp_path: Path) -> None:
    file = tmp_path / "first.pth"
    torch.save(
        timm.create_model("test_resnet", num_classes=len(Scenes.class_names)).state_dict(), file
    )
    keys = ["--schedule.epochs=1", "--data.train_size=16", "--data.val_size=4"]
    keys += [f"--model.args.checkpoint_path={file}", f"--out={tmp_path / 'run'}"]
    folder = fit(load_recipe("scenes", [*SMALL, *keys])).folder
    file.unlink()
    trained = load_run(folder).network.state_dict()
    opened = timm.create_model(f"local-dir:{folder / 'model'}", pretrained=True).state_dict()
    assert all(torch.equal(value, opened[name]) for name, value in trained.items())


def test_processes_that_see_other_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = SimpleNamespace(datasets={"train": range(8), "val": range(4)}, class_names=("a", "b"))
    check_processes(data)
    for other, sentence in (
        (({"train": 7, "val": 4}, ("a", "b")), "to process 1 .*images are {'train': 7, 'val': 4}"),
        (({"train": 8, "val": 4}, ("a", "c")), "to process 1 .*: b gone; c new"),
    ):
        monkeypatch.setattr(
            importlib.import_module("dgt.training.fit"),
            "gather_objects",
            lambda mine, other=other: [mine, other],
        )
        with pytest.raises(ValueError, match=sentence):
            check_processes(data)


def test_a_signal_that_comes_while_a_line_is_written_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reentrant(*_: Any) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(LOGGER, "warning", reentrant)
    training: Any = SimpleNamespace(stops=[])
    Training.stop(training, signal.SIGTERM, None)
    assert training.stops == [signal.SIGTERM]


def test_first_weights_come_from_another_run(finished: Result, tmp_path: Path) -> None:
    few = [
        *SMALL,
        "--data.train_size=16",
        "--schedule.epochs=1",
        "--optimizer.lr=1e-12",
        "--schedule.warmup_lr=0",
    ]
    few += [
        "--schedule.min_lr=0",
        f"--out={tmp_path / 'tuned'}",
        f"--model.init_from={finished.folder}",
    ]
    tuned = load_run(fit(load_recipe("scenes", few)).folder).network.state_dict()
    source = load_run(finished.folder).network.state_dict()
    weights = [key for key, value in source.items() if value.ndim > 1]
    assert all(torch.allclose(tuned[key], source[key], atol=1e-6) for key in weights)


def test_data_without_a_place_is_reported() -> None:
    with pytest.raises(
        ValueError,
        match=r"recipe 'cifar10' needs images: give --data\.root, a folder with images in train/CLASS/",
    ):
        fit(load_recipe("cifar10"))
    with pytest.raises(TypeError, match="recipe must be what load_recipe returns, got 'cifar10'"):
        fit("cifar10")  # type: ignore[arg-type]


def test_a_model_that_cannot_be_written_ends_a_training_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    few = ["--schedule.epochs=1", "--data.train_size=16", "--data.val_size=8"]
    recipe = load_recipe("scenes", [*SMALL, *few, f"--out={tmp_path / 'run'}"])
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("dgt.training.fit"), "export_model", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            fit(recipe)
    assert not (tmp_path / "run" / "results.json").exists()
    assert fit(recipe, resume=True).metrics.keys() >= {"top1", "loss"}
    assert load_run(tmp_path / "run").source == tmp_path / "run" / "model" / "model.safetensors"


def test_unreadable_images_are_listed_and_the_folder_serves_again(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(8):
                Image.new("RGB", (40, 40)).save(tmp_path / split / name / f"{index}.png")
    whole = (tmp_path / "train" / "cat" / "3.png").read_bytes()
    (tmp_path / "train" / "cat" / "3.png").write_bytes(b"")
    run = tmp_path / "run"
    keys = [
        *SMALL,
        "--data.dataset=auto",
        f"--data.root={tmp_path}",
        "--data.val_size=null",
        "--data.train_size=null",
    ]
    recipe = load_recipe("scenes", [*keys, "--schedule.epochs=1", f"--out={run}"])
    with pytest.raises(BrokenImagesError, match="of the 16 images of split 'train' cannot be read"):
        fit(recipe)
    assert "cat/3.png" in (run / "broken_images.txt").read_text()
    (tmp_path / "train" / "cat" / "3.png").write_bytes(whole)
    fit(recipe)
    assert (run / "results.json").is_file()
    assert not (run / "broken_images.txt").exists()


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match="files that do not belong to a run: choose another"):
        fit(load_recipe("scenes", [*SMALL, f"--out={tmp_path}"]))


def test_predictions_are_sorted_and_sum_to_one(finished: Result, tmp_path: Path) -> None:
    Image.new("RGB", (50, 70), "red").save(tmp_path / "red.png")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    found = predict(
        finished.folder,
        [tmp_path / "red.png", tmp_path / "broken.jpg", tmp_path / "nowhere.png"],
        top_k=99,
    )
    scores = [score for _, score in found[0].classes]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1, abs=1e-5)
    assert {name for name, _ in found[0].classes} == set(load_run(finished.folder).class_names)
    assert found[1].classes == []
    assert "broken.jpg' cannot be read as an image" in str(found[1].error)
    assert "does not exist" in str(found[2].error)
    alone = predict(finished.folder, str(tmp_path / "red.png"), top_k=99)
    assert [each.classes for each in alone] == [found[0].classes]
    assert read_image(load_run(finished.folder), tmp_path / "red.png")[0].shape == (1, 3, 32, 32)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        predict(finished.folder, [], top_k=0)


def test_a_length_in_steps_ends_in_the_middle_of_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        "--schedule.steps=6",
        "--schedule.warmup_steps=2",
        "--schedule.decay=linear",
        "--trainer.check_val_every=2",
    ]
    result = fit(load_recipe("scenes", [*SMALL, *steps, f"--out={tmp_path / 'run'}"]))
    assert json.loads((result.folder / "results.json").read_text())["steps"] == 6
    assert {"top1", "loss"} <= set(result.metrics)
    assert "epoch 2/2" in capsys.readouterr().out


def test_a_loss_that_is_no_number_stops_the_training_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Training.backward

    def spoil(training: Training, batches: Any) -> Any:
        for batch in batches:
            batch.images.fill_(torch.nan)
        return whole(training, batches)

    monkeypatch.setattr(Training, "backward", spoil)
    keys = [*SMALL, "--trainer.max_skipped=null", f"--out={tmp_path / 'run'}"]
    with pytest.raises(FloatingPointError, match=r"the loss became nan in epoch 1; lower optim"):
        fit(load_recipe("scenes", keys))


def test_pictures_are_drawn_when_asked_for_and_cost_no_more_than_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first and the last epoch, and after every third."""
    given: list[int] = []

    def draw(run: LoadedRun, images: list[torch.Tensor]) -> dict[str, Any]:
        given.append(len(images))
        raise RuntimeError("no ink")

    few = [
        "--schedule.epochs=4",
        "--data.train_size=16",
        "--data.val_size=8",
        "--trainer.pictures_every=3",
    ]
    fit(load_recipe("scenes", [*SMALL, *few, f"--out={tmp_path / 'run'}"]), draw=draw)
    assert given == [4, 4, 4]
    assert (
        capsys.readouterr().err.count(
            "the validation images were not drawn: RuntimeError('no ink')"
        )
        == 3
    )


def test_a_best_checkpoint_that_could_not_be_written_does_not_stand_in_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, whole = iter([0.5, 0.4, 0.3]), Checkpoints.write

    def write(checkpoints: Checkpoints, state: TrainingState, path: Path) -> None:
        is_full = path.name == "best.ckpt" and state.progress.epoch == 1
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr("dgt.training.state.atomic_write", refuse)
            whole(checkpoints, state, path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Training, "validate", lambda _: {"top1": next(scores)})
    monkeypatch.setattr(Checkpoints, "write", write)
    keys = ["--schedule.epochs=3", "--data.train_size=16", f"--out={tmp_path / 'run'}"]
    folder = fit(load_recipe("scenes", [*SMALL, *keys])).folder
    assert read_checkpoint(folder / "checkpoints" / "best.ckpt")["progress"]["epoch"] == 2
    assert json.loads((folder / "results.json").read_text())["best"] == 0.4


def test_each_epoch_gives_one_line(finished: Result) -> None:
    log = (finished.folder / "log.txt").read_text().splitlines()
    lines = [line for line in log if "epoch" in line]
    assert ["epoch 1/2  loss" in lines[0], "epoch 2/2  loss" in lines[1], len(lines)] == [
        True,
        True,
        2,
    ]
    assert all("images/s" in line and "top-1" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--optimizer.lr_batch=64"], "a step has 16 images, and optimizer.lr is stated for 64: "),
        (["--optimizer.lr_batch=32", "--trainer.accumulate=2"], None),
        (["--optimizer.lr_batch=null"], None),
    ],
)
def test_another_batch_than_the_recipe_states_is_said(
    words: list[str], told: str | None, tmp_path: Path
) -> None:
    keys = [*SMALL, "--schedule.epochs=1", f"--out={tmp_path / 'run'}", *words]
    log = (fit(load_recipe("scenes", keys)).folder / "log.txt").read_text()
    assert ("optimizer.lr is stated for" in log) == (told is not None)
    assert (told or "") in log


@pytest.mark.parametrize(
    "word",
    ["--model.freeze=[stages.9]", "--optimizer.lr_scale.stages.9=0.5", "--optimizer.layer_decay=2"],
)
def test_a_part_that_the_model_does_not_have_is_refused_before_anything_runs(
    word: str, tmp_path: Path
) -> None:
    key = word[2:].partition("=")[0].removesuffix(".stages.9")
    with pytest.raises(ValueError, match=f"^{key} must "):
        fit(load_recipe("scenes", [*SMALL, word, f"--out={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_images_of_a_size_that_the_model_does_not_take(tmp_path: Path) -> None:
    model = ["--model.name=dla46_c", "--model.drop_path_rate=null", "--data.image_size=40"]
    changes = [*SMALL, *model, f"--out={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"'dla46_c' cannot be run on images of 40 x 40 pixels"):
        fit(load_recipe("scenes", changes))


def test_an_evaluation_at_a_size_that_the_model_does_not_take(tmp_path: Path) -> None:
    keys = ["--model.name=dla46_c", "--model.drop_path_rate=null", "--schedule.epochs=1"]
    keys += ["--data.train_size=16", "--data.val_size=4", f"--out={tmp_path / 'run'}"]
    folder = fit(load_recipe("scenes", [*SMALL, *keys])).folder
    with pytest.raises(ValueError, match=r"'dla46_c' cannot be run on images of 40 x 40 pixels"):
        evaluate(folder, ["--data.image_size=40"])


@pytest.mark.parametrize("name", ["scenes_segment", "scenes_detect"])
def test_a_backbone_of_one_size_is_refused_where_images_have_any(name: str) -> None:
    recipe = load_recipe(name, ["--model.name=maxvit_rmlp_pico_rw_256", "--data.image_size=64"])
    network = TASKS[recipe.task].build(recipe.model, 2, 64)
    with pytest.raises(ValueError, match=r"cannot be run on images of 64 x 96 .* any size"):
        check_sizes(network, recipe)
    if recipe.task == "segment":
        data = replace(recipe.data, test=SegmentationTest(window=64))
        check_sizes(network, replace(recipe, data=data))


def test_first_weights_that_are_not_there_are_said_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("dgt.training.fit"), "build_data", None)
    words = [*SMALL, "--model.init_from=runs/typo", f"--out={tmp_path / 'run'}"]
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint, .* 'runs/typo'"):
        fit(load_recipe("scenes", words))
    assert not (tmp_path / "run").exists()
