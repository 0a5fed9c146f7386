"""The paper's comparators: those that timm lacks, and the rows of `dgt info --comparators`."""

import json
from pathlib import Path

import pytest
import timm
import torch

import dgt
from dgt.app import info
from dgt.models.borrowed import Borrowed, PositionedBlock
from dgt.models.heads.backbone import build_backbone

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "comparators.json"


def test_pvt_is_a_backbone_for_images_of_any_size() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("pvt_small", depths=(1, 1, 1, 1)).eval()
    with torch.no_grad():
        maps = backbone(torch.randn(1, 3, 70, 100))
    assert [tuple(x.shape[1:]) for x in maps] == [(64, 18, 25), (128, 9, 13), (320, 5, 7), (512, 3, 4)]


def test_the_table_of_positions_is_unchanged_at_the_size_it_is_made_for() -> None:
    model = Borrowed((1, 1, 1, 1), num_classes=3).eval()
    embed = model.model.pvt.encoder.patch_embeddings[0]
    table = embed.position_embeddings
    torch.testing.assert_close(embed.interpolate_pos_encoding(table, 56, 56), table)
    assert embed.interpolate_pos_encoding(table, 5, 9).shape == (1, 45, 64)


def test_cvt_has_no_four_maps() -> None:
    with pytest.raises(ValueError, match="cvt_13"):
        build_backbone("cvt_13", depths=(1, 1, 1))


@pytest.mark.parametrize("prefix", [0, 1])
def test_cpvt_encodes_positions_of_patches_alone(prefix: int) -> None:
    block = PositionedBlock(torch.nn.Identity(), 4, prefix, None)
    x = torch.randn(2, prefix + 9, 4)
    out = block(x)
    assert torch.equal(out[:, :prefix], x[:, :prefix])
    grid = x[:, prefix:].view(2, 3, 3, 4)
    torch.testing.assert_close(out[:, prefix:], (grid + block.cpe(grid)).flatten(1, 2))


def test_rows_are_the_papers_and_their_models_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {(row["task"], row["row"]): row for row in json.loads(RESULTS.read_text("utf-8"))["rows"]}
    monkeypatch.setattr(info, "_row", lambda model, task, *_: {"model": model, "task": task})
    rows = [row for task in ("classify", "segment", "detect") for row in info.comparator_rows(task)]
    assert [(row["task"], row["row"]) for row in rows] == list(counted)
    assert all(timm.is_model(row["model"]) for row in rows if row["model"])
    assert all(row["model"] == counted[row["task"], row["row"]]["model"] for row in rows)


@pytest.mark.parametrize("name", ["cvt_13", "cpvt_small", "cmt_small"])
def test_counts_are_those_of_the_table(name: str) -> None:
    (row,) = (row for row in json.loads(RESULTS.read_text("utf-8"))["rows"] if row["model"] == name)
    assert dgt.cost(name)[:2] == (row["params"], row["flops"])


def test_a_model_that_no_library_has_keeps_the_papers_numbers() -> None:
    row = {"row": "ViL-S", **info._row(None, "classify", (224, 224), 25, 4.9)}
    assert (row["params"], row["paper_flops"]) == (None, 4_900_000_000)
    assert "no library" in info.model_table([row, row])
