"""Rivals at equal measured time: each equals dense attention if it drops nothing, and the study resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import dgt
from dgt.utils.errors import UserError
from studies import (
    captured_attention,
    residual_rivals,
    rival_attentions,
    rival_blocks,
)
from studies.captured_attention import EXACT, Captured, middle_of, read_photograph
from studies.command import run_study
from studies.figure_rivals import figure_rivals
from studies.rival_summary import BUDGETS, cells, summary

GRID = (14, 16)
ALL = {  # settings that drop nothing
    "dense": {"engine": "native"},
    "residual keys": {"groups": 8, "residual": 4, "keys": 224},
    "one residual key": {"groups": 8, "keys": 224},
    "pooled keys": {"factor": [1, 1], "engine": "torch"},
    "strided keys": {"step": [1, 1], "mean": False, "engine": "native"},
    "merged tokens (ToMe)": {"share": 1.0, "queries": True, "engine": "native"},
    "windows": {"side": 16, "engine": "torch"},
    "blocks (SpargeAttn)": {"mass": 2.0, "likeness": 0.6},
    "blocks of clusters (SVG 2)": {"clusters": 4, "mass": 2.0},
    "with compensation (SVG-EAR)": {"clusters": 4, "share": 1.0},
}


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without compilation, which computes the same."""
    monkeypatch.setattr(rival_blocks, "compiled", lambda: flex_attention)


def operands(channels: int = 8) -> Captured:
    """Random operands of two heads, with one class token."""
    random = torch.Generator().manual_seed(0)
    tokens = 1 + GRID[0] * GRID[1]
    query, key, value = torch.randn(3, 1, 2, tokens, channels, generator=random)
    return Captured(2 * query, key, value, GRID, 1)


def dense(call: Captured) -> torch.Tensor:
    return EXACT(call.query, call.key, call.value)


