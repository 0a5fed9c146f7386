"""Run the model with chosen settings: error propagation, the error bound, and the speedup; then
install the fastest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dgt.acceleration.calls import Call
from dgt.acceleration.capture import Capture, Site, split_inputs
from dgt.acceleration.choose import (
    NOT_FASTER,
    Choice,
    choose,
    has_groups,
    predicted_error,
    predicted_ms,
    rows_of,
    usable,
)
from dgt.acceleration.grouped import install_rows, processors_of
from dgt.acceleration.intercept import (
    AttentionProcessor,
    exact_attention,
    installed_processors,
    trace_sdpa,
    uninstall_processors,
)
from dgt.acceleration.measure import timed
from dgt.acceleration.progress import Progress
from dgt.acceleration.settings import LayerReport
from dgt.acceleration.statistics import (
    cosines_between,
    error_bound,
    relative_error,
    squares_between,
)
from dgt.acceleration.task import Task, outputs_of

CONFIRMATIONS = 3  # passes over the inputs to check choices
USUAL_BOUND = 1.3  # of the bound over the error, before it is known
CLOSE = 0.9  # a bound of at least this share of the requested error is close enough
LAST_MARGIN = 0.85  # of the error that the last try aims at
TIMINGS = 3  # maximum number of inputs for timing, before and after


def most_runs(inputs: int) -> int:
    """The maximum number of model runs: six passes over the inputs."""
    return (2 + CONFIRMATIONS + 1) * inputs


def probe_reach(task: Task, found: Capture, progress: Progress) -> None:
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
        progress.step(f"error propagation from {chunk[0].row.title}")
        probing = Probe(
            [probe_row(site, task.error) if site in chunk else site.row for site in found.sites]
        )
        with trace_sdpa(task.model, probing.answer):
            outputs = outputs_of(task.run(task.items[place]), found.paddings[place])
        arrived = relative_error(squares_between(outputs, found.outputs[place])[None])
        if probing.error:
            for site in chunk:
                site.reach = arrived / probing.error


def probe_row(site: Site, error: float) -> LayerReport:
    """The grouped setting of a call site whose error is closest to the requested one."""
    settings = [measured for kind, measured in usable(site).items() if kind.choice == "groups"]
    return min(settings, key=lambda measured: abs(measured.error - error)).row


class Probe:
    """Computes some call sites of a model in groups, and accumulates their errors.

    Args:
        rows: those of all call sites of the model.
    """

    def __init__(self, rows: Sequence[LayerReport]) -> None:
        self.processors = processors_of(rows)
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


def confirm(task: Task, found: Capture, progress: Progress) -> Confirmed | None:
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
        result = run_choice(task, found, choice, progress)
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
        or all(kind is None or kind.choice == "exact" for kind in result.choice)
    ]


def exact_only(found: Capture) -> Confirmed | None:
    """Exact attention wherever it is faster, equal up to rounding; None if it never is."""
    choice = choose(found.sites, 0.0)
    if not any(choice):
        return None
    norms = [sum(float(tensor.square().sum()) for tensor in outputs) for outputs in found.outputs]
    squares = torch.tensor([[0.0, norm] for norm in norms], dtype=torch.float64)
    return Confirmed(choice, squares, torch.ones(1), found.raw)


def run_choice(task: Task, found: Capture, choice: Choice, progress: Progress) -> Confirmed:
    """Run the model over all inputs with a choice, and compare its outputs with the original ones."""
    uninstall_processors(task.model)
    install_rows(task.model, rows_of(found.sites, choice))
    squares = []
    cosines = []
    raws = []
    known = zip(task.items, found.outputs, found.paddings, strict=True)
    for item, before, paddings in known:
        progress.step("error of the chosen settings")
        raw = task.run(item)
        outputs = outputs_of(raw, paddings)
        squares.append(squares_between(outputs, before))
        cosines.append(cosines_between(outputs, before))
        if task.metric is not None:
            raws.append(raw)
    return Confirmed(choice, torch.stack(squares), torch.cat(cosines), raws)


@dataclass
class Timed:
    """The time of a run of the model, and of each call site's attention in it, in milliseconds."""

    ms: float
    by_site: dict[tuple[str, int], float]

    @property
    def attention_ms(self) -> float:
        """Of all attention together."""
        return sum(self.by_site.values())


