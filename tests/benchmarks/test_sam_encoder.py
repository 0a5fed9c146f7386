"""SAM's encoder beside its own: what is timed, and the rows that are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sam_encoder
import timm
import torch
from torch import nn

from dgt.utils.records import write_row


def small(_: sam_encoder.Encoder) -> nn.Module:
    torch.manual_seed(0)
    options = {"embed_dim": 32, "depth": 2, "num_heads": 2, "window_size": 3}
    return timm.create_model(
        "samvit_base_patch16", img_size=96, global_attn_indexes=(1,), **options
    ).eval()


@pytest.fixture
def at_small_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sam_encoder.Encoder, "build", small)
    monkeypatch.setattr(sam_encoder, "SIZE", 96)
    monkeypatch.setattr(sam_encoder, "LEAST_OF_GLOBAL", 8)
    yield
    sam_encoder.open_arm.cache_clear()


def test_a_call_has_its_times_its_peak_and_the_models_output(at_small_size: None) -> None:
    encoder = sam_encoder.Encoder("timm")
    expected = sam_encoder.expected_output(encoder)
    for arm in ("own", "exact"):
        row, output = sam_encoder.measure_call(encoder, arm, Path())
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        parts = row["global_attention_ms"], row["windows_attention_ms"]
        assert min(parts) > 0
        assert sum(parts) < row["ms"]
        assert row["peak_mb"] > 10


def test_a_row_replaces_that_of_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for threads, rounds in ((1, 1), (2, 1), (1, 2)):
        key: dict[str, Any] = {"library": "timm", "threads": threads}
        write_row(path, key, {"rounds": rounds})
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert sorted((row["threads"], row["rounds"]) for row in rows) == [(1, 2), (2, 1)]
