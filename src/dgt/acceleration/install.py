"""The end of a search: the fastest choice of settings is put into the model, and timed there."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dgt.acceleration.choose import NOT_FASTER, choose, has_groups, sites_of
from dgt.acceleration.confirm import confirm, empty_report
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.intercept import uninstall_processors
from dgt.acceleration.report import Report
from dgt.acceleration.search import TIMINGS, Search, split_inputs
from dgt.acceleration.sensitivity import measure_sensitivity
from dgt.acceleration.sites import AttentionSite, Measurement, chosen
from dgt.acceleration.timing import TimedRun, speedup_limit

LONG_PAIR = 4000.0  # milliseconds: one that shows a gain is not followed by others


def install_fastest(search: Search) -> Report:
    """Put the fastest choice within the error into the model, time it, and report it.

    A choice with which the whole model is not faster is taken out again, and a verdict says so.
    """
    report = None if search.verdict else find_fastest(search)
    uninstall_processors(search.model)
    if report is None:
        return empty_report(search)
    sites = report.layers
    install_sites(search.model, sites)
    before, after = time_choice(search)
    limit = speedup_limit(before.model_ms, before.attention_ms)
    if not is_faster(before, after):
        uninstall_processors(search.model)  # what single layers gained was lost around them
        search.verdict = "the model as a whole was not faster"
        layers = [undone(site, search.verdict) for site in sites]
        return replace(empty_report(search), layers=layers, speedup_limit=limit)
    for site in sites:
        site.measurement.dense_ms = before.site_ms[site.name]
        site.measurement.setting_ms = after.site_ms[site.name]
    return replace(
        report,
        layers=sites,
        speedup_limit=limit,
        attention_speedup=before.attention_ms / max(after.attention_ms, 1e-9),
        model_speedup=before.model_ms / after.model_ms,
        metric_before=search.metric_before,
    )


def find_fastest(search: Search) -> Report | None:
    """The report of the fastest choice of settings within the error; None where nothing is faster,
    with a verdict that says why.
    """
    if any(has_groups(site) for site in search.sites):
        measure_sensitivity(search)
        confirmed = confirm(search)
        if confirmed is not None:
            return confirmed
    exact = choose(search.sites, 0.0)
    if any(exact):  # equal up to rounding
        return replace(
            empty_report(search),
            layers=sites_of(search.sites, exact),
            metric_after=search.metric_before,
        )
    search.verdict = NOT_FASTER
    return None


def time_choice(search: Search) -> tuple[TimedRun, TimedRun]:
    """Time the original and the accelerated model alternately; the fastest run of each.

    One pair of long runs is enough to say what is gained, but not that nothing is: other work on the
    machine may have come between.
    """
    held_out = split_inputs(len(search.items))[1] or [0]
    item = search.items[held_out[-1]]
    turns = max(1, min(TIMINGS, len(search.items) // 2))
    before: list[TimedRun] = []
    after: list[TimedRun] = []
    while len(after) < turns:
        for is_exact, runs in ((True, before), (False, after)):
            search.progress.step("speed")
            runs.append(TimedRun(search.model, partial(search.run, item), is_exact))
        is_long = before[-1].model_ms + after[-1].model_ms > LONG_PAIR
        if is_long and is_faster(*fastest_runs(before, after)):
            break
    return fastest_runs(before, after)


def fastest_runs(
    before: Sequence[TimedRun], after: Sequence[TimedRun]
) -> tuple[TimedRun, TimedRun]:
    """Of each model the run that took the least time."""
    return min(before, key=lambda run: run.model_ms), min(after, key=lambda run: run.model_ms)


def is_faster(before: TimedRun, after: TimedRun) -> bool:
    """Whether a run of the accelerated model took less time, as a whole and for its attention."""
    return after.model_ms < before.model_ms and after.attention_ms < before.attention_ms


def undone(site: AttentionSite, reason: str) -> AttentionSite:
    """A call site of a choice that was undone."""
    if site.setting.choice == "dense":
        return site
    return chosen(site, Measurement(setting_ms=site.dense_ms, dense_ms=site.dense_ms), reason)
