"""Run the model with chosen settings: error propagation, the error bound, and the speedup; then
install the fastest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from dgt.acceleration.intercept import (
    AttentionProcessor,
    exact_attention,
    installed_processors,
    trace_sdpa,
    uninstall_processors,
)
from dgt.acceleration.measure import Capture, split_inputs, timed
from dgt.acceleration.plan import count_alike
from dgt.acceleration.report import Report
from dgt.acceleration.sites import AttentionSite, Measurement, chosen
from dgt.acceleration.task import CONFIRMATIONS, Task, outputs_of

USUAL_BOUND = 1.3  # of the bound over the error, before it is known
CLOSE = 0.9  # a bound of at least this share of the requested error is close enough
LAST_MARGIN = 0.85  # of the error that the last try aims at
Times: TypeAlias = tuple[float, dict[tuple[str, int], float]]
"""Milliseconds of a run of the model, and of each call site's attention in it, by name and call."""
TIMINGS = 3  # maximum number of inputs for timing, before and after


def probe_reach(task: Task, found: Capture) -> None:
    """Measure, in at most one pass, how much of each call site's error reaches the model's output.

    Each input is run with some neighboring call sites in groups; these get the same reach, the
    output's error over theirs.
    """
    sites = [site for site in found.sites if has_groups(site)]
    choosing = split_inputs(len(task.items))[0]
    runs = min(len(task.items), len(sites))
    for number in range(runs):
        chunk = sites[number * len(sites) // runs : (number + 1) * len(sites) // runs]
        place = choosing[number % len(choosing)]
        task.step(f"error propagation from {chunk[0].title}")
        probing = Probe(
            [probed(site, task.error) if site in chunk else site for site in found.sites]
        )
        with trace_sdpa(task.model, probing.answer):
            outputs = outputs_of(task.run(task.items[place]), found.paddings[place])
        arrived = relative_error(squares_between(outputs, found.outputs[place])[None])
        if probing.error:
            for site in chunk:
                site.reach = arrived / probing.error


def probed(site: AttentionSite, error: float) -> AttentionSite:
    """A call site with the grouped setting whose error is closest to the requested one."""
    measured = [found for setting, found in usable(site).items() if setting.choice == "groups"]
    return chosen(site, min(measured, key=lambda found: abs(found.error - error)))


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


@dataclass
class Confirmed:
    """A choice, and the result of a pass over the inputs with it."""

    choice: Choice
    squares: Tensor
    """(inputs, 2): squared errors and squared norms of the output."""
    cosines: Tensor
    raw: list[Any] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Relative, over all inputs together."""
        return relative_error(self.squares)

    @property
    def bound(self) -> float:
        """Of the error over unseen inputs."""
        return error_bound(self.squares)


def confirm(task: Task, found: Capture) -> Confirmed | None:
    """Look for the fastest choice whose bound is within the error asked for, in three passes; None
    if there is none.

    What the errors of call sites predict is corrected by what the model was found to do at the
    choice before.
    """
    sites = found.sites
    confirmed: dict[Choice, Confirmed] = {}
    correction = 1.0
    bound_ratio = USUAL_BOUND
    for attempt in range(CONFIRMATIONS):
        is_last = attempt == CONFIRMATIONS - 1
        margin = LAST_MARGIN if is_last and not within(task, confirmed) else 1.0
        choice = choose(sites, margin * task.error / (bound_ratio * correction))
        if choice in confirmed or not any(choice):
            break
        result = run_choice(task, found, choice)
        confirmed[choice] = result
        predicted = predicted_error(sites, choice)
        if not predicted:
            break
        correction = result.error / predicted
        bound_ratio = result.bound / max(result.error, 1e-15)
        if CLOSE * task.error <= result.bound <= task.error:
            break
    good = within(task, confirmed)
    return min(good, key=lambda result: predicted_ms(sites, result.choice), default=None)


def within(task: Task, confirmed: dict[Choice, Confirmed]) -> list[Confirmed]:
    """Whether the bound is within the requested error; exact attention always is, up to rounding."""
    return [
        result
        for result in confirmed.values()
        if result.bound <= task.error
        or all(setting is None or setting.choice == "exact" for setting in result.choice)
    ]


def exact_only(found: Capture) -> Confirmed | None:
    """Exact attention wherever it is faster, equal up to rounding; None if it never is."""
    choice = choose(found.sites, 0.0)
    if not any(choice):
        return None
    norms = [sum(float(tensor.square().sum()) for tensor in outputs) for outputs in found.outputs]
    squares = torch.tensor([[0.0, norm] for norm in norms], dtype=torch.float64)
    return Confirmed(choice, squares, torch.ones(1), found.raw)


def run_choice(task: Task, found: Capture, choice: Choice) -> Confirmed:
    """Run the model over all inputs with a choice, and compare its outputs with the original ones."""
    uninstall_processors(task.model)
    install_sites(task.model, sites_of(found.sites, choice))
    squares = []
    cosines = []
    raws = []
    known = zip(task.items, found.outputs, found.paddings, strict=True)
    for item, before, paddings in known:
        task.step("error of the chosen settings")
        raw = task.run(item)
        outputs = outputs_of(raw, paddings)
        squares.append(squares_between(outputs, before))
        cosines.append(cosines_between(outputs, before))
        if task.metric is not None:
            raws.append(raw)
    return Confirmed(choice, torch.stack(squares), torch.cat(cosines), raws)


def time_choice(task: Task, sites: Sequence[AttentionSite]) -> tuple[Times, Times]:
    """Time the original and the accelerated model alternately; the fastest run of each."""
    places = split_inputs(len(task.items))[1] or [0]
    item = task.items[places[-1]]
    turns = max(1, min(TIMINGS, len(task.items) // 2))
    before: list[Times] = []
    after: list[Times] = []
    for _ in range(turns):
        for is_exact, times in ((True, before), (False, after)):
            task.step(f"time {'before' if is_exact else 'after'}")
            times.append(time_run(task.model, lambda: task.run(item), sites, is_exact))
    return min(before, key=lambda run: run[0]), min(after, key=lambda run: run[0])


def time_run(
    model: nn.Module, run: Callable[[], Any], sites: Sequence[AttentionSite], is_exact: bool
) -> Times:
    """Time ``run()``, which calls the model, with its own attention if ``is_exact``."""
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


def install_fastest(task: Task, found: Capture) -> Report:
    """Put the fastest choice within the error into the model, time it, and report it.

    A choice with which the whole model is not faster is taken out again, and a verdict says so.
    """
    result = look_for_choice(task, found)
    uninstall_processors(task.model)
    nothing = tuple(None for _ in found.sites)
    sites = sites_of(found.sites, nothing if result is None else result.choice)
    report = Report(
        asked_error=task.error,
        layers=sites,
        matching_modules=count_alike(task.model, [site.name for site in sites]),
        special_tokens_detected=task.special_tokens is None,
        measured=task.measured,
        bound=found.bound,
        inputs=len(task.items),
        verdict=found.verdict,
    )
    if result is None:
        return report
    install_sites(task.model, sites)
    (ms_before, before), (ms_after, after) = time_choice(task, sites)
    attention_before, attention_after = sum(before.values()), sum(after.values())
    report = replace(report, bound=ms_before / max(ms_before - attention_before, 1e-9))
    if ms_after >= ms_before or attention_after >= attention_before:
        uninstall_processors(task.model)  # what single layers gained was lost around them
        verdict = "the model as a whole was not faster"
        return replace(report, verdict=verdict, layers=[undone(site, verdict) for site in sites])
    for site in sites:
        site.measurement.own_ms = before.get((site.name, site.call), 0.0)
        site.measurement.ms = after.get((site.name, site.call), 0.0)
    choosing, held_out = split_inputs(len(task.items))
    return replace(
        report,
        predicted_error=relative_error(result.squares[choosing]),
        predicted_margin=half_interval(result.squares[choosing]),
        measured_error=relative_error(result.squares[held_out]),
        measured_margin=half_interval(result.squares[held_out]),
        error_bound=result.bound,
        cosine_mean=float(result.cosines.mean()),
        cosine_low=float(result.cosines.quantile(0.01)),
        attention_speedup=attention_before / max(attention_after, 1e-9),
        model_speedup=ms_before / ms_after,
        metric_before=found.metric,
        metric_after=task.measure(result.raw),
    )


def look_for_choice(task: Task, found: Capture) -> Confirmed | None:
    """The fastest choice of settings within the error; None where nothing is faster, with a
    verdict that says why.
    """
    if found.verdict:
        return None
    if any(has_groups(site) for site in found.sites):
        probe_reach(task, found)
        confirmed = confirm(task, found)
        if confirmed is not None:
            return confirmed
    exact = exact_only(found)
    if exact is None:
        found.verdict = NOT_FASTER
    return exact


def undone(site: AttentionSite, reason: str) -> AttentionSite:
    """A call site of a choice that was undone."""
    if site.setting.choice == "dense":
        return site
    return chosen(site, Measurement(ms=site.ms, own_ms=site.ms), reason)
