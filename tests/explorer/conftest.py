"""Shared by the explorer's tests: a small untrained model, and its server on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient

from dgt.data.scenes import KINDS
from dgt.explorer import Album, Explorer, create_app
from dgt.explorer.launch import listen
from dgt.runs import LoadedRun, load_recipe
from dgt.tasks.network import build_classifier


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models gain nothing from more threads, and idle ones slow the browser down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_run(name: str = "dgt_nano", image_size: int = 64) -> LoadedRun:
    """A run as `load_run` returns it, of a model with random weights and centroids seeded on noise."""
    torch.manual_seed(0)
    recipe = load_recipe("scenes", ["--model.name", name, "--data.image_size", str(image_size)])
    network = build_classifier(recipe.model, len(KINDS), image_size).train()
    with torch.no_grad():
        network(torch.randn(4, 3, image_size, image_size))
    return LoadedRun(network.eval(), recipe, list(KINDS), Path("nowhere.safetensors"))


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """A nano model and the built-in scenes."""
    return Explorer(make_run(), Album())


@pytest.fixture(scope="module")
def client(explorer: Explorer) -> TestClient:
    """A client of its server, without a network."""
    return TestClient(create_app(explorer), base_url="http://127.0.0.1:7860")


@pytest.fixture(scope="module")
def address(explorer: Explorer) -> Iterator[str]:
    """The server's address on this machine, for a browser."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(explorer), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def browser(load_script: Callable[[Path], ModuleType]) -> Iterator[Any]:
    """A headless Chromium with one page; skips the test if there is none."""
    driver = load_script(Path(__file__).with_name("browser.py"))
    program = driver.find()
    if program is None:
        pytest.skip(
            f"no Chromium on this machine (looked for {', '.join(driver.NAMES)}): see CONTRIBUTING.md"
        )
    with driver.Browser(program) as opened:
        yield opened
