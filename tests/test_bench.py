"""Benchmarks run on small cases, report what they must, and refuse to time what is wrong."""

import pytest
import torch

from dgt import bench


def test_attention_rows_and_table() -> None:
    rows = bench.bench_attention(((1, 1, 300, 20),), rounds=1, groups=4, channels=8)
    assert rows[0]["ratio"] == pytest.approx(rows[0]["sdpa_ms"] / rows[0]["dgt_ms"])
    assert set(rows[0]["steps_ms"]) == {"group", "select", "attend"}
    assert "B1 H1 L300 k20 G4 D8 float32" in bench.attention_table(rows)


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = bench._inputs(1, 1, 64, 8, 4, "cpu", torch.float32)
    real = bench.dynamic_group_attention

    def wrong(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)  # type: ignore[arg-type]
        return result if options.get("backend") == "reference" else result._replace(output=result.output + 0.1)

    monkeypatch.setattr(bench, "dynamic_group_attention", wrong)
    with pytest.raises(RuntimeError, match="differs from the reference"):
        bench._check(inputs, 16)


def test_model_rows_and_table() -> None:
    rows = bench.bench_models(("dgt_nano", "test_vit"), image_size=160, batch_size=1, rounds=1)
    assert rows[0]["relative_time"] == 1.0
    assert "test_vit" in bench.models_table(rows)


def test_an_unknown_model() -> None:
    with pytest.raises(ValueError, match="names must be timm models, got no_such_model"):
        bench.bench_models(("dgt_nano", "no_such_model"))


def test_the_machine_is_described() -> None:
    assert {"date", "processor", "threads", "torch", "command"} <= set(bench.machine())
