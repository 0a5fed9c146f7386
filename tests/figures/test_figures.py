"""The figures: what is highlighted, where, in which panel; errors; files; matplotlib's state is unchanged."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

import dgt
from dgt.figures import (
    GroupPanel,
    choose_groups,
    figure_contact_sheet,
    figure_group_map,
    figure_groups,
    figure_titled,
    raster,
    save_animation,
    save_figure,
)

GRID = (3, 5)  # not square, so that a flip or a transposition is visible


def _panel(**changes: Any) -> GroupPanel:
    """A gray image of 60 x 100 pixels; group 0 is the top right token, group 1 the bottom row, group 2 the rest."""
    group_ids = np.full(GRID, 2)
    group_ids[0, 4] = 0
    group_ids[2, :] = 1
    fields: dict[str, Any] = {
        "image": np.full((60, 100, 3), 128, np.uint8),
        "grid": GRID,
        "group_ids": group_ids.reshape(-1),
        "key_ids": np.array([[10, -1], [0, 1], [7, 8]]),
    }
    return GroupPanel(**(fields | changes))


def _tokens(figure: Figure, index: int) -> NDArray[Any]:
    """(h, w, 3) in [0, 255]: the color drawn at the center of every token in one of the figure's axes."""
    figure.set_dpi(150)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba()).astype(int)  # type: ignore[no-untyped-call]
    axes = figure.axes[index]
    points = [
        axes.transData.transform((column + 0.5, row + 0.5))
        for row in range(GRID[0])
        for column in range(GRID[1])
    ]
    return np.array([pixels[len(pixels) - 1 - int(y), int(x), :3] for x, y in points]).reshape(
        *GRID, 3
    )


def _lit(figure: Figure, index: int) -> list[int]:
    """The tokens drawn in color: the image is gray, so tokens that are not highlighted stay gray."""
    colors = _tokens(figure, index).reshape(-1, 3)
    return [int(token) for token in np.flatnonzero(np.ptp(colors, axis=1) > 20)]


def test_what_residual_keys_get_is_written_over_the_keys() -> None:
    share = np.zeros(15)
    share[10:] = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the bottom row, group 1
    figure = figure_groups([_panel(residual_share=share)], groups=[0, 1])
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [[], [], ["0% to residual keys"], [], ["30% to residual keys"]]
    assert not any(axes.texts for axes in figure_groups([_panel()], groups=[0, 1]).axes)


def test_queries_and_keys_are_lit_where_they_are() -> None:
    figure = figure_groups([_panel()], groups=[0, 1])
    assert len(figure.axes) == 5
    assert [_lit(figure, index) for index in range(5)] == [
        [],
        [4],
        [10],
        [10, 11, 12, 13, 14],
        [0, 1],
    ]


def test_image_is_neither_flipped_nor_transposed() -> None:
    image = np.zeros((60, 100, 3), np.uint8)
    image[:20, :20, 0] = 255  # red, top left
    image[40:, :20, 1] = 255  # green, bottom left
    image[:20, 80:, 2] = 255  # blue, top right
    for figure in (
        figure_groups([_panel(image=image)], 1),
        figure_group_map([_panel(image=image)]),
    ):
        tokens = _tokens(figure, 0)
        assert [tokens[place].argmax() for place in ((0, 0), (2, 0), (0, 4))] == [0, 1, 2]
        assert tokens[1, 2].max() < 10


def test_pair_shares_its_color_and_pairs_differ() -> None:
    figure = figure_groups([_panel()], groups=[0, 1])
    queries, keys = _tokens(figure, 1)[0, 4], _tokens(figure, 2)[2, 0]
    others = _tokens(figure, 3)[2, 0], _tokens(figure, 4)[0, 0]
    assert np.abs(queries - keys).max() <= 2
    assert np.abs(others[0] - others[1]).max() <= 2
    assert np.abs(queries - others[0]).max() > 40


def test_unlit_tokens_are_darker_than_the_image() -> None:
    figure = figure_groups([_panel()], groups=[0])
    assert (_tokens(figure, 1)[1:] < _tokens(figure, 0)[1:] - 40).all()


def test_padding_is_never_lit() -> None:
    group_ids = np.full(15, -1)
    group_ids[6] = 0
    panel = _panel(group_ids=group_ids, key_ids=np.array([[-1, -1], [3, 2], [-1, -1]]))
    figure = figure_groups([panel], groups=[0])
    assert _lit(figure, 1) == [6]
    assert _lit(figure, 2) == []
    assert _lit(figure_group_map([panel]), 1) == [6]


def test_heavy_keys_are_brighter() -> None:
    figure = figure_groups(
        [_panel(key_weights=np.array([[1.0, 0.0], [0.2, 0.8], [0.0, 0.0]]))], groups=[1, 2]
    )
    assert _tokens(figure, 2)[0, 1].sum() > _tokens(figure, 2)[0, 0].sum() + 60
    assert _lit(figure, 4) == [7, 8]


