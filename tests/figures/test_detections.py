"""Drawing detections: confident ones are drawn, in the right place, in the category's color."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dgt.figures.detections import LONG_SIDE, Detections, draw_detections

NAMES = ("cat", "dog", "owl")


def detections(*scores: float, size: tuple[int, int] = (60, 80)) -> Detections:
    """Adjacent squares, filled by their masks, cycling through the classes."""
    boxes = np.array(
        [[20 * i + 2, 22, 20 * i + 18, 38] for i in range(len(scores))], dtype=np.float32
    ).reshape(-1, 4)
    masks = np.zeros((len(scores), *size), dtype=bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.astype(int).tolist(), strict=True):
        mask[y0:y1, x0:x1] = True
    return Detections(boxes, np.arange(len(scores)) % len(NAMES), np.array(scores), masks)


def pixels(drawn: Image.Image) -> np.ndarray:
    """As integers, so that they can be subtracted."""
    return np.asarray(drawn).astype(int)


def test_masks_boxes_and_names_are_drawn_where_they_are() -> None:
    gray = Image.new("RGB", (80, 60), (90, 90, 90))
    drawn = draw_detections(gray, detections(0.9, 0.8), NAMES)
    assert drawn.size == (LONG_SIDE, LONG_SIDE * 60 // 80)
    change = np.abs(pixels(drawn) - 90).max(axis=2)
    assert (change[30 * 8, [10 * 8, 30 * 8]] > 20).all()  # inside both masks
    assert (change[50 * 8 :] == 0).all()
    assert (change[: 19 * 8] == 0).all()
    first, second = pixels(drawn)[30 * 8, [10 * 8, 30 * 8]]
    assert np.abs(first - second).max() > 20
    assert change[20 * 8 + 10, 3 * 8 : 5 * 8].max() > 60  # the name, on the box's upper edge


def test_what_is_unsure_is_left_out() -> None:
    gray = Image.new("RGB", (80, 60), (90, 90, 90))
    assert np.array_equal(
        pixels(draw_detections(gray, detections(0.9, 0.3), NAMES)),
        pixels(draw_detections(gray, detections(0.9), NAMES)),
    )
    assert (pixels(draw_detections(gray, detections(), NAMES)) == 90).all()


def test_a_large_image_keeps_its_size_and_names_stay_inside() -> None:
    found = detections(0.9, size=(300, 700))
    edge = found._replace(boxes=np.array([[690, 0, 700, 6]], dtype=np.float32))
    drawn = draw_detections(Image.new("RGB", (700, 300)), edge, ("a very long category's\nname",))
    assert drawn.size == (700, 300)
    assert pixels(drawn)[:, -1].max() > 0


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"masks must .* size \(70, 80\), got \(60, 80\)"):
        draw_detections(Image.new("RGB", (80, 70)), detections(0.9), NAMES)
