"""The bound and the interval of an error."""

from __future__ import annotations

import pytest
import torch

import dgt
from dgt.acceleration import bound

from .small_models import difference, smooth_images, vit


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize(("error", "spread"), [(0.0016, 0.08), (0.024, 0.15)])
def test_the_bound_holds_for_other_images(error, spread) -> None:
    """It is half of the error asked for, which is used; single images keep what is promised of them."""
    model, others = vit(spread=spread, global_pool="avg"), smooth_images(12, seed=1)
    with torch.no_grad():
        before = model(others)
        report = dgt.accelerate(model, smooth_images(12), error)
        assert 0.2 * error < report.error_bound <= error / 2
        after = model(others)
        assert difference(after, before) <= report.error_bound
    assert report.error_bound < 2 * report.predicted_error
    assert report.single_error_95 <= error
    assert report.single_error_95 < report.single_error_999 <= 2 * error
    assert max(report.largest_error, *map(difference, after, before)) <= report.single_error_999


@pytest.mark.parametrize("spread", [0.9, 1.2])
@pytest.mark.parametrize("count", [4, 12, 48])
def test_the_bound_of_an_error(count, spread) -> None:
    """For lognormal squared errors: 19 of 20 such bounds are at least the error of as many other images.

    Around the usual spread, 1: the less there is, the looser is the bound of a few.
    """
    draws = torch.Generator().manual_seed(0)
    shares = (
        1e-4 * (spread * torch.randn(600, 2, count, generator=draws, dtype=torch.float64)).exp()
    )
    bounds = []
    held = []
    for seen, unseen in shares:
        limit = bound.error_bound(torch.stack([seen, torch.ones_like(seen)], dim=1))
        bounds.append(limit / float(seen.mean().sqrt()))
        held.append(float(unseen.mean().sqrt()) <= limit)
    assert 0.9 < sum(held) / 600 < 0.99
    assert sum(bounds) / 600 < (2 if count >= 12 else 3)


@pytest.mark.parametrize("spread", [0.7, 1.2])
@pytest.mark.parametrize("count", [7, 48])
def test_the_errors_of_single_images(count, spread) -> None:
    """Of lognormal errors about one in twenty is above the one figure, and hardly any above the other."""
    draws = torch.Generator().manual_seed(0)
    seen = 1e-4 * (spread * torch.randn(300, count, generator=draws, dtype=torch.float64)).exp()
    unseen = 1e-4 * (spread * torch.randn(300, 100, generator=draws, dtype=torch.float64)).exp()
    above = torch.zeros(2)
    for known, others in zip(seen, unseen, strict=True):
        found = bound.single_errors(torch.stack([known, torch.ones_like(known)], dim=1))
        for at, limit in enumerate(found):
            above[at] += (others.sqrt() > limit).double().mean() / 300
    assert 0.01 < above[0] < 0.08
    assert above[1] < 0.004


def test_a_few_images_do_not_say_what_single_ones_may_have() -> None:
    few = torch.tensor([[1e-4, 1.0], [4e-4, 1.0]], dtype=torch.float64)
    assert bound.single_errors(few) == (None, None)
    in_twenty, in_thousand = bound.single_errors(few.repeat(4, 1))
    assert 0.02 < in_twenty < in_thousand


def test_a_request_is_for_images_together_and_for_single_ones() -> None:
    """Of images that differ as usual the bound decides; of those that differ more, what single ones may have."""
    usual = torch.tensor([[0.5e-4, 1.0], [1e-4, 1.0], [2e-4, 1.0]] * 4, dtype=torch.float64)
    assert bound.least_request(usual) == 2 * bound.error_bound(usual)
    unlike = torch.tensor([[4e-6, 1.0], [5e-5, 1.0], [3e-4, 1.0]] * 4, dtype=torch.float64)
    assert bound.least_request(unlike) == bound.single_errors(unlike)[1] / 2


def test_the_bound_of_no_error() -> None:
    assert bound.error_bound(torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)) == 0
    one = torch.tensor([[1e-4, 1.0]], dtype=torch.float64)
    assert bound.error_bound(one) == pytest.approx(0.01)


def test_the_interval_of_an_error_holds_it() -> None:
    """Squared errors that vary over images like those of a trained classifier, by 1.5 times their mean."""
    draws = torch.Generator().manual_seed(0)
    sizes = 14 + 4 * torch.randn(400, 40, generator=draws, dtype=torch.float64)
    ratios = 0.0025 * torch.distributions.LogNormal(-0.59, 1.086).icdf(
        torch.rand(400, 40, generator=draws, dtype=torch.float64)
    )
    found = [
        torch.stack([ratio * size, size], dim=1) for ratio, size in zip(ratios, sizes, strict=True)
    ]
    errors = [bound.relative_error(one) for one in found]
    halves = [bound.half_interval(one) for one in found]
    held = [abs(error - 0.05) <= half for error, half in zip(errors, halves, strict=True)]
    assert 0.85 < sum(held) / 400 < 0.98
    assert sum(halves) / 400 == pytest.approx(0.05 * 1.96 * 1.5 / 2 / 40**0.5, rel=0.2)
    one = found[0]
    assert bound.half_interval(one[:1]) is None
    assert bound.half_interval(one * torch.tensor([0.0, 1.0])) is None
    assert bound.half_interval(one[:2].repeat(20, 1)) < bound.half_interval(one[:2].repeat(3, 1))


def test_errors_of_rounding_do_not_raise_the_bound() -> None:
    """Where some inputs come out exactly and others up to rounding, nothing is wrong with either."""
    squares = torch.tensor([[0.0, 1.0], [1e-15, 1.0], [0.0, 1.0], [4e-15, 1.0]])
    assert bound.error_bound(squares.double()) < 1e-5