@pytest.mark.parametrize(
    ("size", "times"), [((33, 47), 4), ((500, 40), 1), ((20, 100), 1), ((1, 1), 1)]
)
def test_any_image_size_and_many_groups(size: tuple[int, int], times: int) -> None:
    panel = _panel(image=np.full((*size, 3), 90, np.uint8), title="block 1")
    figure = figure_groups([panel, _panel()], groups=[0, 1, 2] * times)
    in_row = 1 + 2 * 3 * times
    assert len(figure.axes) == 2 * in_row
    assert _lit(figure, 1) == [4]
    assert _lit(figure, in_row + 2) == [10]


def test_names_with_dollars_are_no_mathematics() -> None:
    name = "from_$5_to_$10"
    raster(figure_titled(np.zeros((8, 8, 3), np.uint8), name), dpi=20)
    raster(figure_groups([_panel(title=name)]), dpi=20)


def test_panel_with_fewer_groups_leaves_its_pairs_blank() -> None:
    alone = _panel(group_ids=np.zeros(15, int))
    assert len(figure_groups([_panel(), alone], groups=3).axes) == 7 + 3


def test_image_of_padding_alone_is_drawn() -> None:
    padding = _panel(group_ids=np.full(15, -1))
    assert len(figure_groups([padding], groups=3).axes) == 1
    assert figure_group_map([padding]).axes[1].get_title() == "0 of 3 groups in use, perplexity 0.0"


def test_map_colors_tokens_by_group_and_counts() -> None:
    figure = figure_group_map([_panel()])
    tokens = _tokens(figure, 1)
    assert np.abs(tokens[2] - tokens[2, 0]).max() <= 2
    for first, second in (((0, 4), (2, 0)), ((0, 4), (0, 0)), ((2, 0), (0, 0))):
        assert np.abs(tokens[first] - tokens[second]).max() > 30
    shares = np.array([1, 5, 9]) / 15
    expected = f"3 of 3 groups in use, perplexity {np.exp(-(shares * np.log(shares)).sum()):.1f}"
    assert figure.axes[1].get_title() == expected


def test_map_tells_many_groups_apart() -> None:
    grid = (8, 8)
    panel = GroupPanel(
        np.full((64, 64, 3), 128, np.uint8), grid, np.arange(64), np.zeros((64, 1), int)
    )
    image = np.asarray(figure_group_map([panel]).axes[1].get_images()[0].get_array())
    colors = image[48::96, 48::96].reshape(64, 3)
    apart = np.linalg.norm(colors[:, None] - colors[None], axis=-1) + np.eye(64)
    assert apart.min() > 0.05


def test_contact_sheet_has_the_image_and_a_map_for_every_panel() -> None:
    other = np.full(15, 2)
    other[7] = 1
    panels = [
        _panel(title="block 0"),
        _panel(title="block 1", group_ids=other),
        _panel(title="block 2"),
    ]
    figure = figure_contact_sheet(panels)
    assert len(figure.axes) == 4
    assert _lit(figure, 0) == []
    drawn = [_tokens(figure, index).reshape(15, 3) for index in (1, 2, 3)]
    assert np.abs(drawn[0] - drawn[2]).max() <= 2
    assert [
        int(token) for token in np.flatnonzero(np.abs(drawn[1] - drawn[1][0]).max(axis=1) > 20)
    ] == [7]
    assert [axes.get_title() for axes in figure.axes] == ["image", "block 0", "block 1", "block 2"]


def test_animation_has_a_frame_per_figure_and_starts_over(tmp_path: Path) -> None:
    groups = [np.full(15, 2), np.full(15, 1), np.full(15, 0)]
    figures = [figure_group_map([_panel(group_ids=ids)]) for ids in groups]
    save_animation(figures, tmp_path / "a.gif")
    assert os.listdir(tmp_path) == ["a.gif"]
    with Image.open(tmp_path / "a.gif") as opened:
        assert opened.n_frames == 3
        assert opened.info["loop"] == 0
        seen = []
        for frame in range(3):
            opened.seek(frame)
            seen.append((opened.info["duration"], opened.convert("RGB").tobytes()))
    assert [duration for duration, _ in seen] == [700, 700, 2100]
    assert len({pixels for _, pixels in seen}) == 3


def test_animation_refuses_bad_input(tmp_path: Path) -> None:
    figure = figure_group_map([_panel()])
    for figures, name, message in (
        ([figure], "a.png", "must end in .gif"),
        ([], "a.gif", "at least one figure"),
        ([figure, figure_groups([_panel()], 1)], "a.gif", "have the same size"),
    ):
        with pytest.raises(ValueError, match=message):
            save_animation(figures, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="existing folder"):
        save_animation([figure], tmp_path / "missing" / "a.gif")
    assert os.listdir(tmp_path) == []


