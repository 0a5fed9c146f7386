"""Clusters shared between layers, or in two levels: the operator's own attention is one of the variants,
and all of them are exact where groups leave nothing out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dgt
from dgt.acceleration.settings import Split
from dgt.utils.errors import UserError
from studies import captured_attention, cluster_variants
from studies.captured_attention import EXACT, Captured
from studies.cluster_variants import (
    COMPARED,
    OWN,
    SHARES,
    VARIANTS,
    approximate,
    compare,
    patches_of,
    products_of,
)

SAMPLE = torch.arange(0, 140, 3)


def operands(seed: int = 0) -> Captured:
    """Random operands of two heads, with one class token."""
    random = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, 2, 141, 8, generator=random)
    return Captured(2 * query, key, value, (10, 14), 1)


def sampled_dense(call: Captured) -> Tensor:
    return EXACT(call.query[:, :, 1 + SAMPLE], call.key, call.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_keys_are_dense_attention(variant: str) -> None:
    call = operands()
    found = approximate(call, patches_of(operands(1)), SAMPLE, Split(8, 140, 6), variant)
    torch.testing.assert_close(found, sampled_dense(call), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_queries_are_exact(variant: str) -> None:
    """Residual keys, merged ones too, are exact for the mean query of a group."""
    call = operands()
    call = call._replace(query=call.query[:, :, :1].expand_as(call.query).contiguous())
    found = approximate(call, patches_of(operands(1)), SAMPLE, Split(4, 5, 6), variant)
    torch.testing.assert_close(found, sampled_dense(call), atol=2e-5, rtol=1e-4)


def test_own_clusters_are_those_of_the_operator() -> None:
    call = operands()
    found = approximate(call, patches_of(operands(1)), SAMPLE, Split(8, 20, 6), OWN)
    operator = dgt.clustered_attention(
        *call[:3], num_groups=8, top_k=20, residual_keys=6, num_prefix_tokens=1
    )
    torch.testing.assert_close(found, operator[:, :, 1 + SAMPLE], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_that_equals_the_one_before(variant: str) -> None:
    """Its clusters are then its own, so sharing changes nothing but the number of products."""
    call = operands()
    split = Split(8, 20, 6)
    own, found = (
        approximate(call, patches_of(call), SAMPLE, split, which) for which in (OWN, variant)
    )
    if "before" in variant and "refined" not in variant:
        torch.testing.assert_close(found, own)
        assert products_of(split, 140, variant) < products_of(split, 140, OWN)
    else:
        assert (found - own).norm() < own.norm()


class TinyModel(nn.Module):
    """Layers with one attention each over patches of 14 x 14 pixels and a class token."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 16, 14, 14)
        self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward_features(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        x = torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1)
        for block in self.blocks:
            parts = (3 * block(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            found = torch.nn.functional.scaled_dot_product_attention(*parts)
            x = x + found.transpose(1, 2).flatten(2)
        return x


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a study of a tiny model on two pictures."""
    monkeypatch.setattr(captured_attention, "load_dinov2", lambda _: TinyModel().eval())
    random = torch.Generator().manual_seed(0)
    names = []
    for number in range(2):
        pixels = torch.randint(0, 256, (40, 50, 3), generator=random, dtype=torch.uint8)
        names.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(pixels.numpy()).save(names[-1])
    return ["--photographs", ",".join(names), "--size", "140"]


def test_the_study_goes_on_where_it_was(words: list[str], tmp_path: Path) -> None:
    folder = cluster_variants.cluster_variants(words, out=tmp_path / "out")
    path = folder / "cluster_variants.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content["rows"]
    assert len(rows) == 2 * 2 * (len(SHARES) + (len(VARIANTS) - 1) * len(COMPARED))
    content["rows"] = [row for row in rows if row["image"] == 0]
    path.write_text(json.dumps(content), encoding="utf-8")
    cluster_variants.cluster_variants(words, out=tmp_path / "out")
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == rows
    for row in compare(rows):
        assert 0 < row.error < 1
        assert row.ratio == pytest.approx(1.0) if row.variant == OWN else row.ratio > 0
    assert "two levels" in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--photographs", ""], "--photographs must name at least one file, got none"),
        (["--photographs", "none.jpg"], "a photograph is missing: 'none.jpg'"),
        (["--size", "100"], "--size must be a multiple of 14, got 100"),
        (["--data.root", "x"], "cluster_variants takes no --data.root"),
        (["--seed", "1"], "expected --weights, --photographs, --size or --data.KEY"),
    ],
)
def test_bad_words(words: list[str], extra: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        cluster_variants.cluster_variants([*words, *extra], out=tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()
