"""`dgt profile`: related rows, the conclusion drawn from them, sizes found in models, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dgt.utils.errors import UserError
from dgt_command import main, profile

CASE = profile.Case((1, 2, 96, 8), 4, 8)


def rows(**ratios: tuple[float, float]) -> list[dict[str, Any]]:
    """Rows of one case with these ratios, forward and forward with backward."""
    found = {"all": (1.0, 1.0), **ratios}
    return [
        {"case": "a case", "way": way, "ratio": each[0], "ratio_backward": each[1]}
        for way, each in found.items()
    ]


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces a separate process: the function runs here, with whatever peak memory it has."""

    @contextmanager
    def here(*_: object) -> Iterator[Callable[..., Any]]:
        yield lambda function, *arguments: function(*arguments)

    monkeypatch.setattr("dgt_command.profile.own_process", here)


@pytest.mark.usefixtures("own_process")
def test_every_way_is_a_row_beside_pytorchs_own() -> None:
    found = profile.time_ways(CASE, rounds=1)
    assert [row["way"] for row in found] == [profile.GLOBAL, "auto", "auto, residual key"]
    assert {row["case"] for row in found} == {"B1 H2 L96 D8 G4 k8"}
    for row in found:
        assert row["ratio"] == found[0]["ms"] / row["ms"]
        assert row["ratio_backward"] == found[0]["backward_ms"] / row["backward_ms"]
        assert min(row["ms"], row["backward_ms"]) > 0
    numbered = profile.time_ways(CASE, "cpu:0", rounds=1)
    assert [row["peak_mib"] is None for row in numbered] == [
        row["peak_mib"] is None for row in found
    ]


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        (
            (4.1, 5.84),
            "a case: for inference use auto, 4.1 times as fast; for training use auto, 5.8 times as fast.",
        ),
        (
            (0.29, 1.4),
            "a case: for inference keep all keys; for training use auto, 1.4 times as fast.",
        ),
        ((1.04, 0.9), "a case: for inference keep all keys; for training keep all keys."),
    ],
)
def test_the_sentence_follows_from_the_rows(ratios: tuple[float, float], sentence: str) -> None:
    assert profile.advice(rows(auto=ratios)) == sentence


def test_attention_under_a_mask_is_reported() -> None:
    """On a GPU, with few tokens."""
    assert profile.Case((128, 8, 196, 32), 48, 98).takes_mask("cuda")
    assert not profile.Case((128, 2, 3136, 32), 48, 98).takes_mask("cuda")
    found = rows(auto=(1.4, 0.9))
    found[-1]["under_mask"] = True
    assert "auto (all keys under a mask of its group's), 1.4 times as fast" in profile.advice(found)


def test_sizes_in_a_model_of_ours_and_in_a_plain_one() -> None:
    ours = profile.cases_of_model("dgt_nano", 64, 1, 1)
    assert ours[0] == ((1, 1, 256, 32), 16, 32)
    assert len(ours) == len(set(ours))
    assert profile.cases_of_model("test_vit", 160, 12, 5) == [((1, 2, 101, 32), 12, 5)]


def test_a_model_that_is_built_for_one_size_is_built_for_the_one_given() -> None:
    assert profile.cases_of_model("vit_tiny_patch16_384", 64, 4, 8) == [((1, 3, 17, 64), 4, 8)]


def test_attention_of_windows_in_a_fifth_dimension_is_left_out() -> None:
    whole, last = profile.cases_of_model("hiera_tiny_224", 224, 4, 8)
    assert (whole, last) == (((1, 4, 196, 96), 4, 8), ((1, 8, 49, 96), 4, 8))


def test_a_model_that_attends_nowhere_is_refused() -> None:
    with pytest.raises(UserError, match=r"'test_resnet' has no self-attention .* give --shape"):
        profile.cases_of_model("test_resnet", 64, 1, 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give either a timm model or --shape B,H,L,D"),
        (["dgt_nano", "--shape", "1,2,3,4"], "give either a timm model or --shape B,H,L,D"),
        (["no_model"], "'no_model' is not a timm model"),
        (
            ["--shape", "1,2,96,8", "--device", "no_device"],
            "device must be available to PyTorch on this machine, got 'no_device'",
        ),
        (["maxvit_tiny_tf_224", "--size", "250"], "model must accept images of 250 x 250 pixels: "),
    ],
)
def test_mistakes_are_reported_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,3,0", "1,2,3,x"])
def test_a_shape_is_four_whole_numbers(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--shape", shape]) == 2
    assert f"must be four integers B,H,L,D, got {shape!r}" in capsys.readouterr().err


@pytest.mark.usefixtures("own_process")
def test_the_command_prints_a_table_and_a_sentence_or_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["profile", "--shape", "1,2,96,8", "--groups", "4", "--top-k", "8", "--rounds", "1"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| attention | way | forward ms | speedup |")
    assert len(lines) == 7
    assert lines[-1].startswith("B1 H2 L96 D8 G4 k8: for inference ")
    assert main([*words, "--json"]) == 0
    assert {"machine", "rows"} == set(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_it_prints_the_cases_that_were_timed(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[object] = []

    def time_ways(case: object, *_: object) -> list[dict[str, Any]]:
        if timed:
            raise KeyboardInterrupt
        timed.append(case)
        return [
            {**row, **dict.fromkeys(("ms", "backward_ms", "peak_mib"), 1.0)}
            for row in rows(auto=(2.0, 3.0))
        ]

    monkeypatch.setattr(profile, "time_ways", time_ways)
    assert main(["profile", "dgt_nano", *["--json"] * as_json]) == 130
    told = capsys.readouterr()
    if as_json:
        assert [row["way"] for row in json.loads(told.out)["rows"]] == ["all", "auto"]
    else:
        assert "a case: for inference use auto, 2 times as fast" in told.out.replace("2.0", "2")
    assert told.err == "dgt: interrupted\n"
