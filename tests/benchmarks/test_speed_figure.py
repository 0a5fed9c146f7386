"""benchmarks/speed_figure.py draws what benchmarks/attention.py measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def speed(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(ROOT / "benchmarks" / "speed_figure.py")


def row(case: str, **changes: Any) -> dict[str, Any]:
    """A measured case."""
    times = {"sdpa": 8.0, "dense": 4.0, "grouped": 1.0}
    plain = {"case": case, "threads": 2, "busy": 0, "backward": False, "dtype": "float32"}
    return {**plain, "fastest_ms": times, "bound": 8.0, **changes}


def test_the_cost_of_one_query(speed: ModuleType) -> None:
    """For each number of tokens, the largest float32 case without background load counts, with its own queries."""
    rows = [
        row("1x2x100x32:98"),
        row("2x2x100x32:98"),
        row("4x2x100x32:98", busy=1),
        row("4x2x100x32:98", threads=1),
        row("4x2x100x32:98", dtype="bfloat16"),
        row("1x2x50x64:98"),
        row("1x1x10x32:98", backward=True),
    ]
    (found,) = speed.speeds(rows, backward=False)
    assert found.tokens == 100
    assert found.nanoseconds == {
        "sdpa": 20_000.0,
        "dense": 10_000.0,
        "grouped": 2500.0,
        "bound": 1250.0,
    }
    assert [speed_of.tokens for speed_of in speed.speeds(rows, backward=True)] == [10]


def test_the_figure_shows_the_committed_results(speed: ModuleType) -> None:
    content = json.loads(speed.RESULTS.read_text(encoding="utf-8"))
    figure = speed.figure_speed(content)
    for axes, backward in zip(figure.axes, (False, True), strict=True):
        found = speed.speeds(content["rows"], backward)
        assert len(axes.lines) == len(speed.LINES)
        assert list(axes.lines[0].get_ydata()) == [one.nanoseconds["sdpa"] for one in found]
