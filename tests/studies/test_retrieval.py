"""Retrieval at a distance: the task is as described, a window cannot see the source, and rows are reused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dgt.utils.errors import UserError
from studies import retrieval as module
from studies.retrieval import (
    CODE,
    ROWS,
    Batch,
    Network,
    Row,
    Settings,
    make_batch,
    markdown,
    measure,
    retrieval,
    train,
)

DEFAULT = Settings()
SMALL = Settings(side=8, codes=6, values=4, dim=16, steps=20, batch_size=2, test_maps=4)
WORDS = [
    "--side",
    "8",
    "--codes=6",
    "--values=4",
    "--dim=16",
    "--steps=20",
    "--batch_size=2",
    "--test_maps",
    "4",
]


def draw(settings: Settings = DEFAULT, size: int = 8, seed: int = 0) -> Batch:
    """Some maps."""
    return make_batch(settings, size, torch.Generator().manual_seed(seed))


def row(name: str) -> Row:
    """One of the rows."""
    return next(row for row in ROWS if row.name == name)


@pytest.mark.parametrize("settings", [DEFAULT, Settings(codes=16), SMALL])
def test_a_probe_has_one_source_with_its_code_and_the_value_to_tell(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back from maps without noise: flags, codes and values."""
    monkeypatch.setattr(module, "NOISE", 0.0)
    tokens, target, source = draw(settings)
    flat, asked = tokens.flatten(1, 2), target >= 0
    is_source, is_probe = flat[..., 2 * CODE] == 2, flat[..., 2 * CODE + 1] == 2
    assert torch.equal(asked, is_probe)
    assert torch.equal(asked, source >= 0)
    assert not (is_source & is_probe).any()
    assert (is_source.sum(1) == settings.codes).all()
    assert (is_probe.sum(1) == settings.places * 3 // 4).all()
    codes_of_values: dict[int, torch.Tensor] = {}
    for image, goals, sources in zip(flat, target, source, strict=True):
        probes, places = image[goals >= 0], sources[goals >= 0]
        # Every code is asked for.
        assert set(places.tolist()) == set(image[:, 2 * CODE].nonzero().flatten().tolist())
        assert torch.equal(probes[:, :CODE], image[places, :CODE])
        assert len(image[places, :CODE].unique(dim=0)) == settings.codes
        assert not probes[:, CODE : 2 * CODE].any()  # a probe has no value
        for goal, told in zip(
            goals[goals >= 0].tolist(), image[places, CODE : 2 * CODE], strict=True
        ):
            assert torch.equal(codes_of_values.setdefault(goal, told), told)
    assert len(codes_of_values) == settings.values


@pytest.mark.parametrize("settings", [DEFAULT, SMALL])
def test_sources_lie_beyond_the_gap_on_either_side(settings: Settings) -> None:
    """At least `gap` columns separate a probe from any source, and both halves are used."""
    _, target, source = draw(settings, size=32)
    column = torch.arange(settings.side**2) % settings.side
    asked = target >= 0
    distance = (column.expand_as(source) - source % settings.side)[asked]
    assert distance.abs().min() > settings.gap
    assert {bool(sign) for sign in distance > 0} == {True, False}


@pytest.mark.parametrize("name", ["windows 4 x 4", "windows, two blocks, shifted"])
def test_no_window_sees_a_source(name: str) -> None:
    """The sources' half does not affect any answer, whatever the weights; with global attention it does."""
    batch = draw(size=2)
    hidden = batch.tokens.clone()
    where = batch.source[batch.source >= 0]
    hidden.flatten(1, 2)[torch.nonzero(batch.source >= 0)[:, 0], where, CODE : 2 * CODE] += (
        5  # other values
    )
    asked = batch.target >= 0
    with torch.no_grad():
        for other, same in ((name, True), ("global", False)):
            torch.manual_seed(0)
            network = Network(row(other), DEFAULT).eval()
            difference = (network(hidden) - network(batch.tokens))[asked].abs().max()
            assert (difference == 0) == same, (other, difference)


def test_all_keys_make_every_choice_global_attention() -> None:
    """With k = L, groups, best keys, and random keys equal global attention with the same weights."""
    batch, answers = draw(SMALL, 2), []
    for name in ("global", "DG, G 4, k 16", "best keys of each query, k 16", "random keys, k 16"):
        torch.manual_seed(0)
        network = Network(row(name), SMALL).eval()
        network.load_state_dict(Network(row("global"), SMALL).state_dict() | network.state_dict())
        network.set_top_k(64)
        answers.append(network(batch.tokens))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0])


