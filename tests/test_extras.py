"""A plain install: commands that need no extra run without any, and the others name the one to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
from PIL import Image

from dgt.runs.model import export_model, make_record
from dgt.runs.recipe import load_recipe
from dgt.tasks import TASKS
from dgt.utils.extras import EXTRAS
from dgt.weights import SHIPPED

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import contextlib, io, json, sys
absent, commands = json.loads(sys.argv[1])
for name in absent:
    sys.modules[name] = None
from dgt_command import main
for words in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
# tqdm does not belong to an extra only: huggingface_hub, a dependency of timm, imports it
OPTIONAL = sorted(set(EXTRAS) - {"tqdm"})


class Done(NamedTuple):
    """The result of a command."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few images and a small ViT, as timm writes it."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "images").mkdir()
    for number in range(3):
        Image.effect_noise((64, 64), 60).convert("RGB").save(folder / "images" / f"{number}.png")
    for name in ("segment", "detect"):
        recipe = load_recipe(f"scenes_{name}", ["--data.image_size=64"] if name == "detect" else [])
        classes = [f"class {number}" for number in range(8)]
        network = TASKS[name].build(recipe.model, len(classes), 64)
        export_model(folder / name, network, make_record(recipe, classes))
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=4), folder / "vit")
    return folder


WORKING = {
    "predict": f"predict {SHIPPED} images/0.png --json",
    "predict by a detector": "predict detect images/0.png --out detected",
    "export": f"export {SHIPPED} model.pt2",
    "export for timm": f"export {SHIPPED} model",
    "accelerate": "accelerate vit --images images --error 0.5",
    "profile": "profile --shape 1,1,64,8 --groups 2 --top-k 4 --rounds 1",
}
REFUSED = {
    "train scenes": ("lightning", "train"),
    f"visualize {SHIPPED} images/0.png": ("matplotlib", "explore"),
    "explore": ("uvicorn", "explore"),
    f"export {SHIPPED} model.onnx": ("onnx", "export"),
    "predict segment images/0.png --out segmented": ("transformers", "transformers"),
}


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    """The results of commands in one process in which no optional library can be imported."""
    commands = [*WORKING.values(), *REFUSED]
    given = json.dumps([OPTIONAL, [command.split() for command in commands]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    return {command: Done(*json.loads(line)) for command, line in zip(commands, lines, strict=True)}


@pytest.mark.parametrize("name", WORKING)
def test_a_plain_install_predicts_exports_accelerates_and_profiles(
    name: str, done: dict[str, Done]
) -> None:
    """Without Lightning, `datasets`, faster-coco-eval, matplotlib, or any other library of an extra."""
    ended = done[WORKING[name]]
    assert ended.status == 0, ended.err
    assert ended.out


@pytest.mark.parametrize("command", REFUSED)
def test_a_missing_extra_is_a_sentence(command: str, done: dict[str, Done], folder: Path) -> None:
    library, extra = REFUSED[command]
    ended = done[command]
    assert ended.status == 2
    (sentence,) = ended.err.splitlines()
    assert sentence.startswith("dgt: error: ")
    assert f" needs {library}" in sentence
    assert sentence.endswith(f"pip install '.[{extra}]' in the checkout")
    assert not (folder / "runs").exists()


def test_extras_and_their_libraries_agree() -> None:
    """Every optional library is in the extra named by messages, and a plain install has at most eight dependencies."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["dependencies"]) <= 8
    for library, extra in EXTRAS.items():
        listed = [entry.replace("-", "_") for entry in project["optional-dependencies"][extra]]
        assert any(entry.startswith(library) for entry in listed), library
