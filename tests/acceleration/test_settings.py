"""What settings cost, and when they are used."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import dgt
from dgt.acceleration import choose, confirm, measure, sensitivity, settings
from dgt.acceleration.guard import GuardCounts
from dgt.acceleration.report import Report
from dgt.acceleration.search import read_search
from dgt.acceleration.sites import AttentionSite, Measurement

from .small_models import SIZE, vit


@pytest.mark.usefixtures("slow_attention")
def test_a_gain_that_batches_lose(slow_attention, monkeypatch) -> None:
    """If groups are slower for four inputs at once, they are used for one input, and dense attention for more."""
    counted = measure.compute_call

    def slow_in_batches(call, *arguments):
        slow_attention.now += 10.0 if len(call.query) > 1 else 0.0
        return counted(call, *arguments)

    monkeypatch.setattr(measure, "compute_call", slow_in_batches)
    model, images = vit(), torch.randn(4, 3, SIZE, SIZE)
    report = dgt.accelerate(model, images, 0.9)
    assert {row.setting.most_batch for row in report.layers if row.setting.choice == "groups"} == {
        1
    }
    with torch.no_grad():
        batch, one = model(images), model(images[:1])
        with dgt.exact_attention(model):
            assert torch.equal(model(images), batch)
            assert not torch.equal(model(images[:1]), one)


@pytest.mark.parametrize(
    ("tokens", "tried"), [(5477, [True]), (3137, [False, True]), (1370, [False])]
)
def test_the_first_order_is_added_in_long_sequences(tokens, tried) -> None:
    site = AttentionSite("attn", tokens=tokens, key_tokens=tokens, channels=64)
    assert measure.orders_to_try(site, True) == tried
    assert measure.orders_to_try(site, False) == [False]


@pytest.mark.usefixtures("slow_attention")
def test_larger_inputs_keep_the_share() -> None:
    model = vit(dynamic_img_size=True)
    report = dgt.accelerate(model, torch.randn(2, 3, SIZE, SIZE), 0.9)
    row = next(row for row in report.layers if row.setting.choice == "groups")
    larger = settings.scale_setting(row.setting, 4, 4)
    assert larger == dataclasses.replace(
        row.setting,
        groups=4 * row.setting.groups,
        keys=4 * row.setting.keys,
        residual_keys=4 * row.setting.residual_keys,
    )
    with torch.no_grad():
        assert model(torch.randn(1, 3, 2 * SIZE, 2 * SIZE)).isfinite().all()


@pytest.mark.parametrize("share", settings.SHARES)
@pytest.mark.parametrize("tokens", [20, 200, 5477])
def test_a_budget_is_split_as_it_costs(share, tokens) -> None:
    split = settings.split_budget(share, tokens, tokens, True)
    assert min(split.groups, split.keys, split.residual_keys) >= 1
    if share * tokens > 100:
        pairs = 2.5 * split.groups + 2 * split.residual_keys + split.keys
        assert pairs == pytest.approx(share * tokens, rel=0.05)


def test_more_keys_than_the_model_needs_are_not_measured(slow_attention, monkeypatch) -> None:
    """Where a call loses nearly nothing, larger budgets of its kind are left out."""
    shares = {}
    for part in (0.0, 1e9):
        monkeypatch.setattr(measure, "NEGLIGIBLE", part)
        search = read_search(vit(), torch.randn(2, 3, SIZE, SIZE), 0.9)
        measure.measure_model(search)
        shares[part] = {
            setting.share
            for setting, found in search.sites[0].candidates.items()
            if setting.choice == "groups" and found.dense_ms
        }
    assert shares[1e9] == {settings.SHARES[0]} < shares[0.0]


def test_propagation_is_measured_beside_calls_that_lose_little() -> None:
    site = AttentionSite("attn", tokens=400, key_tokens=400, channels=64)
    for groups, (ms, error) in {1: (1.0, 0.3), 2: (2.0, 0.004), 3: (3.0, 0.001)}.items():
        setting = settings.Setting("groups", groups=groups, keys=1)
        site.candidates[setting] = Measurement(setting, ms, 10.0, error**2, 1.0)
    assert sensitivity.nearly_exact(site, 0.05).setting.groups == 2
    assert sensitivity.nearly_exact(site, 0.001) is site


def test_a_choice_is_aimed_at_by_what_others_had() -> None:
    """By the factor of the last one; between one that is within the error and one that is not, by both."""
    small, large = settings.Setting("groups", groups=1), settings.Setting("groups", groups=2)
    site = AttentionSite("attn")
    for setting, error in {small: 0.01, large: 0.04}.items():
        site.candidates[setting] = Measurement(setting, 1.0, 10.0, error**2, 1.0)
    search = SimpleNamespace(error=0.1, sites=[site])

    def outcome(request: float) -> confirm.Outcome:
        return confirm.Outcome(Report(0.1, []), request)

    aim = confirm.MARGIN * 0.1
    assert confirm.next_aim(search, {}) == aim / confirm.USUAL_REQUEST
    assert confirm.next_aim(search, {(large,): outcome(0.2)}) == pytest.approx(aim / 5)
    within, above = outcome(0.01), outcome(0.64)  # requests grow faster than errors
    between = confirm.next_aim(search, {(large,): above, (small,): within})
    assert 0.01 < between < 0.04
    assert between == confirm.next_aim(search, {(small,): within, (large,): above})
    assert 0.01 * (between / 0.01) ** 3 == pytest.approx(aim)  # the power that both are on


def test_errors_on_all_inputs_replace_those_on_few() -> None:
    """What guards estimated on every input scales what was measured; exact attention has no error."""
    setting, other = settings.Setting("groups", groups=1), settings.Setting("groups", groups=2)
    site, exact = AttentionSite("attn", sensitivity=0.5), AttentionSite("exact")
    for one, error in {setting: 0.1, other: 0.2}.items():
        site.candidates[one] = Measurement(one, 1.0, 10.0, error**2, 1.0)
    trials = [
        confirm.Trial(
            torch.ones(2), torch.ones(1), None, {"attn": GuardCounts(largest_error=error)}
        )
        for error in (0.3, 0.4)
    ]
    confirm.learn_errors([site, exact], (setting, settings.Setting("exact")), trials)
    mean = (0.3**2 / 2 + 0.4**2 / 2) ** 0.5
    assert choose.error_of(site, setting) == pytest.approx(0.5 * mean)
    assert choose.error_of(site, other) == pytest.approx(2 * 0.5 * mean)
    assert exact.error_scale == 1.0
