"""Starting the explorer: which model is found, where it listens, what it rejects, and how long DGT-T takes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient

import dgt
from dgt.explorer import Album, Explorer, create_app, launch, serve
from dgt.explorer.views import shown_blocks
from dgt.runs import LoadedRun, load_recipe
from dgt.runs.model import export_model, make_record
from dgt.tasks.network import build_classifier
from dgt.weights import find_weights
from dgt_command import main


@pytest.fixture(scope="module")
def model(explorer: Explorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that holds a model."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    run = explorer.run
    export_model(folder / "model", run.network, make_record(run.recipe, run.class_names))
    return folder


def test_the_newest_run_with_groups_is_found_and_a_checkpoint_goes_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("scenes", ["--model.name", "test_resnet"])
    without = tmp_path / "runs" / "newest" / "model"
    export_model(
        without, build_classifier(recipe.model, 8, 64), make_record(recipe, list("abcdefgh"))
    )
    shutil.copytree(model, tmp_path / "runs" / "demo")
    os.utime(without / "model.safetensors", (2e9, 2e9))
    monkeypatch.chdir(tmp_path)
    assert launch.find_run(None, photographs=True).source == Path(
        "runs/demo/model/model.safetensors"
    )
    assert capsys.readouterr().out == "no model given: using the newest suitable run, runs/demo\n"
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        launch.find_run(tmp_path / "missing.ckpt", photographs=True)


@pytest.mark.parametrize(
    ("photographs", "name"), [(True, "dgt_nano.imagenette"), (False, "dgt_nano.scenes")]
)
def test_without_any_run_the_included_weights_are_shown(
    photographs: bool,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = launch.find_run(None, photographs)
    assert run.source.parent == find_weights(name)
    assert f"no suitable run in runs/: using {name}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_reported_before_any_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_run", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="port must lie in 0 to 65535, got 70000"):
        serve(port=70000)
    with pytest.raises(FileNotFoundError, match=r"image: .* does not exist"):
        serve(image=tmp_path / "missing")
    with pytest.raises(ValueError, match="expected 1 to 200 image files"):
        serve(image=tmp_path)
    with pytest.raises(ValueError, match=r"cannot listen on a{64} port 7860: .*label"):
        serve(host=64 * "a")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1 port"):
            serve(port=taken.getsockname()[1])


def test_the_command_tells_mistakes_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "dgt: error: port must lie in 0 to 65535, got 70000\n"
    assert main(["explore", "--help"]) == 0
    assert "127.0.0.1" in capsys.readouterr().out


def test_the_command_listens_on_loopback_alone_until_interrupted(model: Path) -> None:
    command = [sys.executable, "-m", "dgt", "explore", str(model), "--port", "0"]
    quiet = {
        **os.environ,
        "PYTHONWARNINGS": "ignore:no native CPU kernels",
    }  # which may not be built
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=quiet) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline(), process.stdout.readline()]
            address = lines[1].split()[1]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address) as answer:
                assert b"Dynamic groups" in answer.read()
            port = int(address.rstrip("/").rpartition(":")[2])
            others = {each[4][0] for each in own_addresses() if not each[4][0].startswith("127.")}
            for other in others:
                with contextlib.closing(socket.socket()) as outside:
                    outside.settimeout(2)
                    assert outside.connect_ex((other, port)) != 0
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait(200) == 0
        finally:
            process.kill()


def own_addresses() -> list[tuple[object, ...]]:
    """This machine's own IPv4 addresses, as far as its host name reveals them."""
    with contextlib.suppress(OSError):
        return list(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET))
    return []


def test_a_model_without_groups_is_refused(explorer: Explorer) -> None:
    recipe = load_recipe("scenes", ["--model.name", "test_resnet"])
    network = build_classifier(recipe.model, 8, 64)
    assert shown_blocks(network) == []
    with pytest.raises(
        ValueError, match="grouped attention, nowhere is 'test_resnet' of task 'classify'"
    ):
        Explorer(LoadedRun(network, recipe, explorer.run.class_names, Path("nowhere")), Album())


def test_a_model_whose_attention_was_replaced_is_refused(explorer: Explorer) -> None:
    """It has groups, which `dgt.group_records` and `visualize` show, but the page only supports the stages of a DGT."""
    recipe = load_recipe("scenes", ["--model.name", "test_vit"])
    network = build_classifier(recipe.model, 8, 64).eval()
    dgt.replace_attention(network, num_groups=4, top_k=5)
    assert dgt.group_records(network, torch.randn(1, 3, 64, 64))
    with pytest.raises(
        ValueError,
        match=r"supports only DynamicGroupTransformer classifiers .* nowhere is 'test_vit'",
    ):
        Explorer(LoadedRun(network, recipe, explorer.run.class_names, Path("nowhere")), Album())


def test_dgt_tiny_at_224_runs_once_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("scenes", ["--model.name", "dgt_tiny", "--data.image_size", "224"])
    network = build_classifier(recipe.model, 8, 224).eval()
    explorer = Explorer(
        LoadedRun(network, recipe, [f"class {i}" for i in range(8)], Path("nowhere")), Album()
    )
    assert explorer.describe()["sizes"] == [224, 448]
    passes: list[torch.Size] = []
    network.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape))
    for scene in (1, 2):
        for block, head in ((0, 0), (0, 1), (3, 0)):
            explorer.view(f"scene-{scene}", 224, block, head, 98)
    assert passes == [(1, 3, 224, 224)] * 2
    client = TestClient(create_app(explorer), base_url="http://127.0.0.1")
    view = client.get("/api/view?image=scene-2&size=224&block=0&head=0&k=98").json()
    assert view["grid"] == [56, 56]
    assert view["forward"]["ms"] > 0
