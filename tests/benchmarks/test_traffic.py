"""Bytes and kernels are counted as the operators' shapes say."""

from __future__ import annotations

import json
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
import traffic
from traffic import LOW, Autocast, Recorder, main, trace


def recorded(function, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list:
    """Rows of a function of tensors on the meta device, under autocast."""
    tensors = [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]
    with torch.no_grad(), Recorder() as recorder, Autocast().as_on_cuda():
        function(*tensors)
    return recorder.rows


def test_a_linear_casts_and_multiplies() -> None:
    rows = recorded(F.linear, (10, 4), (8, 4))
    casts, (product,) = rows[:2], rows[2:]
    assert [row.kind for row in casts] == ["casts", "casts"]
    assert sum(row.moved for row in casts) == (10 * 4 + 8 * 4) * (4 + 2)
    assert (product.kind, product.moved) == ("products", (10 * 4 + 4 * 8 + 10 * 8) * 2)


def test_views_are_free_and_what_is_repeated_counts_once() -> None:
    (row,) = recorded(lambda x: x.view(3, 4).t()[:2].expand(5, 2, 3) + 1, (12,))
    assert row.moved == (6 + 5 * 6) * 4


def test_autocast_acts_only_where_it_is_on() -> None:
    def normalized(x: torch.Tensor) -> None:
        assert F.layer_norm(x, (4,)).dtype == torch.float32
        with torch.autocast("meta", enabled=False):
            assert F.layer_norm(x, (4,)).dtype == LOW
        assert F.layer_norm(x, (4,)).dtype == torch.float32

    rows = recorded(normalized, (10, 4), dtype=LOW)
    kinds = [row.kind for row in rows]
    assert kinds == ["casts", "LayerNorm", "LayerNorm", "casts", "LayerNorm"]


def test_a_convolution_adds_its_bias_in_a_kernel_of_its_own() -> None:
    rows = recorded(F.conv2d, (1, 3, 5, 5), (2, 3, 3, 3), (2,), dtype=LOW)
    assert [row.kind for row in rows] == ["biases of convolutions", "convolutions"]


def test_the_residual_stream_is_added_up_in_bfloat16() -> None:
    """No map of a block is cast: what is cast are the images and, once each, weights."""
    cast = [row.moved for row in trace("dgt_nano", "inference", 64, 64) if row.kind == "casts"]
    weights = timm.create_model("dgt_nano", device="meta").parameters()
    of_weights = {weight.numel() * 6 for weight in weights}
    assert 64 * 3 * 64 * 64 * 6 in cast
    assert set(cast) <= {64 * 3 * 64 * 64 * 6, *of_weights}


def test_rows_are_written_with_their_totals(tmp_path: Path, capsys) -> None:
    out = tmp_path / "traffic.json"
    words = ["--models", "dgt_nano", "--batch", "2", "--pixels", "64", "--places"]
    assert main([*words, "--out", str(out)]) == 0
    rows = {row["step"]: row["kinds"] for row in json.loads(out.read_text("utf-8"))["rows"]}
    assert list(rows) == list(traffic.STEPS)
    assert rows["training"]["all"]["bytes"] > 2 * rows["inference"]["all"]["bytes"]
    assert rows["snapshot"]["all"]["kernels"] < 0.5 * rows["inference"]["all"]["kernels"]
    for kinds in rows.values():
        parts = [kinds[kind] for kind in kinds if kind != "all"]
        assert sum(part["kernels"] for part in parts) == kinds["all"]["kernels"]
    assert "layers/block.py" in capsys.readouterr().out
