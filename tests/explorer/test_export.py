"""The exported page: opened as a file in a headless Chromium, it shows the same as the server's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dgt.explorer import Album, Explorer, launch
from dgt.explorer.static_page import export_page, joined_modules
from dgt_command import main

READY = (
    "window.explorer && explorer.now.view && explorer.now.curve && !document.querySelector('.busy')"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two images."""
    folder = tmp_path_factory.mktemp("images")
    for seed in range(2):
        pixels = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((320, 240)).save(folder / f"image{seed}.png")
    return folder


@pytest.fixture
def found_run(monkeypatch: pytest.MonkeyPatch, explorer: Explorer) -> None:
    """The command finds the tests' run."""
    monkeypatch.setattr(launch, "find_run", lambda *_, **__: explorer.run)


@pytest.fixture(scope="module")
def exported(explorer: Explorer, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported page for these images."""
    folder = tmp_path_factory.mktemp("site") / "page"
    export_page(Explorer(explorer.run, Album(sorted(images.iterdir()), scenes=False)), folder)
    return folder


def answers(file: Path) -> Any:
    """The values that a script of the page assigns."""
    return json.loads(file.read_text(encoding="utf-8").partition(" = ")[2].rstrip(";\n"))


def test_it_holds_the_chosen_images_and_the_servers_answers(
    exported: Path, explorer: Explorer, images: Path
) -> None:
    found = answers(exported / "answers.js")
    assert [image["title"] for image in found["images"]] == ["image0.png", "image1.png"]
    assert found["model"] == {**explorer.describe(), "sizes": [64]}
    blocks = len(explorer.blocks)
    assert len(list((exported / "data").iterdir())) == 2 * blocks
    own = [block.layer.top_k for block in explorer.blocks]
    assert found["keys"][0] == [1, 2, 4, 8, 16, 32, 64]
    assert all(
        set(keys) >= {1, min(k, keys[-1])} for keys, k in zip(found["keys"], own, strict=True)
    )
    other = Explorer(explorer.run, Album(sorted(images.iterdir()), scenes=False))
    view = answers(exported / "data" / "file-1-0.js")["views"]["0 16"]
    wanted = other.view("file-1", 64, 0, 0, 16)
    assert {**view, "forward": 0, "max_k": 0} == {
        **json.loads(json.dumps(wanted)),
        "forward": 0,
        "max_k": 0,
    }


def test_it_asks_nothing_of_a_server() -> None:
    script = joined_modules()
    assert "import " not in script.replace("modules import", "")
    assert "\nexport " not in script


def test_opened_as_a_file_it_shows_groups_changes_block_and_k_and_saves(
    exported: Path, browser: Any
) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open((exported / "index.html").as_uri())
    browser.wait(READY)
    assert browser.run("document.querySelectorAll('.strip button').length") == 2
    assert browser.run("getComputedStyle(document.querySelector('.add')).display") == "none"
    assert browser.run("[explorer.now.view.k, explorer.now.view.rows]") == [32, 12]
    browser.run("document.querySelectorAll('.strip button')[1].click()")
    browser.wait(f"({READY}) && explorer.state.image === 'file-1'")
    browser.press("-")
    browser.wait(f"({READY}) && explorer.now.view.k === 16")
    browser.press("]")
    browser.wait(f"({READY}) && explorer.state.block === 1")
    assert browser.run("explorer.compose().toDataURL().length") > 10_000
    assert browser.run("document.getElementById('notice').hidden")
    assert browser.errors == []
    assert [
        url for url in browser.requests if not url.startswith(("file:", "data:", "blob:", "about:"))
    ] == []


@pytest.mark.usefixtures("found_run")
def test_what_is_wrong_is_reported_in_a_sentence_and_nothing_is_left(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        main(["explore", "--export", str(tmp_path / "page"), "--image", str(tmp_path / "empty")])
        == 2
    )
    assert "expected 1 to 200 image files" in capsys.readouterr().err
    assert main(["explore", "--export", str(images)]) == 2
    assert (
        "contains something other than an exported page: name a new folder"
        in capsys.readouterr().err
    )
    assert len(list(images.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "empty")
        assert main(["explore", "--export", "."]) == 2
    assert "it must not contain the current directory, got '.'" in capsys.readouterr().err

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dgt.explorer.static_page._answers", broken)
    assert main(["explore", "--export", str(tmp_path / "page"), "--image", str(images)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.usefixtures("found_run")
def test_the_command_writes_it_and_an_export_may_be_written_anew(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert (
            main(
                [
                    "explore",
                    "--export",
                    str(tmp_path / "page"),
                    "--image",
                    str(images / "image0.png"),
                ]
            )
            == 0
        )
        assert capsys.readouterr().out.startswith(f"{tmp_path / 'page' / 'index.html'}  1 images, ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page"]
    (tmp_path / "page" / "CNAME").touch()  # which the page would be published with
    assert main(["explore", "--export", str(tmp_path / "page")]) == 2
    assert "other than an exported page: name a new folder (CNAME)" in capsys.readouterr().err
