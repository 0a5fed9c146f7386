"""A search for settings: what :func:`dgt.accelerate` was asked for, and what is known of the model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dgt.acceleration.inputs import (
    Inputs,
    call_with,
    check_values,
    copied,
    describe_item,
    outputs_of,
    read_items,
)
from dgt.acceleration.prefix_tokens import FrameTokens, PrefixTokens
from dgt.acceleration.sites import AttentionSite, check_patterns
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import LOGGER, UserError

Forward: TypeAlias = Callable[[nn.Module, Any], Any]

CONFIRMATIONS = 3  # passes over the inputs, at most, to check choices
TRIED_INPUTS = 3  # that settings are measured on
SENSITIVITY_RUNS = 12  # at most, to measure how far errors propagate
SENSITIVITY_CHUNKS = 6  # of neighboring call sites, at least, before more than one input is probed
TIMINGS = 3  # at most, before and after
MOST_GUARDED = 0.25  # of the inputs: if the guard acted on more, it would cost what a choice gains


def tried_inputs(count: int) -> set[int]:
    """Indices of the inputs used to evaluate settings: a few evenly spaced search inputs."""
    chosen_by = split_inputs(count)[0]
    number = min(TRIED_INPUTS, len(chosen_by))
    return {chosen_by[at * len(chosen_by) // number] for at in range(number)}


def split_inputs(count: int) -> tuple[list[int], list[int]]:
    """Split the inputs into search inputs, and one in four held out."""
    held_out = [at for at in range(count) if at % 4 == 1]
    return [at for at in range(count) if at % 4 != 1], held_out


def probed_inputs(count: int) -> tuple[list[int], int]:
    """The inputs on which it is measured how far errors propagate, and into how many chunks call
    sites are divided for it: not more runs than there are inputs.
    """
    chosen_by = split_inputs(count)[0]
    runs = min(SENSITIVITY_RUNS, count)
    number = min(max(1, runs // SENSITIVITY_CHUNKS), len(chosen_by))
    return [chosen_by[at * len(chosen_by) // number] for at in range(number)], runs // number


class Progress:
    """Logs what a search does, and how long it will take at most.

    Args:
        inputs: how many there are.
    """

    def __init__(self, inputs: int) -> None:
        tried = len(tried_inputs(inputs))
        self.planned = {
            "settings of each call": (tried, 3.0),
            "original outputs": (inputs - tried, 1.0),
            "error propagation": (min(SENSITIVITY_RUNS, inputs), 0.7),
            "error of the chosen settings": (
                CONFIRMATIONS * (inputs + int(MOST_GUARDED * inputs)),
                0.6,
            ),
            "speed": (2 * TIMINGS, 0.8),
        }
        """By what is done: how many runs of the model, and how long one takes relative to one of the
        original model, until that is measured.
        """
        self.seconds: dict[str, list[float]] = {name: [] for name in self.planned}
        self.current = ""
        self.start = time.monotonic()

    def step(self, name: str, detail: str = "") -> None:
        """Log the purpose of the next run of the model."""
        now = time.monotonic()
        if self.current:
            self.seconds[self.current].append(now - self.start)
        number = len(self.seconds[name]) + 1
        what = f"{name}{f' from {detail}' if detail else ''}"
        left = f"; at most about {self.seconds_left(name):.0f} s left" if self.current else ""
        LOGGER.info("%s, run %d of at most %d%s", what, number, self.planned[name][0], left)
        self.current = name
        self.start = now

    def seconds_left(self, name: str) -> float:
        """Seconds for this stage and all that come later."""
        stages = list(self.planned)
        first = stages.index(name) if stages.index(name) > 1 else 0  # those two take turns
        units = [
            sum(seconds) / len(seconds) / self.planned[stage][1]
            for stage, seconds in self.seconds.items()
            if seconds
        ]
        left = 0.0
        for stage in stages[first:]:
            runs, relative = self.planned[stage]
            done = self.seconds[stage]
            each = sum(done) / len(done) if done else relative * min(units)
            left += max(runs - len(done), 0) * each
        return left


@dataclass
class Search:
    """The checked arguments of :func:`dgt.accelerate`, what one pass of the original model over the
    inputs showed, and the progress.
    """

    model: nn.Module
    items: list[Any]
    """One per call of the model."""
    error: float
    forward: Forward
    """Returns the tensors whose error counts."""
    compared_output: str
    """Describes these tensors."""
    metric: Callable[[list[Any]], float] | None
    num_prefix_tokens: PrefixTokens | None
    guard: bool
    """Whether accelerated attention checks itself on every input."""
    first_order: bool = True
    """Whether what residual keys lose to first order may be added."""
    approximate: Sequence[str] | None = None
    """Patterns of the modules whose attention may be in groups; None for all."""
    sites: list[AttentionSite] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    """Of the original model, one per input."""
    metric_before: float | None = None
    """The task metric with the original attention."""
    speedup_limit: float = 1.0
    """How many times as fast the model would be if attention took no time."""
    verdict: str = ""
    """Why no speedup is possible, if so."""

    def __post_init__(self) -> None:
        self.progress = Progress(len(self.items))
        self.numbers = {id(item): number for number, item in enumerate(self.items)}

    def run(self, item: Any) -> Any:
        """Call the model with a copy of one item, which is run several times, each time with the same
        random numbers: a model may mask its input at random.
        """
        torch.default_generator.manual_seed(self.numbers[id(item)])
        return self.forward(self.model, copied(item))

    def compute_metric(self, outputs: list[Any]) -> float | None:
        """The task metric of what forward returned; None where there is none.

        Raises:
            UserError: it is no number.
        """
        if self.metric is None:
            return None
        figure = self.metric(outputs)
        try:
            return float(figure)
        except (TypeError, ValueError, RuntimeError) as failed:
            raise UserError(f"metric must return a number, got {describe_item(figure)}") from failed


def read_search(
    model: nn.Module,
    inputs: Inputs,
    error: float,
    *,
    forward: Forward | None = None,
    metric: Callable[[list[Any]], float] | None = None,
    num_prefix_tokens: PrefixTokens | None = None,
    guard: bool = True,
    first_order: bool = True,
    approximate: str | Sequence[str] | None = None,
) -> Search:
    """Check the arguments of :func:`dgt.accelerate`. Raises as it does."""
    check_model(model)
    items = read_items(inputs)
    check_values(items)
    if len(items) < 2:
        raise UserError(
            "inputs must be at least 2, some to choose settings and some to check them, "
            f"got {len(items)}"
        )
    check_error(error)
    for name, flag in (("guard", guard), ("first_order", first_order)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {describe(flag)}")
    forward, compared_output = read_forward(model, forward, metric)
    prefix = check_prefix_tokens(num_prefix_tokens)
    return Search(
        model=model,
        items=items,
        error=float(error),
        forward=forward,
        compared_output=compared_output,
        metric=metric,
        num_prefix_tokens=prefix,
        guard=guard,
        first_order=first_order,
        approximate=check_approximate(model, approximate, error),
    )


def read_forward(
    model: nn.Module, forward: Forward | None, metric: Callable[[list[Any]], float] | None
) -> tuple[Forward, str]:
    """Check both functions. Returns the one that calls the model, and a description of what it
    returns.
    """
    for name, function in (("forward", forward), ("metric", metric)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {describe(function)}")
    if forward is None:
        return default_forward(model)
    return forward, "the output of forward"


def check_error(error: float) -> None:
    """Reject an error that is no relative error."""
    if isinstance(error, bool) or not isinstance(error, float | int) or not 0 <= error < 1:
        raise UserError(f"error must be at least 0 and below 1, got {error!r}")


def check_approximate(
    model: nn.Module, approximate: str | Sequence[str] | None, error: float
) -> list[str] | None:
    """Check patterns of modules. Returns them as a list; None where all attention may be approximated."""
    if approximate is None:
        return None
    patterns = [approximate] if isinstance(approximate, str) else approximate
    is_list = isinstance(patterns, Sequence) and len(patterns) > 0
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"approximate must be a pattern of module names, or several, got {describe(approximate)}"
        )
    if error == 0:
        raise UserError(f"approximate must be None where error is 0, got {approximate!r}")
    check_patterns(patterns, dict(model.named_modules()), "modules of the model")
    return list(patterns)


def check_model(model: nn.Module) -> None:
    """Reject a model that is not a module or can no longer be accelerated."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError("model must be no TorchScript yet: trace it after accelerate")
        is_wrapped = type(module).__name__ == "OptimizedModule"  # torch.compile(model)
        # By `model.compile()`.
        is_compiled_in_place = vars(module).get("_compiled_call_impl") is not None
        if is_wrapped or is_compiled_in_place:
            raise UserError("model must not be compiled yet: call torch.compile after accelerate")


