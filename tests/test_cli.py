"""The command line end to end: train the nano model briefly, then use its run in every command."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import dgt_command.predict
from dgt.runs.recipe import Recipe
from dgt.runs.settings import to_yaml
from dgt.tasks import TASKS
from dgt_command import main
from dgt_command.cli import COMMANDS
from dgt_command.training import SECTIONS

TRAIN = ["train", "scenes", "--data.train_size=64", "--data.val_size=24", "--data.batch_size=16"]
TRAIN += [
    "--schedule.epochs=2",
    "--schedule.warmup_epochs=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
]
NAMES = [str(command.name) for command in COMMANDS if not command.hidden]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, trained through the command line."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TRAIN, f"--out={folder}"]) == 0
    return folder


def without(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """As if a library were not installed, and nothing of ours had imported it."""
    import torchmetrics  # noqa: F401  (asks what is installed, not what can be imported)

    for name in [name for name in sys.modules if name.startswith(("dgt.figures", "dgt_command.v"))]:
        monkeypatch.delitem(sys.modules, name)
    loaded = [name for name in sys.modules if name.startswith(f"{library}.")]
    for name in (library, *loaded):  # parts of it that are loaded would be found by themselves
        monkeypatch.setitem(sys.modules, name, None)


def test_a_training_without_matplotlib_draws_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "matplotlib")
    small = ["--data.train_size=16", "--data.val_size=8", "--data.image_size=32"]
    assert main([*TRAIN, *small, "--schedule.epochs=1", f"--out={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().err
    assert "dgt: warning: drawing validation images needs matplotlib" in said
    assert said.count("pip install '.[explore]'") == 1
    assert (tmp_path / "run" / "results.json").is_file()


def test_a_detector_without_its_metric_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "faster_coco_eval")
    keys = ["--trainer.pictures_every=null", f"--out={tmp_path / 'run'}"]
    assert "pip install '.[detect]'" in fails(capsys, "train", "scenes_detect", *keys)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def image(tmp_path: Path) -> str:
    """An image that is neither square nor of the training size."""
    path = tmp_path / "image.png"
    Image.effect_noise((90, 70), 60).convert("RGB").save(path)
    return str(path)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command prints; it must exit with status 2."""
    assert main(arguments) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("dgt: error: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("command", NAMES)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"Usage: dgt {command}" in capsys.readouterr().out


def test_the_package_answers_as_the_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry point of `python -m dgt --help`."""
    monkeypatch.setattr(sys, "argv", ["dgt", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dgt", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    told = capsys.readouterr().out
    assert all(command in told for command in NAMES)


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "train --help",
        "fly",
        "demo --epochs many",
        "train",
        "train --optimizer.lr 1",
        "profile --shape 1,2",
    ],
)
def test_help_and_mistakes_are_answered_without_loading_the_package(words: str) -> None:
    """To report an error, the command loads neither PyTorch nor other large libraries: that would take seconds."""
    code = "import sys, dgt_command\ntry: dgt_command.main()\n"
    code += "finally: assert not {'dgt', 'torch', 'numpy', 'yaml'} & set(sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in result.stderr
    assert ("error: " in result.stderr) != ("--help" in words)


def test_the_command_knows_what_a_recipe_consists_of() -> None:
    assert set(SECTIONS) == {field.name for field in fields(Recipe)}
    assert all(name in SECTIONS["task"] for name in TASKS)


@pytest.mark.parametrize(
    "arguments", [[], ["predict"], ["demo", "--loud"], ["demo", "--epochs", "0"]]
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("Usage: dgt ")
    assert error.startswith("dgt: error: ")


@pytest.mark.parametrize("command", ["train", "ablate", "evaluate"])
def test_an_unknown_option_in_the_place_of_a_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--nosuch"]) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"Usage: dgt {command} ")
    assert error == "dgt: error: No such option '--nosuch'."


def test_an_interruption_is_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dgt.runs.status.run_status", interrupted)
    (tmp_path / "recipe.yaml").touch()
    assert main(["status", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "dgt: interrupted\n"


@pytest.mark.parametrize("through", [True, False])
def test_a_reader_that_has_closed_is_no_error(
    through: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dgt COMMAND | head`: a print hits the broken pipe or, if output is buffered, the last flush does."""
    reader, writer = os.pipe()
    os.close(reader)
    output = io.TextIOWrapper(os.fdopen(writer, "wb", 0 if through else -1), write_through=through)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["weights", "list"]) == 1
    assert capsys.readouterr().err == ""
    assert sys.stdout is None  # nothing is left for Python to flush at exit
    output.close()


