"""What the host does in a call of the Triton attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import attention_host


def test_every_pass_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched, and what is counted does not grow with the tensors."""
    monkeypatch.setattr(attention_host, "SHAPES", ((1, 2, 20), (2, 2, 300), (1, 2, 400)))
    out = tmp_path / "host.json"
    assert attention_host.main(["--out", str(out)]) == 0
    rows = json.loads(out.read_text("utf-8"))["rows"]
    counts = {(row["shape"][2], row["pass"]): row for row in rows}
    assert counts[20, "inference"]["launches"] == 3
    for name in ("inference", "training, forward", "training, backward"):
        few, many = counts[20, name], counts[300, name]
        assert 0 < few["allocations"] <= few["python"] < many["python"]
        for what in ("launches", "allocations"):
            assert many[what] == counts[400, name][what]
