"""Run the model with chosen settings: how sensitive it is to errors, the error bound, and the
speedup; then install the fastest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dgt.acceleration.bound import (
    cosines_between,
    error_bound,
    half_interval,
    relative_error,
    squares_between,
)
from dgt.acceleration.calls import Call
from dgt.acceleration.choose import (
    NOT_FASTER,
    Choice,
    choose,
    has_groups,
    predicted_error,
    predicted_ms,
    sites_of,
    usable,
)
from dgt.acceleration.grouped import install_sites, processors_of
from dgt.acceleration.inputs import outputs_of
from dgt.acceleration.intercept import (
    AttentionProcessor,
    exact_attention,
    installed_processors,
    trace_sdpa,
    uninstall_processors,
)
from dgt.acceleration.measure import split_inputs, timed
from dgt.acceleration.plan import count_alike
from dgt.acceleration.report import Report
from dgt.acceleration.search import CONFIRMATIONS, Search
from dgt.acceleration.sites import AttentionSite, Measurement, chosen

USUAL_BOUND = 1.3  # of the bound over the error, before it is known
CLOSE = 0.9  # a bound of at least this share of the requested error is close enough
LAST_MARGIN = 0.85  # of the error that the last try aims at
Times: TypeAlias = tuple[float, dict[tuple[str, int], float]]
"""Milliseconds of a run of the model, and of each call site's attention in it, by name and call."""
TIMINGS = 3  # maximum number of inputs for timing, before and after


def measure_sensitivity(search: Search) -> None:
    """Measure, in at most one pass, how much of each call site's error reaches the model's output.

    Each input is run with some neighboring call sites in groups; these get the same sensitivity,
    the output's error over theirs.
    """
    sites = [site for site in search.sites if has_groups(site)]
    chosen_by = split_inputs(len(search.items))[0]
    runs = min(len(search.items), len(sites))
    for run in range(runs):
        chunk = sites[run * len(sites) // runs : (run + 1) * len(sites) // runs]
        number = chosen_by[run % len(chosen_by)]
        search.step(f"error propagation from {chunk[0].title}")
        probing = Probe(
            [probed(site, search.error) if site in chunk else site for site in search.sites]
        )
        with trace_sdpa(search.model, probing.answer):
            outputs = outputs_of(search.run(search.items[number]), search.paddings[number])
        error = relative_error(squares_between(outputs, search.outputs[number])[None])
        if probing.error:
            for site in chunk:
                site.sensitivity = error / probing.error


def probed(site: AttentionSite, error: float) -> AttentionSite:
    """A call site with the grouped setting whose error is closest to the requested one."""
    grouped = [measured for setting, measured in usable(site).items() if setting.choice == "groups"]
    return chosen(site, min(grouped, key=lambda measured: abs(measured.error - error)))


class Probe:
    """Computes some call sites of a model in groups, and accumulates their errors.

    Args:
        sites: all call sites of the model.
    """

    def __init__(self, sites: Sequence[AttentionSite]) -> None:
        self.processors = processors_of(sites)
        self.squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))

    @property
    def error(self) -> float:
        """The root of the sum of the squared relative errors of the call sites."""
        return sum(relative_error(squares[None]) ** 2 for squares in self.squares.values()) ** 0.5

    def answer(self, name: str, number: int, call: Call) -> Tensor | None:
        """Compute a call, or leave it to the model."""
        output = None
        if name in self.processors:
            output = self.processors[name].process(call, number)
        if output is not None:
            self.squares[name] += squares_between([output.float()], [call.run().float()])
        return output


def confirm(search: Search) -> tuple[Choice, Report] | None:
    """Look for the fastest choice whose bound is within the error asked for, in three passes; None
    if there is none.

    What the errors of call sites predict is corrected by the error of the model with the choice
    before.
    """
    reports: dict[Choice, Report] = {}
    correction = 1.0
    bound_ratio = USUAL_BOUND
    for attempt in range(CONFIRMATIONS):
        is_last = attempt == CONFIRMATIONS - 1
        margin = LAST_MARGIN if is_last and not within(search, reports) else 1.0
        choice = choose(search.sites, margin * search.error / (bound_ratio * correction))
        if choice in reports or not any(choice):
            break
        report, error = run_choice(search, choice)
        reports[choice] = report
        predicted = predicted_error(search.sites, choice)
        if not predicted:
            break
        correction = error / predicted
        bound_ratio = report.error_bound / max(error, 1e-15)
        if CLOSE * search.error <= report.error_bound <= search.error:
            break
    return min(
        within(search, reports).items(),
        key=lambda pair: predicted_ms(search.sites, pair[0]),
        default=None,
    )


def within(search: Search, reports: Mapping[Choice, Report]) -> dict[Choice, Report]:
    """The choices whose bound is within the requested error; that of exact attention always is, up
    to rounding.
    """
    return {
        choice: report
        for choice, report in reports.items()
        if report.error_bound <= search.error
        or all(setting is None or setting.choice == "exact" for setting in choice)
    }


