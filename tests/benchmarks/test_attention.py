"""`benchmarks/attention.py` times small cases, and not those whose result is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import attention
import pytest

import dgt

SMALL = attention.Setting(threads=1, busy=0, backward=False, dtype="float32", groups=4, seconds=0.0)


def test_rows_have_times_and_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dgt.native_status().available:
        pytest.skip("the native kernels are not in use")
    out = tmp_path / "attention.json"
    words = ["attention", "--json", str(out), "--cases", "1x1x300x8:20", "--groups", "4"]
    monkeypatch.setattr("sys.argv", [*words, "--threads", "1", "--seconds", "0"])
    attention.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["backward"] for row in rows] == [False, True]
    fastest = rows[0]["fastest_ms"]
    assert rows[0]["sdpa_to_grouped"] == pytest.approx(
        fastest["sdpa"] / fastest["grouped"], abs=0.01
    )
    assert rows[0]["bound"] == pytest.approx(300 / 24, abs=0.1)


def test_rows_of_clustered_attention_have_both_types() -> None:
    if not dgt.native_status().available:
        pytest.skip("the native kernels are not in use")
    case = attention.parse_case("1x1x100x8:20:4:3")
    row = attention.row_of("", case, SMALL, attention.measure(case, SMALL))
    assert row["turns"] >= attention.LEAST_TURNS
    for kind in ("float32", "bfloat16"):
        for name in ("sdpa", "dense", "clustered", "first_order"):
            assert row["fastest_ms"][f"{name}_{kind}"] > 0


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dgt.dynamic_group_attention

    def wrong(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)  # type: ignore[arg-type]
        if options.get("backend") == "reference":
            return result
        return result._replace(output=result.output + 0.1)

    monkeypatch.setattr(dgt, "dynamic_group_attention", wrong)
    with pytest.raises(RuntimeError, match="differs from the reference"):
        attention.measure(attention.Case(1, 1, 64, 8, 16), SMALL)
