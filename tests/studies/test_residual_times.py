"""`python -m studies.residual_times`: every kind is timed in every place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import residual_times as study


def test_every_kind_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def smallest(data_set: str) -> list[study.Timed]:
        return [
            study.Timed(data_set, "prediction", 64, 1),
            study.Timed(data_set, "training step", 64, 2),
        ]

    monkeypatch.setattr(study, "rows_of", smallest)
    assert study.main(["--rounds", "1", "--json", str(tmp_path / "times.json")]) == 0
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    places = {(row["data_set"], row["what"]) for row in rows}
    assert places == {
        (data_set, what)
        for data_set in ("imagenette", "camvid")
        for what in ("prediction", "training step")
    }
    for row in rows:
        assert list(row["ms"]) == list(study.COMPARED)
        assert min(row["ms"].values()) > 0


def test_times_are_of_the_studys_sizes() -> None:
    sizes = [(row.what, row.size) for row in study.rows_of("camvid")]
    assert sizes == [
        ("prediction", 320),
        ("prediction", 480),
        ("training step", 128),
        ("training step", 256),
    ]