def test_choose_prefers_large_groups_with_other_keys() -> None:
    group_ids = np.array([0] * 10 + [1] * 8 + [2] * 6 + [4])
    key_ids = np.array([[0, 1], [0, 1], [20, 21], [5, 6], [-1, -1]])
    # Group 1 is larger than group 2 but has the keys of group 0; group 3 has no query, group 4 no key.
    assert choose_groups(group_ids, key_ids, 1) == [0]
    assert choose_groups(group_ids, key_ids, 2) == [0, 2]
    assert choose_groups(group_ids, key_ids, 5) == [0, 2, 1]


def test_choose_prefers_distant_groups() -> None:
    # Each column is a group; all have the same size.
    group_ids = np.repeat([0, 1, 2, 3], 4).reshape(4, 4).T
    key_ids = np.arange(4)[:, None]
    assert choose_groups(group_ids, key_ids, 2)[1] == 3


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000))
def test_choose_returns_different_groups_in_use(
    tokens: int, groups: int, keys: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    group_ids = random.integers(-1, groups, tokens)
    key_ids = random.integers(-1, tokens, (groups, keys))
    chosen = choose_groups(torch.from_numpy(group_ids), torch.from_numpy(key_ids), groups)
    usable = {
        group
        for group in range(groups)
        if (group_ids == group).any() and (key_ids[group] >= 0).any()
    }
    assert set(chosen) == usable
    assert len(chosen) == len(usable)
    assert chosen == choose_groups(group_ids, key_ids, groups)


@pytest.mark.parametrize(
    ("argument", "value", "error", "expected"),
    [
        ("image", np.zeros((60, 100), np.uint8), ValueError, r"\(H, W, 3\) uint8, got \(60, 100\)"),
        ("grid", (0, 15), ValueError, ""),
        ("group_ids", np.zeros(14, int), ValueError, r"\(15,\) for a grid of 3 x 5, got \(14,\)"),
        ("group_ids", np.full(15, 3), ValueError, "between -1 and 2, got 3 to 3"),
        ("group_ids", np.zeros(15), TypeError, "integers, got float64"),
        ("key_ids", np.zeros(3, int), ValueError, r"\(groups, keys\)"),
        ("key_ids", np.full((3, 2), 15), ValueError, "between -1 and 14, got 15 to 15"),
        ("key_weights", np.ones((3, 1)), ValueError, ""),
        ("key_weights", np.full((3, 2), np.nan), ValueError, "finite"),
    ],
)
def test_panel_says_what_is_wrong(
    argument: str, value: Any, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=f"^{argument} must (be|lie|hold) {expected}"):
        _panel(**{argument: value})


@pytest.mark.parametrize("groups", [0, 4, [], [3], [-1]])
def test_groups_out_of_range(groups: int | list[int]) -> None:
    with pytest.raises(ValueError, match="groups must"):
        figure_groups([_panel()], groups)


def test_empty_and_wrong_arguments() -> None:
    for draw in (figure_groups, figure_group_map, figure_contact_sheet):
        with pytest.raises(ValueError, match="panels must hold at least one"):
            draw([])
    with pytest.raises(ValueError, match=r"count must be between 1 and .* groups, 3, got 4"):
        choose_groups(_panel().group_ids, _panel().key_ids, 4)


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_save_writes_the_suffix(tmp_path: Path, name: str, start: bytes) -> None:
    save_figure(figure_group_map([_panel()]), tmp_path / name, dpi=50)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [name]


def test_save_refuses_bad_paths(tmp_path: Path) -> None:
    figure = Figure()
    with pytest.raises(ValueError, match=r"path must end in .*\.png, \.svg, got 'a\.jpg'"):
        save_figure(figure, tmp_path / "a.jpg")
    with pytest.raises(FileNotFoundError, match="existing folder"):
        save_figure(figure, tmp_path / "missing" / "a.png")
    with pytest.raises(ValueError, match="dpi must be at least 1, got 0"):
        save_figure(figure, tmp_path / "a.png", dpi=0)
    assert os.listdir(tmp_path) == []


def test_matplotlib_backend_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither importing the package nor drawing selects a backend or opens pyplot figures."""
    before, loaded = matplotlib.get_backend(), dgt.figures
    monkeypatch.setattr(dgt, "figures", loaded)  # changed by importing it again
    for name in [name for name in sys.modules if name.startswith("dgt.figures")]:
        monkeypatch.delitem(sys.modules, name)
    try:
        matplotlib.use("svg")
        fresh = importlib.import_module("dgt.figures")
        assert fresh is not loaded
        panel = fresh.GroupPanel(
            np.zeros((8, 8, 3), np.uint8), (2, 2), np.zeros(4, int), np.zeros((1, 2), int)
        )
        fresh.save_figure(fresh.figure_groups([panel], 1), tmp_path / "a.png", dpi=50)
        assert matplotlib.get_backend().lower() == "svg"
        assert plt.get_fignums() == []
    finally:
        matplotlib.use(before)
