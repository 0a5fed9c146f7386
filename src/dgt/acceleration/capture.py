"""One pass of a model over its inputs: its outputs, and the cost of each setting at every call site."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dgt.acceleration.bypass import bypass_in
from dgt.acceleration.calls import Call, first_reason
from dgt.acceleration.intercept import contains, trace_sdpa
from dgt.acceleration.measure import Own, Settings, breadth, measure_call, timed
from dgt.acceleration.progress import Progress
from dgt.acceleration.settings import LayerReport
from dgt.acceleration.special_tokens import (
    FrameTokens,
    SpecialTokens,
    count_special_tokens,
    special_places,
)
from dgt.acceleration.task import (
    CALL_ERRORS,
    Paddings,
    Task,
    call_with,
    check_outputs,
    describe_failure,
    describe_item,
)
from dgt.utils.errors import UserError

LEAST_TOKENS = (
    192  # shorter sequences are skipped: selecting keys alone takes as long as attention there
)
MEASURED_INPUTS = 3  # used to evaluate settings
MOST_SITES = 4  # calls per module with separate settings; with more, or a varying number, all calls share one
LEAST_BOUND = 1.03  # the least speedup a model must have without any attention
PASSED_BY = "inside nn.TransformerEncoderLayer, which bypasses it in eval mode"
NESTED = "contains other attention"  # whose calls what is installed around it would answer as well
FEW = "few tokens"
NO_PREFIX = "no class or register tokens were detected: all tokens are treated as patches (set special_tokens=)"


@dataclass
class Site:
    """A call site: a module, and the index of the call within one forward pass."""

    row: LayerReport
    settings: Settings = field(default_factory=dict)
    own_ms: list[float] = field(default_factory=list)
    """Of its calls, in their order."""
    reach: float = 1.0
    """The fraction of its relative error that reaches the model's output."""

    @property
    def ms(self) -> float:
        """Of the model's own attention, in milliseconds for one input."""
        return self.row.ms_before


@dataclass
class Capture:
    """What one pass over the inputs found."""

    sites: list[Site] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    """Outputs of the original model, one per input."""
    paddings: list[Paddings] = field(default_factory=list)
    """The padding masks that attention was called with, for every input."""
    raw: list[Any] = field(default_factory=list)
    """What forward returned; kept only with a metric."""
    metric: float | None = None
    """The task metric with the original attention."""
    bound: float = 1.0
    """How many times as fast the model would be if attention took no time."""
    verdict: str | None = None
    """Why no speedup is possible, if so."""


def find_sites(
    model: nn.Module, item: Any, special: SpecialTokens | None, least_tokens: int
) -> list[Site]:
    """Trace one call of the model without measuring: all call sites, and why they cannot be grouped.

    Raises:
        UserError: the model fails on the item, or calls no attention.
    """
    tracer = Tracer(model, special, least_tokens)
    run_first(tracer, item, tracer.look, lambda: call_with(model, item))
    return tracer.finish()