def test_a_full_disk_behind_the_output_is_said_and_ends_nothing(
    image: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["predict", "dgt_nano.imagenette", image, image]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("dgt: warning: standard output cannot be written, the command goes on: ")


def test_without_standard_output_a_command_does_its_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Python has it for a process that was started with it closed."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["weights", "list"]) == 0
    assert main(["--help"]) == 0
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["fly"]) == 2


def test_a_closed_output_takes_no_files_number(tmp_path: Path) -> None:
    """What a command opens does not become its standard output."""
    code = "import sys, dgt_command\nstatus = dgt_command.main(['--help'])\n"
    code += (
        f"file = open({str(tmp_path / 'file')!r}, 'w')\nassert file.fileno() != 1\nsys.exit(status)"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, preexec_fn=lambda: os.close(1), check=False).returncode == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_predictions_are_printed_as_they_come(
    as_json: bool,
    tmp_path: Path,
    image: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third image is interrupted."""
    paths = [shutil.copy(image, tmp_path / f"{name}.png") for name in "abc"]
    usual = dgt_command.predict.predict

    def predict(run: object, images: list[str], top_k: int) -> object:
        if images == [str(paths[2])]:
            raise KeyboardInterrupt
        return usual(run, images, top_k)

    monkeypatch.setattr("dgt_command.predict.predict", predict)
    words = ["predict", "dgt_nano.imagenette", *map(str, paths), *["--json"] * as_json]
    assert main(words) == 130
    told = capsys.readouterr()
    if as_json:
        assert [each["image"] for each in json.loads(told.out)] == list(map(str, paths[:2]))
    else:
        assert [line for line in told.out.splitlines() if line[0] != " "] == list(
            map(str, paths[:2])
        )
    assert told.err.endswith("dgt: interrupted\n")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "cifar10", "--data.root", "photos/pest"],
        ["evaluate", "dgt_nano.imagenette", "--data.root", "photos/pest"],
        ["accelerate", "photos/pest", "--images", "photos"],
        ["accelerate", "vit_tiny_patch16_224", "--images", "photos/pest"],
    ],
)
def test_a_mistyped_path_is_answered_without_asking_the_hub(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", None)
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(f"photos/{name}.png")
    assert "photos/pest: there is no such file or folder" in fails(capsys, *words)


def test_a_leading_tilde_of_an_option_is_the_home(
    run: Path, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert main(["visualize", str(run), image, "--block=0", "--out=~/groups.png"]) == 0
    assert (tmp_path / "groups.png").is_file()


def test_another_broken_pipe_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_worker(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("dgt.weights.list_weights", lose_a_worker)
    with pytest.raises(BrokenPipeError):
        main(["weights", "list"])


def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run fails in a folder of its own
    assert "unknown recipe key 'optimiser.lr'; did you mean optimizer.lr" in fails(
        capsys, *TRAIN, "--optimiser.lr", "1"
    )
    assert "there is no recipe 'scene': did you mean scenes?" in fails(capsys, "train", "scene")
    assert "name a recipe, one of ade20k_dgt_base" in fails(capsys, "train")
    assert "recipe 'imagenette128' needs images: give --data.root" in fails(
        capsys, "train", "imagenette128"
    )
    missing = tmp_path / "missing"
    assert f"folder {missing} does not exist" in fails(
        capsys, "train", "imagenette128", f"--data.root={missing}"
    )
    assert "'trainer' does not fit this machine" in fails(
        capsys, *TRAIN, "--trainer.accelerator", "abacus"
    )
    (tmp_path / "file").write_text("notes")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        for command in (TRAIN, ["demo"]):
            assert f"out must be a folder, but {tmp_path / 'file'} is a file" in fails(
                capsys, *command, "--out", str(place)
            )
    few = fails(capsys, *TRAIN, "--data.batch_size=128", f"--out={tmp_path / 'few'}")
    assert "error: data.batch_size: 64 training images do not fill one batch of 128" in few
    assert "there is no checkpoint" in fails(capsys, "evaluate", str(missing))
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(tmp_path / "empty")]) == 2
    assert "dgt: error: there are no images in the folder" in capsys.readouterr().err
    assert "model.name must be a registered timm model" in fails(
        capsys, *TRAIN, "--model.name", "dgt_huge"
    )


def test_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgt.training.evaluate", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):
        main(["evaluate", str(tmp_path)])


def test_a_diverged_training_is_reported_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *TRAIN,
                "--optimizer.lr=1e6",
                "--optimizer.lr_batch=null",
                f"--out={tmp_path / 'wild'}",
            ]
        )
        == 1
    )
    told = capsys.readouterr().err
    assert "dgt: error: training diverged" in told
    assert "lower optimizer.lr or set optimizer.clip_grad" in told


def test_evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["top1"] == pytest.approx(
        json.loads((run / "results.json").read_text())["metrics"]["top1"]
    )
    assert main(["evaluate", str(run / "checkpoints" / "best.ckpt"), "--data.val_size", "8"]) == 0
    assert "8 images, 0 unreadable" in capsys.readouterr().out


def test_a_model_that_is_not_read_is_not_taken_for_an_image(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the images after it would be those of the model that is used where none is given."""
    (tmp_path / "mine.onnx").touch()
    assert "mine.onnx' is no model that is read" in fails(
        capsys, "predict", str(tmp_path / "mine.onnx"), image
    )


def test_predict(run: Path, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run), image, "--top-k", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert "--out is for drawings" in fails(capsys, "predict", str(run), image, "--out", "drawn")
    (tmp_path / "notes.jpg").write_text("no image")
    assert main(["predict", str(run / "model"), str(tmp_path / "notes.jpg"), image, "--json"]) == 1
    output = capsys.readouterr()
    broken, read = json.loads(output.out)
    assert "notes.jpg' cannot be read as an image" in output.err
    assert broken["classes"] == []
    assert read["error"] is None
    assert len(read["classes"]) == 5


def test_json_has_null_where_nothing_is_a_number(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = timm.create_model("test_resnet", num_classes=2)
    torch.nn.init.constant_(model.get_classifier().weight, torch.nan)
    save_for_hf(model, str(tmp_path / "model"))
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            shutil.copy(image, tmp_path / "photos" / split / name)
    data = ["--data.root", str(tmp_path / "photos"), "--data.num_workers", "0"]
    assert main(["predict", str(tmp_path / "model"), image, "--json"]) == 1
    (predicted,) = json.loads(capsys.readouterr().out)
    assert "the model's output is not a number" in predicted["error"]
    assert predicted["classes"] == []
    assert main(["evaluate", str(tmp_path / "model"), *data, "--json"]) == 0
    told = capsys.readouterr().out
    assert "null" in told
    assert "NaN" not in told


def test_predict_takes_folders(
    run: Path,
    image: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nested and linked images, in the order of paths; what is no image is counted, not tried."""
    folder = tmp_path / "photos"
    (folder / "trip").mkdir(parents=True)
    for name in ("trip/b.png", "trip/.hidden.png", "a.PNG"):
        shutil.copy(image, folder / name)
    (folder / "notes.txt").write_text("no image")
    (folder / "trip" / "again").symlink_to(folder)
    assert main(["predict", str(run), image, str(folder), "--json"]) == 0
    found = [prediction["image"] for prediction in json.loads(capsys.readouterr().out)]
    assert found == [image, str(folder / "a.PNG"), str(folder / "trip" / "b.png")]
    assert "are left out, no images: " in caplog.text
    assert main(["predict", str(folder), "--top-k", "1"]) == 0  # not a model: by the default one
    assert capsys.readouterr().out.count(".png\n") == 1


def test_names_that_the_terminal_cannot_print(run: Path, image: str, tmp_path: Path) -> None:
    """In output, drawings and errors; names in other scripts and of no encoding."""
    names = [os.fsencode("\u732b.png"), b"caf\xe9.png", os.fsencode("\U0001f600 \u202e.png")]
    for name in names:
        shutil.copy(image, os.path.join(os.fsencode(tmp_path), name))
    place = os.path.join(os.fsencode(tmp_path), "\u732b".encode())
    shutil.copytree(os.fsencode(run), place)
    calls = (
        [b"predict", place, *names],
        [b"visualize", place, names[0], b"--out", b"\xe9.png"],
        [b"train", b"\xe9.yaml"],
    )
    in_turn = (
        "import sys; from dgt_command import main; "
        "print([main(line.split('\\t')) for line in sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", in_turn, *(b"\t".join(words) for words in calls)],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )
    assert done.stdout.splitlines()[-1] == b"[0, 0, 2]", done.stderr
    assert b"Traceback" not in done.stderr, done.stderr


def test_visualize(
    run: Path, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "figure.png"
    assert main(["visualize", str(run), image, "--out", str(figure), "--groups", "2"]) == 0
    with Image.open(figure) as drawn:
        assert min(drawn.size) > 200
    assert (
        main(
            [
                "visualize",
                str(run),
                image,
                "--block",
                "0",
                "--head",
                "0",
                "--map",
                "--out",
                str(figure),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert "block must lie in 0 to" in fails(capsys, "visualize", str(run), image, "--block", "99")
    assert "head must lie in 0 to" in fails(capsys, "visualize", str(run), image, "--head", "99")
    assert "path must end in one of" in fails(
        capsys, "visualize", str(run), image, "--out", str(tmp_path / "a.txt")
    )


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "dgt_tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["paper_params"] == 24_090_000
    assert main(["info", "dgt_nano", "--size", "64", "96"]) == 0
    table = capsys.readouterr().out
    assert "64 x 96" in table
    assert table.splitlines()[-1].startswith("native CPU kernels: ")
    fails(capsys, "info", "dgt_huge")


def test_a_model_without_groups_cannot_be_drawn(
    tmp_path: Path, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *TRAIN,
                "--model.name=test_resnet",
                f"--out={tmp_path / 'peer'}",
                "--data.image_size=32",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert "model 'test_resnet' has no dynamic group attention" in fails(
        capsys, "visualize", str(tmp_path / "peer"), image, "--out", str(tmp_path / "a.png")
    )


def test_the_demo_writes_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: Callable[[Path], int]
) -> None:
    from dgt_command import demo

    whole = demo.load_recipe
    small = "{stem_width: 8, dims: [16, 32, 64, 64], num_heads: [1, 2, 2, 2], depths: [1, 1, 1, 1], num_groups: 4}"
    few = ["--data.train_size=64", "--data.val_size=16", f"--model.args={small}"]
    monkeypatch.setattr(
        demo, "load_recipe", lambda name, overrides=(): whole(name, [*overrides, *few])
    )
    text = demo.run(tmp_path / "demo", epochs=1)
    assert "held-out scenes" in text
    for name in ("groups.png", "group_map.png", "results.json", "model/model.safetensors"):
        assert (tmp_path / "demo" / name).is_file(), name
    demo.run(tmp_path / "demo", epochs=1)
    at_work(tmp_path / "demo")
    with pytest.raises(FileExistsError, match="another process is using"):
        demo.run(tmp_path / "demo", epochs=1)
    assert (tmp_path / "demo" / "results.json").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match="is not a demo run"):
        demo.run(tmp_path / "mine")
    named = whole("scenes", ["--name=demo", "--optimizer.lr=0.5", *few])  # as of a demo.yaml
    (tmp_path / "mine" / "recipe.yaml").write_text(to_yaml(named.to_dict()))
    with pytest.raises(FileExistsError, match="is not a demo run"):
        demo.run(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").is_file()