@pytest.mark.parametrize("name", residual_rivals.METHODS)
def test_all_keys_are_dense_attention(name: str) -> None:
    call = operands()
    found = residual_rivals.METHODS[name].attend(call, **ALL[name])
    torch.testing.assert_close(found, dense(call), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", residual_rivals.METHODS)
def test_less_is_something_else_and_weights_sum_to_one(name: str) -> None:
    """Each setting of the study on few tokens: an approximation without NaN."""
    call = operands()
    ones = call._replace(value=torch.ones_like(call.value))
    method = residual_rivals.METHODS[name]
    for setting in residual_rivals.without_engine(method.settings(224)):
        if setting.get("groups", 0) > 64 or setting.get("keys", 0) > 200:
            continue
        options = residual_rivals.runnable(setting, method, 224)
        torch.testing.assert_close(method.attend(ones, **options), ones.value)
        found = method.attend(call, **options)
        torch.testing.assert_close(found[:, :, :1], dense(call)[:, :, :1])
        assert found.isfinite().all()


def test_means_of_blocks_are_exact_where_their_keys_are_equal() -> None:
    """Compensation then loses nothing; the same blocks without it do."""
    call = operands()
    same = call.key[:, :, :1].expand_as(call.key).contiguous()
    values = call.value[:, :, :1].expand_as(call.value).clone()
    values[:, :, 100:] = call.value[:, :, 100:101]
    pieces = rival_blocks.Pieces(call.query[:, :, 1:], same, values)
    chosen = torch.zeros(1, 2, 2, 4, dtype=torch.bool)
    right = EXACT(*pieces)
    found = rival_blocks.attend_with_compensation(pieces, chosen)
    torch.testing.assert_close(found, right)
    assert (rival_blocks.attend_to_blocks(pieces, chosen) - right).abs().max() > 0.1


def test_blocks_that_are_most_wrong_are_computed() -> None:
    """A block whose keys are equal is compensated; one with two kinds of keys is not."""
    call = operands()
    key = call.key[:, :, :1].expand(1, 2, 256, 8).clone()
    key[:, :, 64:96] *= -3
    pieces = rival_blocks.Pieces(call.query[:, :, 1:], key, torch.randn(1, 2, 256, 8))
    pieces.value[:, :, :64] = pieces.value[:, :, 128:] = 1.0
    assert rival_blocks.routed_choice(pieces, 0.25)[..., 1].all()


def test_tokens_merge_with_the_likest() -> None:
    """Pairs of equal tokens become one, in any order."""
    pairs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    ids = rival_attentions.merge_map(torch.stack([pairs, 2 * pairs], dim=1).flatten(0, 1), 8)
    assert ids[::2].tolist() == ids[1::2].tolist()
    assert sorted(ids[::2].tolist()) == list(range(8))


def test_windows_see_themselves_and_the_class_token() -> None:
    call = operands()
    value = torch.zeros_like(call.value)
    value[:, :, 1] = 1.0  # the upper left patch
    found = rival_attentions.windows(call._replace(value=value), 8, "torch")
    assert (found[:, :, 0] > 0).all()
    touched = (found[0, 0, 1:].sum(-1) > 0).view(GRID)
    assert touched[:8, :8].all()
    assert touched.sum() == 64


class TinyModel(nn.Module):
    """Layers with one attention each over patches of 14 x 14 pixels and a class token."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 16, 14, 14)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(images).flatten(2).mT
        x = torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1)
        for layer in self.layers:
            parts = layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            found = torch.nn.functional.scaled_dot_product_attention(*parts)
            x = x + found.transpose(1, 2).flatten(2)
        return x


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Command line options for a tiny model and photograph."""
    monkeypatch.setattr(residual_rivals, "load_dinov2", lambda _: TinyModel().eval())
    names = ("dense", "residual keys", "pooled keys", "windows")
    few = {name: residual_rivals.METHODS[name] for name in names}
    monkeypatch.setattr(residual_rivals, "METHODS", few)
    pixels = np.random.default_rng(0).integers(0, 255, (240, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    words = ["--weights", "w", "--photographs", str(tmp_path / "a.png")]
    return {"words": [*words, "--sizes", "224", "--layers", "0,1"], "out": tmp_path / "study"}


def test_the_study_goes_on_where_it_was(study: dict[str, Any]) -> None:
    words, out = study["words"], study["out"]
    folder = residual_rivals.residual_rivals([*words, "--what", "errors"], 3, out)
    errors = json.loads((folder / "residual_rivals.json").read_text())["errors"]
    assert {row["layer"] for row in errors} == {0, 1}
    assert all(row["error"] < 1e-5 for row in errors if row["method"] == "dense")
    residual_rivals.residual_rivals(words, 3, out)
    content = json.loads((folder / "residual_rivals.json").read_text())
    assert content["errors"] == errors
    times = content["times"]
    residual_rivals.residual_rivals(words, 3, out)
    assert json.loads((folder / "residual_rivals.json").read_text())["times"] == times
    found = cells(content)
    assert len(found) == 3 * len(BUDGETS)
    assert "Residual keys are equal or better in" in (folder / "residual_rivals.md").read_text()
    figure = figure_rivals(content)
    assert figure is not None
    assert len(figure.axes) == 2


def test_errors_without_times_are_no_failure(
    study: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The times may be measured later, on an idle machine."""
    words = [*study["words"], "--what", "errors", "--out", str(study["out"])]
    arguments = ("residual_rivals", "", residual_rivals.residual_rivals, figure_rivals, words)
    assert run_study(*arguments) == 0
    assert "residual_rivals.json" in capsys.readouterr().out
    assert not (study["out"] / "residual_rivals.png").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--sizes", "225"], "--sizes must be multiples of 14, got 225"),
        (["--what", "speed"], "--what must be of errors, model, times, got 'speed'"),
        (["--photographs", "none.png"], "a photograph is missing: 'none.png'"),
        (["--layers", "7"], "--layers must be layers of the model, got 7"),
        (["--data.root", "x"], "residual_rivals takes no --data.root"),
    ],
)
def test_bad_words(study: dict[str, Any], extra: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        residual_rivals.residual_rivals([*study["words"], *extra], 3, study["out"])


def test_weights_that_are_not_there() -> None:
    with pytest.raises(UserError, match="--weights must be a safetensors file"):
        captured_attention.load_dinov2("nowhere.safetensors")


def made_up(ours: float, theirs: float) -> dict[str, Any]:
    """Results for one size and layer, in which pooled keys are as fast as residual keys."""
    place = {"size": 518, "layer": 0}
    times = [
        {**place, "method": "dense", "setting": {"engine": "torch"}, "ms": 100.0},
        {**place, "method": "residual keys", "setting": {"keys": 1}, "ms": 20.0},
        {**place, "method": "pooled keys", "setting": {"factor": 2, "engine": "torch"}, "ms": 40.0},
        {
            **place,
            "method": "pooled keys",
            "setting": {"factor": 2, "engine": "native"},
            "ms": 22.0,
        },
    ]
    rows = [("residual keys", {"keys": 1}, ours), ("pooled keys", {"factor": 2}, theirs)]
    errors = [
        {**place, "image": image, "method": method, "setting": setting, "error": error}
        for method, setting, error in rows
        for image in (0, 1)
    ]
    settings = {"sizes": [518], "layers": [0]}
    return {"settings": settings, "errors": errors, "model": [], "times": times}


def test_lost_cells_are_reported() -> None:
    """The faster engine counts; a budget that no method meets is open."""
    won = summary(made_up(0.01, 0.02))
    assert "better in 2 of 2 cells" in won
    assert "open: 518 px, layer 0, 15 % of the time: no method is so fast" in won
    assert "| 518 | 0 | 25 %, 25 ms | **1** | 2 |" in won
    lost = summary(made_up(0.03, 0.02))
    place = "518 px, layer 0, 25 % of the time"
    assert f"lost: {place}: pooled keys 2 % in 22 ms, residual keys 3 % in 20 ms" in lost


def test_every_method_has_as_many_settings() -> None:
    """Residual keys may not win by trying more."""
    of_methods = {
        name: len(residual_rivals.without_engine(method.settings(1369)))
        for name, method in residual_rivals.METHODS.items()
        if name != "dense"
    }
    assert set(of_methods.values()) == {12}


def test_photographs(tmp_path: Path) -> None:
    """The center of an image, and the raccoon shipped with SciPy."""
    import bz2

    Image.new("RGB", (300, 200)).save(tmp_path / "a.png")
    image = middle_of(read_photograph(tmp_path / "a.png"), 140, 140)
    assert image.size == (140, 140)
    (tmp_path / "face.dat").write_bytes(bz2.compress(bytes(768 * 1024 * 3)))
    assert read_photograph(tmp_path / "face.dat").size == (1024, 768)


def test_residual_keys_are_the_operator() -> None:
    call = operands()
    found = rival_attentions.residual_keys(call, 8, 4, 16)
    right = dgt.clustered_attention(
        call.query,
        call.key,
        call.value,
        num_groups=8,
        top_k=16,
        residual_keys=4,
        num_prefix_tokens=1,
    )
    assert torch.equal(found, right)
