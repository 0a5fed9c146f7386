"""One pass of a model over its inputs: its outputs, and what the settings of every call site cost."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dgt.acceleration.bound import squares_between
from dgt.acceleration.calls import Call, read_call
from dgt.acceleration.grouped import compute_call
from dgt.acceleration.intercept import trace_sdpa
from dgt.acceleration.search import Search, check_outputs, tried_inputs
from dgt.acceleration.settings import SHARES, Kind, Setting, split_budget
from dgt.acceleration.sites import (
    LEAST_TOKENS,
    PASSED_BY,
    AttentionSite,
    Measurement,
    Tracer,
    run_first,
)
from dgt.acceleration.timing import speedup_limit, timed
from dgt.ops import cluster_tokens
from dgt.ops.dense import is_native

LEAST_LIMIT = 1.03  # the least speedup a model must have without any attention
GAIN = 0.9  # a setting must take less than this share of the original attention's time
ROUNDS = 2  # the least of this many timings counts
SLOW = 1.5  # a setting slower than this many times the original attention is not timed again
LONG = 40.0  # milliseconds: slower settings are not timed again, nor for a batch
LINEAR = 0.8  # of a time proportional to the share: what is expected at least
NEGLIGIBLE = 0.1  # of the error asked for: a call with less needs no more keys
# Keys a channel: in shorter sequences the first order of residual keys is not tried.
FIRST_ORDER_TRIED = 32
FIRST_ORDER_ADDED = 64  # keys a channel: in longer ones it is always added
SHARP = 3.0  # of the statistic s: above, residual keys do not pay off
BROAD = 1.0  # below, they do
BATCH = 4  # batch size for which the gain must also hold
MOST_ELEMENTS = 1 << 27  # of the queries in such a batch
TRIED_CALLS = 4  # of a module in a pass, that settings are tried on
SAMPLED_QUERIES = 64  # queries per head used to measure the breadth of attention
STATISTIC_SHARE = 0.1  # the budget at which s is looked at


def measure_model(search: Search) -> None:
    """Run the original model once over all inputs: its outputs, its call sites, and what settings
    cost on a few of the inputs. What it finds is set in the search.

    It ends after the first input where even a model without attention would hardly be faster.

    Raises:
        UserError: the model fails on the inputs, calls no attention, or returns nothing that has an
            error.
    """
    tracer = Tracer(
        search.model, search.num_prefix_tokens, LEAST_TOKENS, approximate=search.approximate
    )
    tried = tried_inputs(len(search.items))
    raw_outputs = []
    model_ms: list[float] = []
    attention_ms: list[float] = []
    for number, item in enumerate(search.items):
        tries_settings = number in tried
        search.progress.step("settings of each call" if tries_settings else "original outputs")
        run = TracedRun(tracer, search.error, tries_settings, search.first_order)
        ms, raw = timed(partial(run_traced, search, tracer, item, run.answer))
        if run.is_timed:
            model_ms.append(ms - run.measuring_ms)
            attention_ms.append(run.dense_ms)
        search.outputs.append(check_outputs(search, raw))
        if search.metric is not None:
            raw_outputs.append(raw)
        start = 1 if len(model_ms) > 1 else 0  # the first warms up
        search.speedup_limit = speedup_limit(sum(model_ms[start:]), sum(attention_ms[start:]))
        if search.speedup_limit < LEAST_LIMIT:
            search.verdict = (
                "attention takes too little of the model's time (without any the model would be "
                f"{search.speedup_limit:.2f}x as fast)"
            )
            break
    if not search.verdict:  # before the minutes that the rest takes
        search.metric_before = search.compute_metric(raw_outputs)
    search.sites = tracer.finish()
    for site in search.sites:
        add_between(site)
        site.measurement.dense_ms = sum(site.dense_times) / len(model_ms)
        site.measurement.setting_ms = site.measurement.dense_ms


class TracedRun:
    """Runs the original attention in one run of the model, times it, and measures settings in between.

    Args:
        tracer: knows the call sites.
        asked_error: of the model; 0 for exact attention only.
        tries_settings: whether settings are measured in this run.
        first_order: whether settings may be to first order.
    """

    def __init__(
        self, tracer: Tracer, asked_error: float, tries_settings: bool, first_order: bool
    ) -> None:
        self.tracer = tracer
        self.asked_error = asked_error
        self.first_order = first_order
        self.tries_settings = tries_settings
        # Else by the faster kernel, of which no time is of interest.
        self.is_timed = tries_settings or not any(map(faster_exact, tracer.sites.values()))
        self.dense_ms = 0.0
        self.measuring_ms = 0.0

    def answer(self, name: str, number: int, call: Call) -> Any:
        """Answer a call of the module of this name."""
        site = self.tracer.site_of(name, number, call)
        if not self.is_timed:
            exact = faster_exact(site)
            # In half precision the two differ by as much as that rounds.
            if exact is None or call.arguments is None or call.query.dtype != torch.float32:
                return call.run()
            return compute_call(call, site, exact)
        ms, output = timed(call.run)
        site.dense_times.append(ms)
        self.dense_ms += ms
        if self.tries_settings and number < TRIED_CALLS:
            self.measuring_ms += timed(partial(self.measure, site, call, ms, output))[0]
        return output

    def measure(self, site: AttentionSite, call: Call, dense_ms: float, dense_output: Any) -> None:
        """Measure the settings of a call site."""
        if not site.candidates and not site.reason:
            site.breadth = breadth(call)
        # without arguments it is of a function that nothing of ours stands for
        if call.arguments is not None and site.reason != PASSED_BY:
            measure_call(call, site, dense_ms, dense_output, self.asked_error, self.first_order)


def faster_exact(site: AttentionSite) -> Setting | None:
    """The native dense kernel where it was faster than the original attention, which it equals up to rounding."""
    for setting, measurement in site.candidates.items():
        if setting.choice == "exact" and measurement.dense_ms and measurement.ratio < GAIN:
            return setting
    return None


def run_traced(
    search: Search, tracer: Tracer, item: Any, answer: Callable[[str, int, Call], Any]
) -> Any:
    """Run a model whose call sites are known."""
    if not tracer.sites:
        return run_first(tracer, item, answer, partial(search.run, item))
    with trace_sdpa(search.model, answer):
        return search.run(item)


def measure_call(
    call: Call,
    site: AttentionSite,
    dense_ms: float,
    dense_output: Any,
    asked_error: float,
    first_order: bool,
) -> None:
    """Measure the settings of a call site on one of its calls, and accumulate the results.

    Args:
        call: the call; its site's first fills in the candidates.
        site: the call site.
        dense_ms, dense_output: of the original attention for the call.
        asked_error: of the model; no groups are tried where it is 0.
        first_order: whether settings may be to first order.
    """
    is_first = not site.candidates
    if is_first:
        for setting in settings_to_try(call, site, asked_error == 0, first_order):
            site.candidates[setting] = Measurement(setting, batch=call.query.shape[0])
    dense_ms = timed_again(call.run, dense_ms)
    is_short = min(call.query.shape[-2], call.key.shape[-2]) < site.least_tokens
    slope: dict[Kind, float] = {}  # of the relative time over the share
    enough: set[Kind] = set()
    for setting, total in site.candidates.items():
        is_grouped = setting.choice == "groups"
        if not is_grouped and not is_first:
            continue  # neither its time nor its error depends on the input
        if is_grouped and (call.reason is not None or is_short):
            continue
        if is_grouped and slope.get(setting.kind, 0.0) * setting.share >= GAIN:
            continue  # more keys only make it slower
        if setting.kind in enough:
            continue
        measurement = measure_setting(call, site, setting, dense_ms, dense_output)
        total.add(measurement)
        if is_grouped:
            slope[setting.kind] = LINEAR * measurement.ratio / setting.share
            if measurement.error < NEGLIGIBLE * asked_error:
                enough.add(setting.kind)
    if is_first and dense_ms < LONG:
        measure_batch(call, site)


def add_between(site: AttentionSite) -> None:
    """Add the settings between those that were measured: their times on a line, their errors on one
    between logarithms.
    """
    for kind in {setting.kind for setting in site.candidates if setting.choice == "groups"}:
        measurements = [
            found
            for setting, found in site.candidates.items()
            if setting.kind == kind and found.dense_ms
        ]
        for lower, upper in itertools.pairwise(measurements):
            if lower.dense_ms == upper.dense_ms:  # of the same calls
                between = interpolate(site, lower, upper)
                site.candidates[between.setting] = between


def interpolate(site: AttentionSite, lower: Measurement, upper: Measurement) -> Measurement:
    """What a setting would show whose share is the geometric mean of those of two others."""
    share = math.sqrt(lower.setting.share * upper.setting.share)
    kind = lower.setting.kind
    setting = grouped_setting(site, share, kind.has_residual, kind.first_order)
    part = (share - lower.setting.share) / (upper.setting.share - lower.setting.share)
    batch_ratio = None
    if lower.batch_ratio is not None and upper.batch_ratio is not None:
        batch_ratio = lower.batch_ratio + part * (upper.batch_ratio - lower.batch_ratio)
    return replace(
        lower,
        setting=setting,
        setting_ms=lower.setting_ms + part * (upper.setting_ms - lower.setting_ms),
        squared_error=math.sqrt(lower.squared_error * upper.squared_error),
        batch_ratio=batch_ratio,
    )


def measure_setting(
    call: Call, site: AttentionSite, setting: Setting, dense_ms: float, dense_output: Any
) -> Measurement:
    """Time one setting on one call, and compare its output with the original."""
    work = partial(compute_call, call, site, setting)
    ms, output = timed(work)
    is_smallest = setting.share == SHARES[0]  # which decides about all of its kind
    if is_smallest or ms < SLOW * dense_ms:
        ms = timed_again(work, ms)
    error, norm = squares_between([output.float()], [dense_output.float()]).tolist()
    return Measurement(setting, ms, dense_ms, error, norm)


def timed_again(work: Callable[[], Any], ms: float) -> float:
    """The shortest time of a function in milliseconds, timed again unless it took long."""
    return ms if ms > LONG else min(ms, timed(work, ROUNDS - 1)[0])


def settings_to_try(
    call: Call, site: AttentionSite, is_exact: bool, first_order: bool
) -> list[Setting]:
    """Candidates for a call: the native dense kernel on CPUs, and groups of several budgets, smallest first."""
    settings = []
    if call.arguments is not None and is_native(**call.arguments):
        settings.append(Setting("exact"))
    if not is_exact and not site.reason:
        kinds = residual_kinds(residual_statistic(call, site))
        settings += [
            grouped_setting(site, share, has_residual, is_first_order)
            for share in SHARES
            for has_residual in kinds
            for is_first_order in orders_to_try(site, has_residual and first_order)
        ]
    return settings


def residual_kinds(statistic: float | None) -> list[bool]:
    """Whether to try residual keys: not where attention is sharp, only with them where it is broad."""
    if statistic is None:
        return [True, False]
    if statistic > SHARP:
        return [False]
    return [True] if statistic < BROAD else [True, False]


def orders_to_try(site: AttentionSite, first_order: bool) -> list[bool]:
    """Whether to add the first order of residual keys, if it may be added.

    It costs a product of D x D for every query. At equal products it leaves 0.59 to 0.88 of the error
    with 85 keys a channel, 0.70 to 0.98 with 49, where some layers lose, and gains nothing with 21
    (``docs/log.md``).
    """
    length = site.key_tokens / max(site.channels, 1)
    if not first_order or length < FIRST_ORDER_TRIED:
        return [False]
    return [True] if length >= FIRST_ORDER_ADDED else [False, True]


def grouped_setting(
    site: AttentionSite, share: float, has_residual: bool, first_order: bool
) -> Setting:
    """A budget of a call site."""
    setting = split_budget(share, site.tokens, site.key_tokens, has_residual)
    return replace(setting, first_order=first_order)


def measure_batch(call: Call, site: AttentionSite) -> None:
    """Time the smallest setting of each kind for a batch of several inputs."""
    arguments = call.arguments or {}
    is_large = call.query.shape[0] >= BATCH or BATCH * call.query.numel() > MOST_ELEMENTS
    if is_large or call.shape != call.query.shape or arguments.get("attn_mask") is not None:
        return
    batch = repeat_call(call, BATCH)
    dense_ms = timed(batch.run, ROUNDS)[0]
    seen: set[Kind] = set()
    for setting, measurement in site.candidates.items():
        if setting.kind in seen or measurement.ratio >= GAIN:
            continue
        seen.add(setting.kind)
        ms = timed(partial(compute_call, batch, site, setting), ROUNDS)[0]
        worse = (ms / dense_ms) / measurement.ratio
        for other, same in site.candidates.items():
            if other.kind == setting.kind:
                same.batch_ratio = worse * same.ratio


def repeat_call(call: Call, count: int) -> Call:
    """The same call for a batch of copies of its input."""
    arguments = dict(call.arguments or {})
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].repeat(count, 1, 1, 1)
    return read_call(**arguments)


@torch.no_grad()
def residual_statistic(call: Call, site: AttentionSite) -> float | None:
    """``s = scale^2 tr(Cq Ck)``, with the covariances of queries within groups and of keys within
    clusters.

    Where it is large, attention within a group and a cluster is far from linear, and means of keys
    do not pay. The mean over heads; None for padded sequences, of which nothing is known.
    """
    if call.key_mask is not None or call.query.shape[1] != call.key.shape[1]:
        return None
    prefix = site.num_prefix_tokens if site.is_within else 0
    setting = split_budget(STATISTIC_SHARE, site.tokens, site.key_tokens, True)
    queries = call.query[:1, :, prefix:]
    keys = call.key[:1, :, prefix:]
    of_queries = covariance_within(queries, min(setting.groups, queries.shape[2]))
    of_keys = covariance_within(keys, min(setting.residual_keys, keys.shape[2]))
    return call.scale**2 * float((of_queries * of_keys).sum((-2, -1)).mean())


def covariance_within(tokens: Tensor, clusters: int) -> Tensor:
    """(B, H, D, D): the covariance of tokens around the centroids of their clusters."""
    clustering = cluster_tokens(tokens, clusters)
    ids = clustering.ids[..., None].expand(-1, -1, -1, tokens.shape[-1])
    rest = tokens.float() - clustering.centroids.gather(2, ids)
    return rest.mT @ rest / tokens.shape[2]


def breadth(call: Call) -> float:
    """The mean perplexity, in keys, of the attention of evenly spaced queries."""
    step = max(1, call.query.shape[2] // SAMPLED_QUERIES)
    query = call.query[:1, :, ::step].float()
    key = call.key[:1].float()
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    score = query @ key.mT * call.scale
    if call.key_mask is not None:
        score = score.masked_fill(~call.key_mask[:1, None, None], -torch.inf)
    return float(torch.special.entr(score.softmax(-1)).sum(-1).exp().mean())
