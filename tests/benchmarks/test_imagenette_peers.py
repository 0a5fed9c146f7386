"""benchmarks/imagenette_peers.py without training: what it starts, what it writes, and what it rejects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import timm
import torch

from dgt.training import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(
    load_script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """The script, which writes its rows to ROWS.json and measures nothing."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = load_script(FOLDER / "imagenette_peers.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(module, "measure", lambda run, data: {"run": run.name})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    (tmp_path / "data" / "train").mkdir(parents=True)
    words = ["imagenette_peers.py", str(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", words)
    return module


Begun = list[tuple[str, int, dict[str, str]]]


@pytest.fixture
def begun(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """The trainings that were begun, each of which ends at once; those of RegNets are stopped before the end."""
    found: Begun = []

    def train(
        core: int, model: str, epochs: int, data: str, run: Path, changes: Mapping[str, str]
    ) -> Any:
        found.append((model, epochs, dict(changes)))
        if "regnet" not in model:
            run.mkdir(parents=True)
            (run / "results.json").write_text("{}")
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(script, "train", train)
    return found


def rows_of(script: ModuleType) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(script.RESULTS.read_text())["rows"]
    return rows


def test_all_models_get_the_same_rates_and_as_much_time(script: ModuleType, begun: Begun) -> None:
    with pytest.raises(SystemExit, match=r"regnetx_002_12_0\.001, .* stopped before the end"):
        script.main()
    rates = {f"{rate:g}" for rate in script.RATES}
    for model, speed in script.IMAGES_PER_SECOND.items():
        own = [(epochs, changes) for name, epochs, changes in begun if name == model]
        assert {changes["optimizer.lr"] for _, changes in own} == rates
        for epochs, _ in own:
            assert epochs * script.TRAINING_IMAGES / speed == pytest.approx(12 * 60, rel=0.08)
        size = sum(
            weight.numel() for weight in timm.create_model(model, num_classes=10).parameters()
        )
        assert 2.2e6 < size < 2.6e6
    for _, epochs, changes in begun:
        words = [f"--{key}={value}" for key, value in changes.items()]
        recipe = load_recipe("imagenette_nano", [*words, f"--schedule.epochs={epochs}"])
        assert 1 <= recipe.schedule.warmup_epochs < epochs / 3


def test_what_is_trained_is_not_trained_again(script: ModuleType, begun: Begun) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit, match="stopped before the end"):
            script.main()
    counts = {model: sum(name == model for name, *_ in begun) for model in script.IMAGES_PER_SECOND}
    assert counts == {"dgt_nano": 3, "regnetx_002": 6, "mobilenetv4_conv_small": 3}
    rows = rows_of(script)
    assert len(rows) == 6
    assert [(row["model"], row["rate"]) for row in rows] == sorted(
        (row["model"], row["rate"]) for row in rows
    )


def test_rows_of_other_minutes_stay(script: ModuleType, begun: Begun) -> None:
    other = {"minutes": 60, "model": "dgt_nano", "rate": 1e-3}
    replaced = {"minutes": 12, "model": "dgt_nano", "rate": 1e-3, "old": True}
    script.RESULTS.write_text(json.dumps({"rows": [replaced, other]}))
    with pytest.raises(SystemExit):
        script.main()
    rows = rows_of(script)
    assert other in rows
    assert replaced not in rows
    assert len(rows) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "error: there is no folder missing/train"),
        (["--minutes", "0"], "error: --minutes must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    script: ModuleType,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = [] if words[0] == "missing" else [sys.argv[1]]
    monkeypatch.setattr(sys, "argv", ["imagenette_peers.py", *data, *words])
    with pytest.raises(SystemExit):
        script.main()
    assert message in capsys.readouterr().err
