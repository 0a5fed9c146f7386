"""Figures of label maps: distinct colors per class, a legend of the classes present, exact label numbers."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dgt.figures.colors import class_colors, label_png
from dgt.figures.label_map import figure_comparison, figure_label_map, overlay

NAMES = ["sky", "road", "car", "tree"]


@pytest.fixture
def image() -> np.ndarray:
    """A gray image, 30 by 50."""
    return np.full((30, 50, 3), 128, dtype=np.uint8)


@pytest.fixture
def labels() -> np.ndarray:
    """Road below, sky above, one pixel of car, one without a label."""
    labels = np.ones((30, 50), dtype=np.uint8)
    labels[:12] = 0
    labels[20, 20], labels[25, 25] = 2, 255
    return labels


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_names_what_is_there_the_largest_first(
    image: np.ndarray, labels: np.ndarray
) -> None:
    assert legend(figure_label_map(image, labels, NAMES)) == ["road", "sky", "car"]
    rows = [(image, labels, np.full_like(labels, 3)), (image, labels, labels)]
    compared = figure_comparison(rows, NAMES)
    assert legend(compared) == ["road", "sky", "tree", "car", "no label"]
    assert len(compared.axes) == 6
    assert [axes.get_title() for axes in compared.axes[:3]] == ["image", "truth", "prediction"]


def test_a_name_is_no_mathematics(image: np.ndarray, labels: np.ndarray) -> None:
    figure = figure_label_map(image, labels, ["sky", "$\\no{$ road", "car"])
    figure.savefig(io.BytesIO())
    assert legend(figure) == [r"\$\no{\$ road", "sky", "car"]


def test_a_class_keeps_its_color(image: np.ndarray, labels: np.ndarray) -> None:
    colors = class_colors(4)
    assert len({tuple(color) for color in colors[:5].round(3)}) == 5
    drawn = overlay(image, labels, colors)
    assert drawn.shape == image.shape
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert np.allclose(drawn[28, 5] - 0.4 * 128 / 255, 0.6 * colors[1])


def test_label_maps_are_stored_as_numbers(labels: np.ndarray) -> None:
    with Image.open(io.BytesIO(label_png(labels, 4))) as opened:
        assert opened.mode == "P"
        assert np.array_equal(np.asarray(opened), labels)
        shown = np.asarray(opened.convert("RGB"))[0, 0] / 255
    assert np.allclose(shown, class_colors(4)[0], atol=0.01)


def test_bad_input(image: np.ndarray, labels: np.ndarray) -> None:
    for call, message in (
        (lambda: figure_label_map(image, labels[1:], NAMES), r"labels must be .*, got \(29, 50\)"),
        (lambda: figure_label_map(image, labels, NAMES[:2]), "labels must be below 2, .* got 2"),
        (lambda: figure_label_map(image[..., 0], labels, NAMES), r"image must be \(H, W, 3\) ui"),
        (lambda: figure_comparison([], NAMES), "rows must hold at least one image"),
        (lambda: class_colors(0), "number must lie in 1 to 255, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
