"""A search for settings: what :func:`dgt.accelerate` was asked for, and what is known of the model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from dgt.acceleration.inputs import (
    Inputs,
    Paddings,
    call_with,
    check_values,
    describe_item,
    outputs_of,
    read_items,
)
from dgt.acceleration.intercept import installed_processors
from dgt.acceleration.prefix_tokens import FrameTokens, PrefixTokens
from dgt.acceleration.sites import AttentionSite
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import LOGGER, UserError

Forward: TypeAlias = Callable[[nn.Module, Any], Any]

CONFIRMATIONS = 3  # passes over the inputs to check choices
PASSES = 2 + CONFIRMATIONS + 1  # over the inputs, at most


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
    measured: str
    """Describes these tensors."""
    metric: Callable[[list[Any]], float] | None
    num_prefix_tokens: PrefixTokens | None
    sites: list[AttentionSite] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    """Of the original model, one per input."""
    paddings: list[Paddings] = field(default_factory=list)
    """The padding masks that attention was called with, for every input."""
    metric_before: float | None = None
    """The task metric with the original attention."""
    bound: float = 1.0
    """How many times as fast the model would be if attention took no time."""
    verdict: str = ""
    """Why no speedup is possible, if so."""
    num_runs: int = 0
    """How often the model was run."""
    start: float = field(default_factory=time.monotonic)

    def step(self, work: str) -> None:
        """Log the purpose of the next run of the model."""
        total = PASSES * len(self.items)
        left = ""
        if self.num_runs:
            seconds = (time.monotonic() - self.start) * (total / self.num_runs - 1)
            left = f"; at most about {max(seconds, 0):.0f} s left"
        self.num_runs += 1
        LOGGER.info("run %d of %d: %s%s", self.num_runs, total, work, left)

    def run(self, item: Any) -> Any:
        """Call the model with one item."""
        return self.forward(self.model, item)

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
    forward: Forward | None,
    metric: Callable[[list[Any]], float] | None,
    num_prefix_tokens: PrefixTokens | None,
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
    if isinstance(error, bool) or not isinstance(error, float | int) or not 0 <= error < 1:
        raise UserError(f"error must be at least 0 and below 1, got {error!r}")
    for name, function in (("forward", forward), ("metric", metric)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {describe(function)}")
    measured = "the output of forward"
    if forward is None:
        forward, measured = default_forward(model)
    prefix = check_prefix_tokens(num_prefix_tokens)
    return Search(model, items, float(error), forward, measured, metric, prefix)


def check_model(model: nn.Module) -> None:
    """Reject a model that is not a module or can no longer be accelerated."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    if installed_processors(model):
        raise UserError(
            "model must not be accelerated already: pass a fresh model, or use apply_plan"
        )
    for module in model.modules():
        is_wrapped = type(module).__name__ == "OptimizedModule"  # torch.compile(model)
        is_compiled_in_place = (
            vars(module).get("_compiled_call_impl") is not None
        )  # model.compile()
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


def check_outputs(search: Search, raw: Any, paddings: Paddings) -> list[Tensor]:
    """The outputs to compare; rejected if there are none, or if they are not finite."""
    outputs = outputs_of(raw, paddings)
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
