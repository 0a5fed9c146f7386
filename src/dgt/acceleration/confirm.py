"""Confirm choices of settings by running the model with them over all inputs: its error, the bound of
that, what its guards allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgt.acceleration.bound import (
    cosines_between,
    half_interval,
    least_request,
    relative_error,
    squares_between,
)
from dgt.acceleration.choose import (
    Choice,
    choose,
    exact_speedup,
    predicted_attention_ms,
    predicted_error,
    predicted_model_ms,
    sites_of,
)
from dgt.acceleration.grouped import install_sites, take_counts
from dgt.acceleration.guard import GuardCounts
from dgt.acceleration.inputs import outputs_of
from dgt.acceleration.plan import count_alike
from dgt.acceleration.report import Report, with_errors
from dgt.acceleration.search import CONFIRMATIONS, MOST_GUARDED, Search, split_inputs
from dgt.acceleration.sites import AttentionSite

USUAL_REQUEST = 3.0  # of the least error to ask for over the one that is predicted
WORTHWHILE = 0.96  # of the model's time: what another choice must promise to be run on all inputs
MARGIN = 0.9  # of the error that a try aims at: another pass takes longer than what it would gain
ALLOWANCE = 1.25  # of the largest error that a guard estimates on inputs within the error asked for
LEAST_ALLOWANCE = 1e-3  # below are errors of rounding


def confirm(search: Search) -> Report | None:
    """Look for the fastest choice that keeps what the error asked for promises, in three passes at
    most: its report; None if there is none.

    Once a choice is good, another one must promise to be clearly faster.
    """
    tried: dict[Choice, Outcome] = {}
    for _ in range(CONFIRMATIONS):
        good = within(search, tried)
        choice = choose(search.sites, next_aim(search, tried))
        if choice in tried or not any(choice):
            break
        if good and predicted_model_ms(search, choice) > WORTHWHILE * predicted_model_ms(
            search, fastest(search, good)
        ):
            break
        tried[choice] = run_choice(search, choice)
        if not predicted_error(search.sites, choice):
            break
    good = within(search, tried)
    return good[fastest(search, good)] if good else None


class Point(NamedTuple):
    """What was predicted of a choice, and what came."""

    predicted: float
    """As :func:`predicted_error`."""
    request: float
    """As in :class:`Outcome`."""


def next_aim(search: Search, tried: Mapping[Choice, "Outcome"]) -> float:
    """The error that the next choice should be predicted to have.

    What errors of call sites predict is off by a factor, which a choice that was run tells. It may
    differ much between choices, as where one input amplifies errors in some layers: between a choice
    that keeps the requested error and one that does not, it is interpolated.

    Args:
        search: the search.
        tried: the choices that were run, in order.
    """
    aim = MARGIN * search.error
    points = [
        Point(predicted_error(search.sites, choice), max(outcome.request, 1e-15))
        for choice, outcome in tried.items()
    ]
    if not points:
        return aim / USUAL_REQUEST
    good = max((point for point in points if point.request <= search.error), default=None)
    bad = min((point for point in points if point.request > search.error), default=None)
    if good is None or bad is None or good.predicted >= bad.predicted:
        return aim * points[-1].predicted / points[-1].request
    part = math.log(aim / good.request) / math.log(bad.request / good.request)
    return good.predicted * (bad.predicted / good.predicted) ** part


def learn_errors(sites: Sequence[AttentionSite], choice: Choice, trials: Sequence["Trial"]) -> None:
    """Let the errors that guards estimated on all inputs scale those that were measured on few.

    Args:
        sites: of the search, whose ``error_scale`` is set.
        choice: their settings.
        trials: one for every input, whose guards measured and did not act.
    """
    for site, setting in zip(sites, choice, strict=True):
        if setting is None or setting.choice != "groups":
            continue
        counts = [trial.counts[site.title] for trial in trials if site.title in trial.counts]
        squares = [count.largest_error**2 for count in counts]
        error = site.candidates[setting].error
        if squares and error and 0 < sum(squares) < math.inf:
            site.error_scale = math.sqrt(sum(squares) / len(squares)) / error


def fastest(search: Search, reports: Mapping[Choice, Report]) -> Choice:
    """The choice that is predicted to be the fastest."""
    return min(reports, key=partial(predicted_attention_ms, search.sites))


@dataclass
class Outcome:
    """What the model with a choice showed over all inputs."""

    report: Report
    """Without speedups."""
    request: float
    """The least error to ask for with it, as :func:`least_request`."""


def within(search: Search, tried: Mapping[Choice, Outcome]) -> dict[Choice, Report]:
    """The choices that keep what the requested error promises; exact attention always does, up to
    rounding.
    """
    return {
        choice: outcome.report
        for choice, outcome in tried.items()
        if outcome.request <= search.error
        or all(setting is None or setting.choice == "exact" for setting in choice)
    }


@dataclass
class Trial:
    """What a run of the model with chosen settings on one input showed."""

    squares: Tensor
    """As :func:`squares_between`."""
    cosines: Tensor
    raw: Any
    """What ``forward`` returned, where a metric needs it."""
    counts: dict[str, GuardCounts]
    """What the guard of each call site estimated and did."""


def run_choice(search: Search, choice: Choice) -> Outcome:
    """Run the model over all inputs with a choice, and compare its outputs with the original ones.

    The guard measures first; then the inputs on which it will act are run again with it, so that
    errors and bound are those of the model as it will be.
    """
    sites = install_choice(search, choice)
    trials = [run_input(search, number) for number in range(len(search.items))]
    if search.guard:
        learn_errors(search.sites, choice, trials)
        sites = [
            with_allowance(site, allowance_of(candidate, trials, search.error))
            for site, candidate in zip(sites, search.sites, strict=True)
        ]
        run_guarded(search, sites, trials)
    together = torch.stack([trial.squares for trial in trials])
    alike = torch.cat([trial.cosines for trial in trials])
    chosen_by, held_out = split_inputs(len(search.items))
    counts = [count for trial in trials for count in trial.counts.values()]
    report = replace(
        with_errors(empty_report(search), together, alike),
        layers=sites,
        guard_checked=sum(count.checked for count in counts),
        guard_acted=sum(count.acted for count in counts),
        predicted_error=relative_error(together[chosen_by]),
        predicted_margin=half_interval(together[chosen_by]),
        measured_error=relative_error(together[held_out]),
        measured_margin=half_interval(together[held_out]),
        metric_after=search.compute_metric([trial.raw for trial in trials]),
    )
    return Outcome(report, least_request(together))


def run_input(search: Search, number: int) -> Trial:
    """Run the model as it is on one input, and compare its output with the original one."""
    search.progress.step("error of the chosen settings")
    take_counts(search.model)
    raw = search.run(search.items[number])
    outputs = outputs_of(raw)
    before = search.outputs[number]
    return Trial(
        squares_between(outputs, before),
        cosines_between(outputs, before),
        None if search.metric is None else raw,
        take_counts(search.model),
    )


def run_guarded(search: Search, sites: Sequence[AttentionSite], trials: list[Trial]) -> None:
    """Replace the trials of inputs on which the guard acts by those with it. Where it acts on more
    than :data:`MOST_GUARDED` of them the choice is judged without it.
    """
    allowed = {site.title: site.setting.allowed_error or math.inf for site in sites}
    above = [
        number
        for number, trial in enumerate(trials)
        if any(not count.largest_error <= allowed[title] for title, count in trial.counts.items())
    ]
    if len(above) > MOST_GUARDED * len(trials):
        return
    install_sites(search.model, sites)
    for number in above:
        trials[number] = run_input(search, number)


def install_choice(search: Search, choice: Choice) -> list[AttentionSite]:
    """Install a choice, with guards that measure and do not act. Returns the call sites."""
    sites = sites_of(search.sites, choice)
    if search.guard:
        sites = [with_allowance(site, math.inf) for site in sites]
    install_sites(search.model, sites)
    return sites


def with_allowance(site: AttentionSite, allowed: float) -> AttentionSite:
    """A call site with the error that its guard allows, where it is in groups."""
    if site.setting.choice != "groups":
        return site
    setting = replace(site.setting, allowed_error=allowed)
    return replace(site, measurement=replace(site.measurement, setting=setting))


def allowance_of(site: AttentionSite, trials: Sequence[Trial], error: float) -> float:
    """The error that the guard of a call site allows: a little more than the largest that it has
    estimated, looking closely, on the inputs whose own error is within the one asked for, and no
    more than what would by itself become the error asked for.

    What it estimated on others is what it is to act on; it would be of no use if one input with a
    large error made it allow as much on every other.
    """
    good = [trial for trial in trials if relative_error(trial.squares[None]) <= error] or trials
    estimates = [
        trial.counts[site.title].largest_error for trial in good if site.title in trial.counts
    ]
    allowed = min(ALLOWANCE * max(estimates, default=0.0), error / max(site.sensitivity, 1e-9))
    return max(allowed, LEAST_ALLOWANCE)


def empty_report(search: Search) -> Report:
    """The report of a model whose attention stays as it is."""
    nothing = tuple(None for _ in search.sites)
    return Report(
        asked_error=search.error,
        layers=sites_of(search.sites, nothing),
        matching_modules=count_alike(search.model, [site.name for site in search.sites]),
        prefix_tokens_detected=search.num_prefix_tokens is None,
        compared_output=search.compared_output,
        speedup_limit=search.speedup_limit,
        exact_speedup=exact_speedup(search),
        inputs=len(search.items),
        verdict=search.verdict,
    )
