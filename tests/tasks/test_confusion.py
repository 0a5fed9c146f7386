"""The measures of segmentation, against counting pixel by pixel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassConfusionMatrix

from dgt.tasks.segment import segmentation_scores


def confusion(predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Filled as in the task."""
    matrix = MulticlassConfusionMatrix(classes, ignore_index=255, validate_args=False)
    matrix.update(predicted, labels)
    return matrix.compute()


@given(seed=st.integers(0, 10**6), classes=st.integers(2, 7), pixels=st.integers(1, 60))
@settings(max_examples=60)
def test_scores_are_those_of_counting(seed: int, classes: int, pixels: int) -> None:
    rng = np.random.default_rng(seed)
    there = rng.integers(1, classes + 1)
    labels = rng.integers(0, there, pixels)
    labels[rng.random(pixels) < 0.2] = 255
    predicted = rng.integers(0, classes, pixels)
    scores = segmentation_scores(confusion(torch.tensor(predicted), torch.tensor(labels), classes))

    known = [(p, t) for p, t in zip(predicted, labels, strict=True) if t != 255]
    ious, found = [], []
    for label in range(classes):
        both = sum(p == label and t == label for p, t in known)
        either = sum(label in (p, t) for p, t in known)
        of_class = sum(t == label for _, t in known)
        if either:
            ious.append(both / either)
        if of_class:
            found.append(both / of_class)
        assert float(scores["iou"][label]) == pytest.approx(
            both / either if either else math.nan, nan_ok=True
        )
    right = sum(p == t for p, t in known) / len(known) if known else math.nan
    assert float(scores["miou"]) == pytest.approx(np.mean(ious) if ious else math.nan, nan_ok=True)
    assert float(scores["mean_accuracy"]) == pytest.approx(
        np.mean(found) if found else math.nan, nan_ok=True
    )
    assert float(scores["accuracy"]) == pytest.approx(right, nan_ok=True)


def test_counts_beyond_float32_stay_exact() -> None:
    counts = torch.tensor([[2**40, 1], [0, 3]])
    assert 1 - float(segmentation_scores(counts)["iou"][0]) == pytest.approx(2**-40)