def time_choice(task: Task, rows: Sequence[LayerReport], progress: Progress) -> tuple[Timed, Timed]:
    """Time the original and the accelerated model alternately; the fastest run of each."""
    places = split_inputs(len(task.items))[1] or [0]
    item = task.items[places[-1]]
    turns = max(1, min(TIMINGS, len(task.items) // 2))
    before: list[Timed] = []
    after: list[Timed] = []
    for _ in range(turns):
        for is_exact, times in ((True, before), (False, after)):
            progress.step(f"time {'before' if is_exact else 'after'}")
            times.append(time_run(task.model, lambda: task.run(item), rows, is_exact))
    return min(before, key=lambda run: run.ms), min(after, key=lambda run: run.ms)


def time_run(
    model: nn.Module, run: Callable[[], Any], rows: Sequence[LayerReport], is_exact: bool
) -> Timed:
    """Time ``run()``, which calls the model, and each call site's attention in it, its own if
    ``is_exact``.
    """
    processors: Mapping[str, AttentionProcessor] = {}
    if not is_exact:
        processors = installed_processors(model)
    joined = {row.name for row in rows if row.calls > 1}
    times: dict[tuple[str, int], float] = defaultdict(float)

    def process_or_run(name: str, number: int, call: Call) -> Any:
        output = processors[name].process(call, number) if name in processors else None
        return call.run() if output is None else output

    def answer(name: str, number: int, call: Call) -> Any:
        number = 0 if name in joined else number
        ms, output = timed(partial(process_or_run, name, number, call))
        times[name, number] += ms
        return output

    with exact_attention(model), trace_sdpa(model, answer):
        ms = timed(run)[0]
    return Timed(ms, dict(times))


@dataclass
class Outcome:
    """The result for one model."""

    rows: list[LayerReport]
    """One for every call site, in the order of the calls."""
    confirmed: Confirmed | None = None
    """The choice that is installed; None where nothing is."""
    times: tuple[Timed, Timed] | None = None
    """Of the model before and after; None where it was not timed."""


def install_fastest(task: Task, found: Capture, progress: Progress) -> Outcome:
    """Put the fastest choice within the error into the model and time it.

    A choice with which the whole model is not faster is taken out again, and a verdict says so.
    """
    confirmed = look_for_choice(task, found, progress)
    uninstall_processors(task.model)
    if confirmed is None:
        return Outcome(rows_of(found.sites, tuple(None for _ in found.sites)))
    rows = rows_of(found.sites, confirmed.choice)
    install_rows(task.model, rows)
    before, after = time_choice(task, rows, progress)
    if after.ms >= before.ms or after.attention_ms >= before.attention_ms:
        uninstall_processors(task.model)  # what single layers gained was lost around them
        found.verdict = "the model as a whole was not faster"
        rows = [as_it_was(row, found.verdict) for row in rows]
        return Outcome(rows, times=(before, before))
    rows = [
        replace(
            row,
            ms_before=before.by_site.get((row.name, row.call), 0.0),
            ms_after=after.by_site.get((row.name, row.call), 0.0),
        )
        for row in rows
    ]
    return Outcome(rows, confirmed, (before, after))


def look_for_choice(task: Task, found: Capture, progress: Progress) -> Confirmed | None:
    """The fastest choice of settings within the error; None where nothing is faster, with a
    verdict that says why.
    """
    if found.verdict is not None:
        return None
    if any(has_groups(site) for site in found.sites):
        probe_reach(task, found, progress)
        confirmed = confirm(task, found, progress)
        if confirmed is not None:
            return confirmed
    exact = exact_only(found)
    if exact is None:
        found.verdict = NOT_FASTER
    return exact


def as_it_was(row: LayerReport, reason: str) -> LayerReport:
    """A row of a choice that was undone."""
    if row.choice == "dense":
        return row
    return replace(row, choice="dense", reason=reason, error=0.0, ms_after=row.ms_before)
