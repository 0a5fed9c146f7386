"""The rectangle of real pixels, from sizes to mask and back."""

from __future__ import annotations

import pytest
import timm
import torch

from dgt.models.padding import real_pixels, real_sizes


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_mask_of_sizes(kind) -> None:
    mask = real_pixels(kind([(2, 3), (4, 1)]), (4, 3))
    assert mask is not None
    assert mask.shape == (2, 4, 3)
    assert mask.sum(dim=(1, 2)).tolist() == [6, 4]
    assert mask[0, :2].all()
    assert mask[1, :, 0].all()
    assert real_pixels(kind([(4, 3), (4, 3)]), (4, 3)) is None


def test_sizes_of_a_mask() -> None:
    sizes = [(2, 3), (4, 1), (4, 3)]
    assert real_sizes(real_pixels(sizes, (4, 3))) == sizes
    assert real_sizes(torch.ones(2, 4, 3, dtype=torch.bool)) == [(4, 3)] * 2


def test_a_mask_that_is_no_rectangle() -> None:
    hole, shifted, empty = torch.ones(3, 2, 4, 3, dtype=torch.bool)
    hole[0, 1, 1], shifted[1, 0], empty[1] = False, False, False
    for mask in (hole, shifted, empty):
        with pytest.raises(ValueError, match="mask must be a rectangle of real pixels in the"):
            real_sizes(mask)


@torch.no_grad()
def test_padding_may_hold_anything() -> None:
    model = timm.create_model("dgt_nano", num_classes=2, depths=(1, 1, 1, 1)).eval()
    images = torch.randn(1, 3, 64, 64)
    mask = real_pixels([(64, 40)], (64, 64))
    expected = model.forward_features(images, mask)
    images[..., 40:] = torch.nan
    assert torch.equal(model.forward_features(images, mask), expected)
