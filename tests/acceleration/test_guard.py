"""The guard of accelerated attention: when it acts, what it does, and what it counts."""

from __future__ import annotations

import copy
import io
import math
import threading

import pytest
import torch
from torch import Tensor, nn

import dgt
from dgt.acceleration import GuardCounts, Setting
from dgt.acceleration.bound import error_bound, least_request, squares_between
from dgt.acceleration.choose import choose
from dgt.acceleration.confirm import Trial, allowance_of, run_choice
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.measure import measure_model
from dgt.acceleration.search import read_search
from dgt.acceleration.sensitivity import measure_sensitivity
from dgt.acceleration.sites import Measurement, find_sites

from .small_models import SIZE, difference, smooth_images, vit


def noise(count: int) -> Tensor:
    """Images without any structure, which groups represent badly."""
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


def guarded(allowed_error: float | None, **setting) -> nn.Module:
    """A model whose two attentions are in groups, with a guard that allows such an error."""
    model = vit()
    sites = find_sites(model, smooth_images(1), None, 16)
    numbers = {"groups": 12, "keys": 48, "residual_keys": 16, **setting}
    for site in sites:
        site.measurement = Measurement(Setting("groups", allowed_error=allowed_error, **numbers))
    install_sites(model, sites)
    return model


def acted(model: nn.Module) -> list[tuple[int, int, int]]:
    counts = dgt.guard_counts(model).values()
    return [(count.checked, count.more_keys, count.dense) for count in counts]


@pytest.mark.usefixtures("slow_attention")
@torch.no_grad()
def test_it_acts_on_what_breaks_the_plan_and_not_on_the_inputs_to_choose_by() -> None:
    model, images = vit(global_pool="avg"), smooth_images(12)
    report = dgt.accelerate(model, images, 0.1)
    assert (report.guard_checked, report.guard_acted) == (24, 0)
    before = sum(count.checked for count in dgt.guard_counts(model).values())
    model(images)
    counts = dgt.guard_counts(model).values()
    assert sum(count.checked for count in counts) == before + 24
    assert sum(count.acted for count in counts) == 0

    alone = vit(global_pool="avg")
    assert dgt.accelerate(alone, images, 0.1, guard=False).guard_checked == 0
    assert not dgt.guard_counts(alone)
    broken = 3 * noise(1)
    with dgt.exact_attention(model):
        exact = model(broken)
    assert difference(model(broken), exact) < 0.5 * difference(alone(broken), exact)
    assert sum(count.acted for count in dgt.guard_counts(model).values()) > 0


@pytest.mark.usefixtures("slow_attention")
@torch.no_grad()
def test_an_input_above_the_error_asked_for_does_not_loosen_it() -> None:
    model, images = vit(num_classes=0), smooth_images(12)
    images[7] = 0.75 * noise(1)[0]
    others = [image for image in range(12) if image != 7]
    search = read_search(model, images, 0.5)
    measure_model(search)
    measure_sensitivity(search)
    choice = choose(search.sites, 0.03)
    loose = run_choice(search, choice).report
    before = model.forward_features(images)
    with dgt.exact_attention(model):
        exact = model.forward_features(images)
    errors = [difference(*pair) for pair in zip(before, exact, strict=True)]
    search.error = 1.05 * max(errors[image] for image in others)
    assert search.error < errors[7]

    outcome = run_choice(search, choice)
    report = outcome.report
    assert report.guard_checked == 24
    assert 0 < report.guard_acted <= 2
    after = model.forward_features(images)
    assert torch.equal(after[others], before[others])
    assert difference(after[7], exact[7]) < errors[7]
    together = torch.stack([squares_between([a], [b]) for a, b in zip(after, exact, strict=True)])
    assert report.error_bound == pytest.approx(error_bound(together), rel=1e-3)
    assert outcome.request == pytest.approx(least_request(together), rel=1e-3)
    assert report.error_bound < loose.error_bound
    for site, loose_site in zip(report.layers, loose.layers, strict=True):
        assert site.setting.allowed_error <= loose_site.setting.allowed_error


@torch.no_grad()
def test_an_allowance_is_above_the_estimates_of_inputs_within_the_error() -> None:
    (site, *_) = find_sites(vit(), smooth_images(1), None, 16)

    def trial(error: float, estimate: float) -> Trial:
        squares = torch.tensor([error**2, 1.0], dtype=torch.float64)
        counts = {site.title: GuardCounts(checked=1, largest_error=estimate)}
        return Trial(squares, torch.ones(1), None, counts)

    trials = [trial(0.04, 0.2), trial(0.02, 0.1), trial(0.06, 0.5)]
    site.sensitivity = 0.1
    assert allowance_of(site, trials, 0.05) == pytest.approx(0.25)
    assert allowance_of(site, trials, 0.1) == pytest.approx(0.625)
    assert allowance_of(site, trials, 0.01) == pytest.approx(0.1)
    assert allowance_of(site, [trial(0.0, 0.0)], 0.05) == pytest.approx(1e-3)
    site.sensitivity = 0.4
    assert allowance_of(site, trials, 0.05) == pytest.approx(0.125)  # alone the error asked for


