"""What a plan does on one's own inputs: :func:`dgt.check_plan`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from dgt.acceleration.bound import (
    cosines_between,
    half_interval,
    relative_error,
    squares_between,
)
from dgt.acceleration.decomposed_bias import DecomposedAttention
from dgt.acceleration.grouped import GroupedAttention, guard_counts
from dgt.acceleration.guard import GuardCounts
from dgt.acceleration.inputs import Inputs, check_values, read_items
from dgt.acceleration.intercept import installed_processors
from dgt.acceleration.pipeline import in_prediction
from dgt.acceleration.report import Report, with_errors
from dgt.acceleration.search import Forward, Search, check_outputs, read_forward
from dgt.acceleration.sites import AttentionSite
from dgt.acceleration.timing import TimedRun, speedup_limit
from dgt.ops.checks import describe
from dgt.utils.errors import LOGGER, UserError


@torch.no_grad()
def check_plan(
    model: nn.Module,
    inputs: Inputs,
    *,
    forward: Forward | None = None,
    metric: Callable[[list[Any]], float] | None = None,
) -> Report:
    """Measure error, bound and speed of an accelerated model on one's own inputs, in one pass.

    Each input is run with the original attention and as the model is; nothing is changed.

    Args:
        model: after :func:`dgt.apply_plan` or :func:`dgt.accelerate`.
        inputs: at least one, as in :func:`dgt.accelerate`; of the size that the plan is for.
        forward, metric: as there.

    Returns:
        A :class:`Report` of these inputs: ``measured_error``, ``error_bound``, speedups, how often
        the guard acted, and a row for each call site that is not dense.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed; for
            a model that is not accelerated, or inputs of another size than the plan's, where it was
            found with inputs of one. The model is as it was.

    Example:
        >>> dgt.apply_plan(model, "vit_small_patch14_dinov2.lvd142m@1036-0.05")
        >>> print(dgt.check_plan(model, images))
    """
    search = read_check(model, inputs, forward, metric)
    sites = sites_in(model)
    checked, acted = total_counts(model)
    squares = []
    cosines = []
    raw_before = []
    raw_after = []
    runs_before = []
    runs_after = []
    with in_prediction(model):
        for number, item in enumerate(search.items):
            LOGGER.info("input %d of %d", number + 1, len(search.items))
            run = partial(search.run, item)
            before = TimedRun(model, run, is_exact=True)
            check_tokens(sites, before)
            after = TimedRun(model, run, is_exact=False)
            outputs = check_outputs(search, before.output)
            outputs_after = check_outputs(search, after.output)
            squares.append(squares_between(outputs_after, outputs))
            cosines.append(cosines_between(outputs_after, outputs))
            if metric is not None:
                raw_before.append(before.output)
                raw_after.append(after.output)
            before.output = after.output = None  # of many inputs they would fill the memory
            runs_before.append(before)
            runs_after.append(after)
    if len(search.items) > 1:  # the first warms up
        del runs_before[0], runs_after[0]
    together = torch.stack(squares)
    alike = torch.cat(cosines)
    now_checked, now_acted = total_counts(model)
    ms_before = fmean(run.model_ms for run in runs_before)
    ms_after = fmean(run.model_ms for run in runs_after)
    attention_before = fmean(run.attention_ms for run in runs_before)
    attention_after = fmean(run.attention_ms for run in runs_after)
    report = Report(
        asked_error=None,
        layers=[with_times(site, runs_before, runs_after) for site in sites],
        measured_error=relative_error(together),
        measured_margin=half_interval(together),
        attention_speedup=attention_before / max(attention_after, 1e-9),
        model_speedup=ms_before / ms_after,
        speedup_limit=speedup_limit(ms_before, attention_before),
        compared_output=search.compared_output,
        metric_before=search.compute_metric(raw_before),
        metric_after=search.compute_metric(raw_after),
        inputs=len(search.items),
        guard_checked=now_checked - checked,
        guard_acted=now_acted - acted,
    )
    return with_errors(report, together, alike)


def read_check(
    model: nn.Module,
    inputs: Inputs,
    forward: Forward | None,
    metric: Callable[[list[Any]], float] | None,
) -> Search:
    """Check the arguments. Raises as :func:`check_plan`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    if not installed_processors(model):
        raise UserError("model must be accelerated: use dgt.apply_plan or dgt.accelerate first")
    items = read_items(inputs)
    if not items:
        raise UserError("inputs must be at least 1, got 0")
    check_values(items)
    forward, compared_output = read_forward(model, forward, metric)
    return Search(model, items, 0.0, forward, compared_output, metric, None, guard=True)


def sites_in(model: nn.Module) -> list[AttentionSite]:
    """The call sites of an accelerated model that are not dense."""
    return [
        processor.site
        for processor in installed_processors(model).values()
        if isinstance(processor, GroupedAttention | DecomposedAttention)
    ]


def total_counts(model: nn.Module) -> tuple[int, int]:
    """How many attention calls of an input guards have checked, and in how many they acted."""
    total = GuardCounts()
    for counts in guard_counts(model).values():
        total.add(counts)
    return total.checked, total.acted


def check_tokens(sites: Sequence[AttentionSite], run: TimedRun) -> None:
    """Reject inputs of another size than the plan's, where that is of one size."""
    for site in sites:
        tokens = run.tokens.get(site.name, site.sizes)
        is_of_any_size = site.setting.where_faster or site.sizes_vary
        if site.calls == 1 and not is_of_any_size and tokens != site.sizes:
            raise UserError(
                f"inputs must have the plan's {site.tokens} tokens at {site.title!r}, got {tokens[0]}"
            )


def with_times(
    site: AttentionSite, before: Sequence[TimedRun], after: Sequence[TimedRun]
) -> AttentionSite:
    """A call site with the times that were measured; its error stays that of the plan."""
    measurement = replace(
        site.measurement,
        dense_ms=fmean(run.site_ms[site.name] for run in before),
        setting_ms=fmean(run.site_ms[site.name] for run in after),
    )
    return replace(site, measurement=measurement)