class Tracer:
    """Collects the call sites of a model over passes of it.

    Args:
        model: what is traced.
        special: where special tokens are; None asks the model.
        least_tokens: call sites of fewer are not tried.
    """

    def __init__(self, model: nn.Module, special: SpecialTokens | None, least_tokens: int) -> None:
        self.model = model
        self.special = special
        self.least_tokens = least_tokens
        self.sites: dict[tuple[str, int], Site] = {}
        self.counts: dict[str, list[int]] = defaultdict(list)  # calls of a module in every pass

    def look(self, name: str, number: int, call: Call) -> None:
        """Record a call; the model computes it."""
        self.site_of(name, number, call)

    def site_of(self, name: str, number: int, call: Call) -> Site:
        """The call site of a call; all calls of a module after the first few share one."""
        if number == 0:
            self.counts[name].append(0)
        self.counts[name][-1] += 1
        index = min(number, MOST_SITES)
        key = (name, index)
        if key not in self.sites:
            self.sites[key] = Site(self.describe(name, index, call))
        elif self.sites[key].row.reason:  # inputs may differ in size, and packed sequences do
            row = self.describe(name, index, call)
            if not row.reason:
                self.sites[key] = Site(row, own_ms=self.sites[key].own_ms)
        return self.sites[key]

    def describe(self, name: str, index: int, call: Call) -> LayerReport:
        """A call site's sizes, special tokens, and why it may not be grouped."""
        tokens, channels = call.query.shape[-2:]
        key_tokens = call.key.shape[-2]
        is_within = tokens == key_tokens
        special, note = self.special_of(name, is_within)
        places = special_places(special, tokens)
        reason = self.reason_against(name, call, min(tokens, key_tokens) - len(places))
        is_long = is_within and tokens >= self.least_tokens  # apart from its special tokens
        if reason is None or (reason == FEW and is_long and self.special is not None):
            check_places(special, tokens, name)
        return LayerReport(
            name=name,
            choice="dense",
            reason=reason or "",
            heads=call.query.shape[1],
            tokens=tokens,
            channels=channels,
            prefix=len(places),
            note=note,
            call=index,
            key_tokens=key_tokens,
            places=None if places == list(range(len(places))) else places,
            frame=[special.count, special.period] if isinstance(special, FrameTokens) else None,
            sequences=call.query.shape[0],
            least_tokens=max(self.least_tokens, (min(tokens, key_tokens) + 1) // 2),
        )

    def special_of(self, name: str, is_within: bool) -> tuple[SpecialTokens, str]:
        """The special tokens of a call, and a note where neither the user nor the model says."""
        found = count_special_tokens(self.model, name) if self.special is None else self.special
        if not is_within:
            return 0, ""
        if found is None:
            return 0, NO_PREFIX
        return found, ""

    def reason_against(self, name: str, call: Call, patches: int) -> str | None:
        """Why a call with so many patches may not be grouped; None if it may."""
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return first_reason(
            {
                call.reason or "": call.reason is not None,
                PASSED_BY: isinstance(parent, nn.TransformerEncoderLayer),
                FEW: patches < self.least_tokens,
            }
        )

    def finish(self) -> list[Site]:
        """The call sites; modules with many calls, or a varying number, have a single one."""
        joined: dict[tuple[str, int], Site] = {}
        for (name, index), site in self.sites.items():
            counts = self.counts[name]
            is_joined = min(counts) < max(counts) or max(counts) > MOST_SITES
            calls = max(counts) if is_joined else 1
            site.row = replace(site.row, calls=calls, call=0 if is_joined else index)
            key = (name, site.row.call)
            if key in joined:
                join_sites(joined[key], site)
            else:
                joined[key] = site
        sites = list(joined.values())
        for site in sites:
            if any(is_inside(other.row.name, site.row.name) for other in sites):
                site.row = replace(site.row, reason=site.row.reason or NESTED)
                site.settings.clear()
        return sites


def check_places(special: SpecialTokens, tokens: int, name: str) -> None:
    """Reject special tokens outside the sequence, or that are all of it."""
    of_sequence = f"the {tokens} tokens of {name!r}"
    if isinstance(special, FrameTokens):
        if special.period > tokens:
            raise UserError(
                f"special_tokens must have frames of at most {of_sequence}, got {special}"
            )
        return
    if isinstance(special, int):
        if special >= tokens:
            raise UserError(f"special_tokens must be fewer than {of_sequence}, got {special}")
        return
    outside = [place for place in special if place >= tokens]
    if outside:
        raise UserError(
            f"special_tokens must be positions within the sequence, got {outside[0]} for {of_sequence}"
        )


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is inside another one, by their names."""
    return name != outer and contains(outer, name)


def join_sites(site: Site, other: Site) -> None:
    """Merge another call site into this one; they share its settings from now on."""
    if site.row.reason and not other.row.reason:
        site.row = replace(other.row, call=0)
    site.own_ms += other.own_ms
    for kind, measured in other.settings.items():
        if kind in site.settings:
            site.settings[kind].add(measured)
        else:
            site.settings[kind] = measured


def capture(task: Task, progress: Progress) -> Capture:
    """Run the model once over all inputs: outputs, call sites, and what settings cost on a few of
    the inputs.

    It ends after the first input where even a model without attention would hardly be faster.

    Raises:
        UserError: the model fails on the inputs, calls no attention, or returns nothing that has an
            error.
    """
    tracer = Tracer(task.model, task.special_tokens, LEAST_TOKENS)
    measured = measured_places(len(task.items))
    found = Capture()
    model_ms: list[float] = []
    inside_ms: list[float] = []
    for place, item in enumerate(task.items):
        progress.step("original outputs, settings of each call")
        run = TracedRun(tracer, task.error == 0, place in measured)
        ms, raw = timed(partial(run_traced, task, tracer, item, run.answer))
        model_ms.append(ms - run.measuring_ms)
        inside_ms.append(run.own_ms)
        found.paddings.append(run.paddings)
        found.outputs.append(check_outputs(task, raw, run.paddings))
        if task.metric is not None:
            found.raw.append(raw)
        found.bound = bound_of(model_ms, inside_ms)
        if found.bound < LEAST_BOUND:
            found.verdict = (
                f"attention takes too little of the model's time (bound {found.bound:.2f})"
            )
            break
    if found.verdict is None:
        found.metric = task.measure(found.raw)  # before the minutes that the rest takes
    found.sites = tracer.finish()
    for site in found.sites:
        own_ms = sum(site.own_ms) / len(model_ms)
        site.row = replace(site.row, ms_before=own_ms, ms_after=own_ms)
    return found


def measured_places(count: int) -> set[int]:
    """Indices of the inputs used to evaluate settings: a few evenly spaced search inputs."""
    choosing = split_inputs(count)[0]
    number = min(MEASURED_INPUTS, len(choosing))
    return {choosing[at * len(choosing) // number] for at in range(number)}


def split_inputs(count: int) -> tuple[list[int], list[int]]:
    """Split the inputs into search inputs, and one in four held out."""
    held_out = [at for at in range(count) if at % 4 == 1]
    return [at for at in range(count) if at % 4 != 1], held_out


def bound_of(model_ms: list[float], inside_ms: list[float]) -> float:
    """The speedup without any attention, over the inputs so far except the first, which warms up."""
    start = 1 if len(model_ms) > 1 else 0
    whole = sum(model_ms[start:])
    inside = sum(inside_ms[start:])
    return whole / max(whole - inside, 1e-9)


class TracedRun:
    """Runs the original attention in one run of the model, times it, and measures settings in between.

    Args:
        tracer: knows the call sites.
        is_exact: whether no error is allowed.
        is_measured: whether settings are measured in this run.
    """

    def __init__(self, tracer: Tracer, is_exact: bool, is_measured: bool) -> None:
        self.tracer = tracer
        self.is_exact = is_exact
        self.is_measured = is_measured
        self.own_ms = 0.0
        self.measuring_ms = 0.0
        self.paddings: Paddings = {}

    def answer(self, name: str, number: int, call: Call) -> Any:
        """Answer a call of the module of this name."""
        site = self.tracer.site_of(name, number, call)
        ms, output = timed(call.run)
        site.own_ms.append(ms)
        if call.key_mask is not None and call.query.shape[2] == call.key.shape[2]:
            self.paddings[tuple(call.key_mask.shape)] = call.key_mask
        self.own_ms += ms
        if self.is_measured and number < MOST_SITES:
            own = Own(ms, output)
            self.measuring_ms += timed(partial(self.measure, site, call, own))[0]
        return output

    def measure(self, site: Site, call: Call, own: Own) -> None:
        """Measure the settings of a call site."""
        if not site.settings and not site.row.reason:
            site.row = replace(site.row, breadth=breadth(call))
        # without arguments it is of a function that nothing of ours stands for
        if call.arguments is not None and site.row.reason != PASSED_BY:
            measure_call(call, site.row, own, site.settings, self.is_exact)


def run_first(
    tracer: Tracer, item: Any, answer: Callable[[str, int, Call], Any], run: Callable[[], Any]
) -> Any:
    """Run a model for the first time; on failure, report the input it fails on."""
    try:
        with trace_sdpa(tracer.model, answer):
            raw = run()
    except UserError:
        raise
    except CALL_ERRORS as failed:
        raise UserError(
            f"model must accept the inputs, got {describe_item(item)}: {describe_failure(failed)}"
        ) from failed
    if not tracer.sites:
        cause = bypass_in(tracer.model)
        raise UserError(
            "model must call F.scaled_dot_product_attention, "
            f"got a {type(tracer.model).__name__} that does not{f': {cause}' if cause else ''}"
        )
    return raw


def run_traced(
    task: Task, tracer: Tracer, item: Any, answer: Callable[[str, int, Call], Any]
) -> Any:
    """Run a model whose call sites are known."""
    if not tracer.sites:
        return run_first(tracer, item, answer, partial(task.run, item))
    with trace_sdpa(task.model, answer):
        return task.run(item)
