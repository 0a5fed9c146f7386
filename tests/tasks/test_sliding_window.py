"""Label maps of whole images: results over scales and flips are averaged, and windows cover every pixel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dgt
from dgt.data.segmentation import SegmentationTest, fitting_size
from dgt.tasks.segment import NO_CLASS, predict_labels, predict_probabilities

FRAME = (80, 64)


class Recorder(nn.Module):
    """A network whose logits depend on position and neighbors; it records its input sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, padding=2)
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape[2:]))
        ramp = torch.linspace(0, 1, images.shape[3]).expand(images.shape[2:])
        return self.conv(images) * (1 + ramp)


class Constant(nn.Module):
    """The same logits everywhere, with two tied for the largest."""

    def forward(self, images: Tensor) -> Tensor:
        return (
            torch.tensor([0.0, 2.0, 1.0, 2.0])
            .view(1, 4, 1, 1)
            .expand(len(images), -1, *images.shape[2:])
        )


class Pointwise(nn.Module):
    """Logits of each pixel on its own."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images, images.sum(dim=1, keepdim=True)], dim=1)


@pytest.fixture
def images() -> Tensor:
    """Two images of an odd size."""
    return torch.randn(2, 3, 53, 71)


@torch.no_grad()
def test_the_whole_is_the_mean_of_its_parts(images: Tensor) -> None:
    network = Recorder()
    scales = (0.5, 1.0, 1.75)
    together = predict_probabilities(network, images, FRAME, SegmentationTest(scales, flip=True))
    assert network.sizes == [
        fitting_size((53, 71), FRAME, scale) for scale in scales for _ in range(2)
    ]
    parts = []
    for scale in scales:
        one = SegmentationTest((scale,))
        parts.append(predict_probabilities(network, images, FRAME, one))
        parts.append(predict_probabilities(network, images.flip(-1), FRAME, one).flip(-1))
    assert torch.allclose(together, torch.stack(parts).mean(dim=0), atol=1e-6)
    assert torch.allclose(together.sum(dim=1), torch.ones(2, 53, 71), atol=1e-5)
    labels = predict_labels(network, images, FRAME, SegmentationTest(scales, flip=True))
    assert torch.equal(labels, together.argmax(dim=1))


@pytest.mark.parametrize("at_once", [1, 3 * 2 * 53 * 71, 10**9])
@torch.no_grad()
def test_labels_of_one_part_take_a_few_classes_at_a_time(
    images: Tensor, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgt.tasks.segment.LOGITS_AT_ONCE", at_once)
    network = Recorder()
    expected = predict_probabilities(network, images, FRAME, SegmentationTest()).argmax(dim=1)
    assert torch.equal(predict_labels(network, images, FRAME, SegmentationTest()), expected)
    ties = predict_labels(Constant(), images, FRAME, SegmentationTest())
    assert (ties == 1).all()


@pytest.mark.parametrize("at_once", [1, 10**9])
@pytest.mark.parametrize("test", [SegmentationTest(), SegmentationTest(flip=True)])
@torch.no_grad()
def test_nan_is_no_class(
    test: SegmentationTest, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgt.tasks.segment.LOGITS_AT_ONCE", at_once)
    images = torch.randn(1, 3, 64, 80)
    expected = Pointwise()(images).argmax(dim=1)
    images[:, 1, 10:30, 20:50] = torch.nan
    expected[:, 10:30, 20:50] = NO_CLASS
    assert torch.equal(predict_labels(Pointwise(), images, FRAME, test), expected)


@torch.no_grad()
def test_one_part_is_the_softmax_of_the_resized_logits(images: Tensor) -> None:
    network = Recorder()
    scaled = F.interpolate(
        images, size=fitting_size((53, 71), FRAME), mode="bilinear", align_corners=False
    )
    logits = F.interpolate(
        network(scaled), size=(53, 71), mode="bilinear", align_corners=False, antialias=True
    )
    found = predict_probabilities(network, images, FRAME, SegmentationTest())
    assert torch.allclose(found, logits.softmax(dim=1), atol=1e-6)
    with torch.enable_grad():
        assert torch.allclose(
            predict_probabilities(network, images, FRAME, SegmentationTest()), found, atol=1e-6
        )


@given(st.integers(33, 100), st.integers(33, 100), st.integers(32, 60), st.integers(1, 60))
@settings(max_examples=25)
@torch.no_grad()
def test_windows_cover_every_pixel(height: int, width: int, window: int, stride: int) -> None:
    images = torch.randn(1, 3, height, width)
    test = SegmentationTest(window=window, stride=min(stride, window))
    frame = (max(height, width), min(height, width))
    whole = predict_probabilities(Pointwise(), images, frame, SegmentationTest())
    summed = (
        -(-window // test.stride)
    ) ** 2  # logits per pixel, each sum rounded: bounds the float32 error
    bound = max(1e-6, summed * torch.finfo().eps * float(Pointwise()(images).abs().max()))
    assert torch.allclose(
        predict_probabilities(Pointwise(), images, frame, test), whole, atol=bound
    )


@torch.no_grad()
def test_windows_overlap_and_stay_inside() -> None:
    network = Recorder()
    images = torch.randn(1, 3, 64, 80)
    predict_probabilities(network, images, FRAME, SegmentationTest(window=48))
    assert network.sizes == [(48, 48)] * 4  # at 0 and 16 in height, 0 and 32 in width
    network.sizes.clear()
    predict_probabilities(network, images, FRAME, SegmentationTest(window=80))
    assert network.sizes == [(64, 80)]


@pytest.mark.parametrize("size", [(33, 200), (47, 47), (5, 9)])
def test_any_image_one_at_a_time(size: tuple[int, int]) -> None:
    model = dgt.build_upernet("dgt_nano", 5, channels=16, auxiliary_channels=8, top_k=20).eval()
    with torch.inference_mode():
        labels = predict_labels(
            model, torch.randn(1, 3, *size), FRAME, SegmentationTest((0.5, 1.0), flip=True)
        )
    assert labels.shape == (1, *size)
    assert labels.max() < 5