def run_choice(search: Search, choice: Choice) -> tuple[Report, float]:
    """Run the model over all inputs with a choice, and compare its outputs with the original ones.

    Returns:
        The report, without speedups, and the error over all inputs.
    """
    uninstall_processors(search.model)
    install_sites(search.model, sites_of(search.sites, choice))
    squares = []
    cosines = []
    raw_outputs = []
    inputs = zip(search.items, search.outputs, search.paddings, strict=True)
    for item, before, paddings in inputs:
        search.step("error of the chosen settings")
        raw = search.run(item)
        outputs = outputs_of(raw, paddings)
        squares.append(squares_between(outputs, before))
        cosines.append(cosines_between(outputs, before))
        if search.metric is not None:
            raw_outputs.append(raw)
    together = torch.stack(squares)
    alike = torch.cat(cosines)
    chosen_by, held_out = split_inputs(len(search.items))
    report = replace(
        empty_report(search),
        predicted_error=relative_error(together[chosen_by]),
        predicted_margin=half_interval(together[chosen_by]),
        measured_error=relative_error(together[held_out]),
        measured_margin=half_interval(together[held_out]),
        error_bound=error_bound(together),
        cosine_mean=float(alike.mean()),
        cosine_low=float(alike.quantile(0.01)),
        metric_after=search.compute_metric(raw_outputs),
    )
    return report, relative_error(together)


def empty_report(search: Search) -> Report:
    """The report of a model whose attention stays as it is."""
    nothing = tuple(None for _ in search.sites)
    return Report(
        asked_error=search.error,
        layers=sites_of(search.sites, nothing),
        matching_modules=count_alike(search.model, [site.name for site in search.sites]),
        prefix_tokens_detected=search.num_prefix_tokens is None,
        measured=search.measured,
        bound=search.bound,
        inputs=len(search.items),
        verdict=search.verdict,
    )


def time_choice(search: Search, sites: Sequence[AttentionSite]) -> tuple[Times, Times]:
    """Time the original and the accelerated model alternately; the fastest run of each."""
    held_out = split_inputs(len(search.items))[1] or [0]
    item = search.items[held_out[-1]]
    turns = max(1, min(TIMINGS, len(search.items) // 2))
    before: list[Times] = []
    after: list[Times] = []
    for _ in range(turns):
        for is_exact, times in ((True, before), (False, after)):
            search.step(f"time {'before' if is_exact else 'after'}")
            times.append(time_run(search.model, lambda: search.run(item), sites, is_exact))
    return min(before, key=lambda run: run[0]), min(after, key=lambda run: run[0])


def time_run(
    model: nn.Module, run: Callable[[], Any], sites: Sequence[AttentionSite], is_exact: bool
) -> Times:
    """Time ``run()``, which calls the model, with its original attention if ``is_exact``."""
    processors: Mapping[str, AttentionProcessor] = {}
    if not is_exact:
        processors = installed_processors(model)
    joined = {site.name for site in sites if site.calls > 1}
    by_site: dict[tuple[str, int], float] = defaultdict(float)

    def process_or_run(name: str, number: int, call: Call) -> Any:
        output = processors[name].process(call, number) if name in processors else None
        return call.run() if output is None else output

    def answer(name: str, number: int, call: Call) -> Any:
        number = 0 if name in joined else number
        ms, output = timed(partial(process_or_run, name, number, call))
        by_site[name, number] += ms
        return output

    with exact_attention(model), trace_sdpa(model, answer):
        ms = timed(run)[0]
    return ms, dict(by_site)


def install_fastest(search: Search) -> Report:
    """Put the fastest choice within the error into the model, time it, and report it.

    A choice with which the whole model is not faster is taken out again, and a verdict says so.
    """
    best = None if search.verdict else find_fastest(search)
    uninstall_processors(search.model)
    if best is None:
        return empty_report(search)
    choice, report = best
    sites = sites_of(search.sites, choice)
    install_sites(search.model, sites)
    (ms_before, before), (ms_after, after) = time_choice(search, sites)
    attention_before, attention_after = sum(before.values()), sum(after.values())
    bound = ms_before / max(ms_before - attention_before, 1e-9)
    if ms_after >= ms_before or attention_after >= attention_before:
        uninstall_processors(search.model)  # what single layers gained was lost around them
        search.verdict = "the model as a whole was not faster"
        layers = [undone(site, search.verdict) for site in sites]
        return replace(empty_report(search), layers=layers, bound=bound)
    for site in sites:
        site.measurement.dense_ms = before.get((site.name, site.call), 0.0)
        site.measurement.ms = after.get((site.name, site.call), 0.0)
    return replace(
        report,
        layers=sites,
        bound=bound,
        attention_speedup=attention_before / max(attention_after, 1e-9),
        model_speedup=ms_before / ms_after,
        metric_before=search.metric_before,
    )


def find_fastest(search: Search) -> tuple[Choice, Report] | None:
    """The fastest choice of settings within the error, and its report; None where nothing is
    faster, with a verdict that says why.
    """
    if any(has_groups(site) for site in search.sites):
        measure_sensitivity(search)
        confirmed = confirm(search)
        if confirmed is not None:
            return confirmed
    exact = choose(search.sites, 0.0)
    if any(exact):  # equal up to rounding
        return exact, replace(empty_report(search), metric_after=search.metric_before)
    search.verdict = NOT_FASTER
    return None


def undone(site: AttentionSite, reason: str) -> AttentionSite:
    """A call site of a choice that was undone."""
    if site.setting.choice == "dense":
        return site
    return chosen(site, Measurement(ms=site.ms, dense_ms=site.ms), reason)
