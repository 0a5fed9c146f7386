"""A step of several batches has the gradient of one of all of their images, however they are shared out."""

from __future__ import annotations

import pytest
import torch

from dgt.training.loop import Batch

from .step_gradient import OneWeightPerClass, label_batches, step_gradient


@pytest.mark.parametrize("class_weights", [None, [1.0, 4.0, 0.5]])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (1, 1, 1)])
def test_every_labeled_pixel_counts_alike(
    class_weights: list[float] | None, sizes: tuple[int, ...]
) -> None:
    whole, parts = (
        step_gradient("camvid_nano", OneWeightPerClass(class_weights), label_batches(each))
        for each in ((3,), sizes)
    )
    assert whole.norm() > 0.1
    torch.testing.assert_close(parts, whole)


def test_images_without_any_label_have_no_gradient() -> None:
    unlabeled = label_batches((2, 1))[1:]
    assert not step_gradient("camvid_nano", OneWeightPerClass(), unlabeled * 2).any()


def test_every_image_counts_alike_where_a_batch_lacks_one() -> None:
    images, labels = torch.zeros(5, 3, 8, 8), torch.tensor([0, 1, 1, 2, 2])
    whole, parts = (
        step_gradient(
            "scenes",
            OneWeightPerClass(),
            [Batch(*pair) for pair in zip(images.split(sizes), labels.split(sizes), strict=True)],
        )
        for sizes in ([5], [4, 1])
    )
    torch.testing.assert_close(parts, whole)
