"""A small finished run, shared by the tests in this folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dgt.runs import load_recipe
from dgt.training import Result, fit

SMALL = (
    "--model.name=test_resnet",
    "--data.image_size=32",
    "--data.batch_size=16",
    "--data.train_size=64",
    "--data.val_size=40",
    "--schedule.epochs=2",
    "--schedule.warmup_epochs=0.5",
    "--ema.decay=0.01",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics: the later one for repeated steps, and no truncated lines."""
    rows = {}
    for line in (
        (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    ):
        with suppress(json.JSONDecodeError):
            row = json.loads(line)
            rows[row["step"], row.get("epoch")] = row
    return list(rows.values())


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A timm model trained for two epochs on 64 scenes, with weight averaging."""
    folder: Path = tmp_path_factory.mktemp("runs") / "small"
    return fit(load_recipe("scenes", [*SMALL, f"--out={folder}"]))