def check_prefix_tokens(prefix: PrefixTokens | None) -> PrefixTokens | None:
    """Check how many prefix tokens there are, or where."""
    if prefix is None:
        return None
    if isinstance(prefix, FrameTokens):
        check_count("num_prefix_tokens.count", prefix.count, least=0)
        check_count("num_prefix_tokens.period", prefix.period)
        if prefix.count > prefix.period:
            raise UserError(
                f"num_prefix_tokens must be fewer than the tokens per frame, got {prefix}"
            )
        return prefix
    if isinstance(prefix, Sequence) and not isinstance(prefix, str):
        for position in prefix:
            check_count("num_prefix_tokens", position, least=0)
        if len(set(prefix)) < len(prefix):
            raise UserError("num_prefix_tokens must not repeat a position")
        return sorted(prefix)
    check_count("num_prefix_tokens", prefix, least=0)
    return prefix


def check_outputs(search: Search, raw: Any) -> list[Tensor]:
    """The outputs to compare; rejected if there are none, or if they are not finite."""
    outputs = outputs_of(raw)
    name = "model" if search.forward is _call_model else "forward"
    if not outputs:
        raise UserError(f"{name} must return floating point tensors, got {describe_item(raw)}")
    if not all(tensor.isfinite().all() for tensor in outputs):
        raise UserError(f"{name} must return tensors without NaN or infinities")
    return outputs


def default_forward(model: nn.Module) -> tuple[Forward, str]:
    """The forward function: the model itself, or the tokens of a timm model without a head; and a description."""
    features = getattr(model, "forward_features", None)
    if callable(features) and getattr(model, "num_classes", None) == 0:
        return _call_features, "all tokens of forward_features"
    return _call_model, "the model's output"


def _call_features(model: Any, item: Any) -> Any:
    return call_with(model.forward_features, item)


def _call_model(model: nn.Module, item: Any) -> Any:
    return call_with(model, item)