def test_probes_are_served_by_keys_of_their_group() -> None:
    """All probes with every key, and fewer with fewer keys."""
    network, batch = Network(row("DG, G 4, k 16"), SMALL), [draw(SMALL)]
    served = []
    for top_k in (64, 16, 4, 1):
        network.set_top_k(top_k)
        served.append(measure(network, batch)["served"])
    assert served[0] == 100
    assert served == sorted(served, reverse=True)
    assert served[-1] < 100
    assert "served" not in measure(Network(row("global"), SMALL), batch)


def test_a_short_training_learns_to_retrieve() -> None:
    """Four codes and two values on a small map: global attention and groups get far above chance in seconds."""
    settings = Settings(side=8, codes=2, values=2, dim=32, steps=200, batch_size=16, test_maps=32)
    result = train(row("DG, G 4, k 16"), 0, settings)
    assert result["accuracy"] > 85
    assert result["by_top_k"][-1]["top_k"] == 64


def test_rows_are_kept_and_done_ones_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two rows, the same command trains the rest; run a third time, it trains nothing."""
    trained: list[tuple[str, int]] = []

    def counted(row: Row, seed: int, settings: Settings) -> dict[str, object]:
        if len(trained) == 2:
            trained.clear()
            raise KeyboardInterrupt
        trained.append((row.name, seed))
        return train(row, seed, settings)

    few = (row("global"), row("DG, G 16, k 4"), row("stripes"))
    monkeypatch.setattr(module, "ROWS", few)
    monkeypatch.setattr(module, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        retrieval(WORDS, 1, tmp_path)
    assert retrieval(WORDS, 1, tmp_path) == tmp_path
    assert trained == [("stripes", 0)]
    retrieval(WORDS, 1, tmp_path)
    assert trained == [("stripes", 0)]
    content = json.loads((tmp_path / "retrieval.json").read_text(encoding="utf-8"))
    assert [run["row"] for run in content["runs"]] == [each.name for each in few]
    assert {"command", "device", "versions", "settings"} < set(content)
    assert content["runs"][0] | {"cpu_seconds": 0} == train(few[0], 0, SMALL) | {"cpu_seconds": 0}
    assert [len(at["accuracies"]) for at in content["runs"][1]["last_batch"]] == [
        module.REPEATS
    ] * 3
    text = (tmp_path / "retrieval.md").read_text(encoding="utf-8")
    assert text == markdown(content["runs"])
    assert len(text.splitlines()) == 2 + len(few)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "5"], "steps must be at least 20"),
        (["--codes", "200"], "codes must be at most 72"),
        (["--side", "7"], "side and gap must be even"),
        (["--codez", "5"], "expected --side"),
        (["--codes", "many"], "with its value, got --codes many"),
    ],
)
def test_wrong_settings_are_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    """Before anything is trained or written."""
    with pytest.raises(UserError, match=message) as error:
        retrieval(words, 1, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_wrong_folders_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: Callable[[Path], int]
) -> None:
    """Other settings, another experiment's file, a second process, no seeds."""
    monkeypatch.setattr(module, "ROWS", (row("global"),))
    retrieval(WORDS, 1, tmp_path)
    with pytest.raises(UserError, match="other settings"):
        retrieval(["--codes", "16"], 1, tmp_path)
    with pytest.raises(UserError, match="seeds must be at least 1"):
        retrieval(WORDS, 0, tmp_path)
    (tmp_path / "retrieval.json").write_text('{"runs": [', encoding="utf-8")
    with pytest.raises(UserError, match="does not hold results"):
        retrieval(WORDS, 1, tmp_path)
    at_work(tmp_path)
    with pytest.raises(FileExistsError, match="another process"):
        retrieval(WORDS, 1, tmp_path)