@torch.no_grad()
def test_it_takes_more_keys_and_then_dense_attention() -> None:
    images = noise(2)
    model = guarded(1e9)
    grouped = model(images)
    counts = dgt.guard_counts(model)
    assert acted(model) == [(2, 0, 0)] * 2
    with dgt.exact_attention(model):
        exact = model(images)
    assert acted(model) == [(2, 0, 0)] * 2  # nothing to check there

    dense = guarded(1e-6)
    torch.testing.assert_close(dense(images), exact, rtol=1e-4, atol=1e-4)
    assert acted(dense) == [(2, 0, 2)] * 2

    allowed = 0.95 * min(count.largest_error for count in counts.values())
    between = guarded(allowed)
    assert difference(between(images), exact) < difference(grouped, exact)
    assert sum(count.more_keys for count in dgt.guard_counts(between).values()) > 0


@torch.no_grad()
def test_it_looks_closely_before_it_acts() -> None:
    """An estimate of a few queries above what is allowed does nothing if one of more is not. A search
    looks closely at once, as it is to know what to allow.
    """
    images = [noise(1).roll(shift, -1) for shift in (0, 16, 32, 48)]

    def largest(allowed_error: float, image: Tensor) -> float:
        model = guarded(allowed_error)
        model(image)
        return next(iter(dgt.guard_counts(model).values())).largest_error

    of_few = [largest(1e9, image) for image in images]
    of_more = [largest(1e-6, image) for image in images]
    assert all(0.5 < few / more < 2 for few, more in zip(of_few, of_more, strict=True))
    assert [largest(math.inf, image) for image in images] == of_more
    image, few, more = max(
        zip(images, of_few, of_more, strict=True), key=lambda row: row[1] / row[2]
    )
    assert few > more
    model = guarded((few + more) / 2)
    model(image)
    counts = next(iter(dgt.guard_counts(model).values()))
    assert counts == GuardCounts(checked=1, checked_closely=1, largest_error=more)


@torch.no_grad()
def test_every_image_is_decided_by_itself() -> None:
    images = torch.cat([smooth_images(1), noise(1), smooth_images(1, seed=1)])
    largest = []
    for image in images:
        model = guarded(1e9)
        model(image[None])
        largest.append([count.largest_error for count in dgt.guard_counts(model).values()])
    model = guarded(1.05 * max(*largest[0], *largest[2]))
    together = model(images)
    assert sum(count.acted for count in dgt.guard_counts(model).values()) in (1, 2)
    for image, output in zip(images, together, strict=True):
        torch.testing.assert_close(model(image[None])[0], output, rtol=1e-4, atol=1e-5)
    with dgt.exact_attention(model):
        exact = model(images)
    assert torch.equal(together[::2], guarded(None)(images)[::2])
    assert difference(together[1], exact[1]) < difference(guarded(None)(images)[1], exact[1])


@torch.no_grad()
def test_what_it_counts_is_not_copied_and_is_right_in_threads() -> None:
    model, images = guarded(0.001), noise(3)
    expected = model(images)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert acted(other) == [(0, 0, 0)] * 2
        assert torch.equal(other(images), expected)
        assert acted(other) == acted(model)
    threads = [threading.Thread(target=model, args=(images,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [checked for checked, _, _ in acted(model)] == [27, 27]
    assert "guard acted on 27 of 27 images" in repr(model.blocks[0].attn)


@torch.no_grad()
def test_compiled_and_exported_models_leave_it_out() -> None:
    model, images = guarded(1e-6), noise(2)
    unguarded = guarded(None)(images)
    torch.compiler.reset()
    for other in (
        torch.compile(model, backend="aot_eager"),
        torch.export.export(model, (images,)).module(),
        torch.jit.trace(model, images, check_trace=False),
    ):
        torch.testing.assert_close(other(images), unguarded, rtol=1e-4, atol=1e-4)
    assert acted(model) == [(0, 0, 0)] * 2


def test_gradients_are_those_of_what_it_did() -> None:
    model, images = guarded(1e-6), noise(1)
    exact = copy.deepcopy(model)
    model(images).square().sum().backward()
    with dgt.exact_attention(exact):
        exact(images).square().sum().backward()
    for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-3)
