"""`python -m studies.residual_summary` on records whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dgt.tasks.segment import segmentation_scores
from studies import residual_summary as study

ABOUT = {
    "study": "residual_training",
    "epochs": 30,
    "commit": "a57efc0",
    "command": "python -m studies.residual_training",
    "processor": "a processor",
    "torch": "2.15.0",
    "threads": 1,
    "precision": "bf16-mixed",
}
IMAGES = 1000


def classifier(kind: str, seed: int, wrong: int, **changed: Any) -> dict[str, Any]:
    """A record of a classifier that is wrong in the first images at one size."""
    test = {"images": IMAGES, "wrong": " ".join(map(str, range(wrong)))}
    about = {"data_set": "imagenette", "kind": kind, "seed": seed, "tests": {"96": test}}
    return {**ABOUT, **about, **changed}


def segmenter(kind: str, counts: torch.Tensor) -> dict[str, Any]:
    """A record of a segmenter with these confusion matrices, (images, classes, classes)."""
    texts = [" ".join(map(str, matrix.flatten().tolist())) for matrix in counts]
    tests = {"320": {"confusions": texts}}
    return {**ABOUT, "data_set": "camvid", "kind": kind, "seed": 0, "tests": tests}


def rows_by_kind(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["kind"]: row for row in study.summarize(records)["rows"]}


def test_a_single_seed_decides_nothing() -> None:
    rows = rows_by_kind([classifier("all keys", 0, 200), classifier("groups", 0, 210)])
    row = rows["groups"]
    assert row["score"] == [pytest.approx(79.0)]
    assert row["ahead"] == [pytest.approx(-1.0)]
    # ten of a thousand images differ by one
    spread = (0.01 * 0.99 * 1000 / 999) ** 0.5
    assert row["half_over_images"] == [pytest.approx(100 * 1.96 * spread / 1000**0.5)]
    assert row["half_over_seeds"] is None
    assert (row["verdict"], row["seeds_to_decide"]) == ("undecided", None)
    assert rows["all keys"]["ahead"] == [0.0]


@pytest.mark.parametrize(
    ("worse", "found", "needed"),
    [
        ((0, 1, 2), "on par", None),  # -0.1 +- 0.25
        ((20, 21, 22), "behind", None),  # -2.1 +- 0.25
        ((-5, 0, 11), "undecided", None),  # the mean lies too near the margin
        ((6, 10, 14), "undecided", 5),  # -1 +- 0.99; 2.78 x 0.4 / sqrt(5) is below 0.5
    ],
)
def test_verdicts(worse: tuple[int, ...], found: str, needed: int | None) -> None:
    records = [classifier("all keys", seed, 200) for seed in range(3)]
    records += [
        classifier("groups, 1 residual key", seed, 200 + more) for seed, more in enumerate(worse)
    ]
    row = rows_by_kind(records)["groups, 1 residual key"]
    assert row["ahead"] == [pytest.approx(-more / 10) for more in worse]
    assert row["verdict"] == found
    assert row["seeds_to_decide"] == needed


def test_miou_of_all_images_with_the_interval_of_a_jackknife() -> None:
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 50, (5, 3, 3), generator=random)
    other = torch.randint(1, 50, (5, 3, 3), generator=random)
    row = rows_by_kind([segmenter("all keys", counts), segmenter("groups", other)])["groups"]

    def miou(matrices: torch.Tensor) -> float:
        return 100 * float(segmentation_scores(matrices.sum(0))["miou"])

    assert row["score"] == [pytest.approx(miou(other))]
    assert row["ahead"] == [pytest.approx(miou(other) - miou(counts))]
    kept = [[place for place in range(5) if place != out] for out in range(5)]
    left_out = torch.tensor([miou(other[places]) - miou(counts[places]) for places in kept])
    half = 4 * 2.78 * float(left_out.std()) / 5**0.5
    assert row["half_over_images"] == [pytest.approx(half, rel=1e-4)]


def test_runs_that_are_no_pairs_are_named() -> None:
    records = [
        classifier("all keys", 0, 200),
        classifier("groups", 0, 210, precision="32-true"),
        classifier("groups", 1, 210),
    ]
    summary = study.summarize(records)
    assert [row["kind"] for row in summary["rows"]] == ["all keys"]
    assert summary["left_out"] == [
        "imagenette, groups, seed 0: not as all keys in precision",
        "imagenette, groups, seed 1: all keys were not trained with this seed",
    ]


def test_seeds_may_differ_in_processor_and_need_not_all_be_there() -> None:
    records = [
        classifier("all keys", 0, 200),
        classifier("groups", 0, 210),
        classifier("all keys", 1, 200, processor="another", precision="32-true"),
        classifier("groups", 1, 205, processor="another", precision="32-true"),
        classifier("all keys", 2, 200),
    ]
    rows = rows_by_kind(records)
    assert rows["groups"]["seeds"] == [0, 1]
    assert rows["groups"]["ahead"] == [pytest.approx(-1.0), pytest.approx(-0.5)]
    assert rows["groups"]["processor"] == ["a processor", "another"]
    assert rows["groups"]["precision"] == ["32-true", "bf16-mixed"]
    assert rows["all keys"]["seeds"] == [0, 1, 2]


def test_trainings_of_other_lengths_are_rows_of_their_own() -> None:
    records = [
        classifier(kind, seed, wrong, epochs=epochs)
        for seed, epochs in ((0, 30), (1, 90))
        for kind, wrong in (("all keys", 200), ("groups", 200 + epochs))
    ]
    summary = study.summarize(records)
    assert [(row["epochs"], row["kind"], row["seeds"]) for row in summary["rows"]] == [
        (30, "all keys", [0]),
        (30, "groups", [0]),
        (90, "all keys", [1]),
        (90, "groups", [1]),
    ]
    assert len(study.draw(summary).axes) == 2


def test_products_are_counted_for_both_layers() -> None:
    # 480 x 360: 10,800 and 2,700 tokens of 32 and 64 channels, 64 keys, 16 groups
    dense = 10800**2 * 32 + 2700**2 * 64
    groups = (10800 * 32 + 2700 * 64) * (64 + 16)
    assert study.share_of_products("camvid", "groups", 480) == pytest.approx(groups / dense)
    one = (10800 * 32 + 2700 * 64) * (64 + 1 + 16 + 24)
    found = study.share_of_products("camvid", "groups, 1 residual key", 480)
    assert found == pytest.approx(one / dense)
    assert study.share_of_products("imagenette", "all keys", 96) == 1


def test_the_command_writes_numbers_a_figure_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    counts = torch.tensor([[[5, 1], [1, 5]], [[6, 0], [2, 4]]])
    records = [
        classifier("all keys", 0, 200),
        classifier("groups", 0, 210),
        segmenter("all keys", counts),
        segmenter("groups, 16 residual keys", counts),
    ]
    for number, record in enumerate(records):
        (folder / f"{number}.json").write_text(json.dumps(record))
    words = ["--records", str(folder), "--json", str(tmp_path / "all.json")]
    assert study.main([*words, "--figure", str(tmp_path / "all.png")]) == 0
    assert len(json.loads((tmp_path / "all.json").read_text())["rows"]) == 4
    assert (tmp_path / "all.png").stat().st_size > 1000
    assert (
        "| imagenette, 96 | 30, bf16-mixed | groups | 11.1 | 79.0 | -1.0 ± 0.6 | -1.00 | undecided |"
        in (capsys.readouterr().out)
    )
    (folder / "other.json").write_text(json.dumps({"rows": []}))
    assert study.main(words) == 2
    assert "is something else" in capsys.readouterr().err
