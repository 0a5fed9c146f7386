"""The task of an acceleration: a model, its inputs, and the outputs to compare."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from dgt.acceleration.intercept import installed_processors
from dgt.acceleration.special_tokens import FrameTokens, SpecialTokens
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import LOGGER, UserError

Inputs: TypeAlias = Tensor | Mapping[str, Any] | Sequence[Any]
"""Images (N, ...), arguments by name whose tensors are as long as the first, or a sequence with one item per call.
"""
Forward: TypeAlias = Callable[[nn.Module, Any], Any]
Paddings: TypeAlias = dict[tuple[int, ...], Tensor]
"""Masks of keys, bool (B, S), True where a token is real, by their shape."""

CONFIRMATIONS = 3  # passes over the inputs to check choices
PASSES = 2 + CONFIRMATIONS + 1  # over the inputs, at most
WORDS = 300  # most characters of an error that a model raised
CALL_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass
class Task:
    """The checked arguments of :func:`dgt.accelerate`, and the progress of what they ask for."""

    model: nn.Module
    items: list[Any]
    """One per call of the model."""
    error: float
    forward: Forward
    """Returns the tensors whose error counts."""
    measured: str
    """Describes these tensors."""
    metric: Callable[[list[Any]], float] | None
    special_tokens: SpecialTokens | None
    done: int = 0
    """How often the model was run."""
    start: float = field(default_factory=time.monotonic)

    def step(self, work: str) -> None:
        """Log the purpose of the next run of the model."""
        total = PASSES * len(self.items)
        left = ""
        if self.done:
            seconds = (time.monotonic() - self.start) * (total / self.done - 1)
            left = f"; at most about {max(seconds, 0):.0f} s left"
        self.done += 1
        LOGGER.info("run %d of %d: %s%s", self.done, total, work, left)

    def run(self, item: Any) -> Any:
        """Call the model with one item."""
        return self.forward(self.model, item)

    def measure(self, outputs: list[Any]) -> float | None:
        """The task's own figure for what forward returned; None where there is no metric.

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


def read_task(
    model: nn.Module,
    inputs: Inputs,
    error: float,
    forward: Forward | None,
    metric: Callable[[list[Any]], float] | None,
    special_tokens: SpecialTokens | None,
) -> Task:
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
    special = check_special_tokens(special_tokens)
    return Task(model, items, float(error), forward, measured, metric, special)


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


def read_items(inputs: Inputs) -> list[Any]:
    """Split inputs into items, one per call of the model. Raises as :func:`dgt.accelerate`."""
    if isinstance(inputs, Tensor) and inputs.dim() >= 2:
        return [inputs[at : at + 1] for at in range(len(inputs))]
    if isinstance(inputs, Mapping):
        first = next((part for part in inputs.values() if isinstance(part, Tensor)), None)
        if first is not None and first.dim() >= 2:
            return [take_item(inputs, at, len(first)) for at in range(len(first))]
    elif is_sequence_of_items(inputs):
        items = list(inputs)
        check_structure(items)
        return items
    raise TypeError(
        "inputs must be a tensor (N, ...), a mapping from names to such tensors, or a sequence "
        f"with a tensor, mapping or tuple per call, got {describe_item(inputs)}"
    )


def is_sequence_of_items(inputs: Any) -> bool:
    """Whether this is a sequence of items that a model can be called with."""
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        return False
    return all(isinstance(item, Tensor | Mapping | tuple | list) for item in inputs)


def check_structure(items: list[Any]) -> None:
    """Reject items that differ in more than sizes and values."""
    for place, item in enumerate(items):
        if structure(item) != structure(items[0]):
            raise UserError(
                f"inputs must all have the structure of the first one, {describe_item(items[0])}, "
                f"but number {place} is {describe_item(item)}"
            )


def take_item(inputs: Mapping[str, Any], at: int, count: int) -> dict[str, Any]:
    """Arguments by name for one input: its part of every tensor that is as long as there are
    inputs.
    """
    item = {}
    for name, part in inputs.items():
        is_split = isinstance(part, Tensor) and part.dim() > 0 and len(part) == count
        item[name] = part[at : at + 1] if is_split else part
    return item


def check_values(items: list[Any]) -> None:
    """Reject tensors on the meta device, which have no values."""
    for tensor in (tensor for item in items[:1] for tensor in tensors_of(item)):
        if tensor.is_meta:
            raise TypeError(f"inputs must not be empty, got {describe(tensor)}")


def check_special_tokens(special: SpecialTokens | None) -> SpecialTokens | None:
    """Check how many special tokens there are, or where."""
    if special is None:
        return None
    if isinstance(special, FrameTokens):
        check_count("special_tokens.count", special.count, least=0)
        check_count("special_tokens.period", special.period)
        if special.count > special.period:
            raise UserError(
                f"special_tokens must be fewer than the tokens per frame, got {special}"
            )
        return special
    if isinstance(special, Sequence) and not isinstance(special, str):
        for place in special:
            check_count("special_tokens", place, least=0)
        if len(set(special)) < len(special):
            raise UserError("special_tokens must not repeat a position")
        return sorted(special)
    check_count("special_tokens", special, least=0)
    return special


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


def call_with(function: Callable[..., Any], item: Any) -> Any:
    """Call a function with an item: a tensor, arguments by name, or arguments in their order."""
    if isinstance(item, Mapping):
        return function(**item)
    if isinstance(item, tuple | list):
        return function(*item)
    return function(item)


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors in tuples, lists and mappings inside each other."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []


def outputs_of(output: Any, paddings: Paddings) -> list[Tensor]:
    """All floating point tensors of what a model returns, as float32, without the places that are
    padding.
    """
    found = []
    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            padding = paddings.get(tuple(tensor.shape[:2]))
            found.append((tensor if padding is None else tensor[padding]).detach().float())
    return found


def check_outputs(task: Task, raw: Any, paddings: Paddings) -> list[Tensor]:
    """The outputs to compare; rejected if there are none, or if they are not finite."""
    outputs = outputs_of(raw, paddings)
    name = "model" if task.forward is _call_model else "forward"
    if not outputs:
        raise UserError(f"{name} must return floating point tensors, got {describe_item(raw)}")
    if not all(tensor.isfinite().all() for tensor in outputs):
        raise UserError(f"{name} must return tensors without NaN or infinities")
    return outputs


def structure(item: Any) -> Any:
    """The structure that all items must share: nesting, names, types, and numbers of dimensions."""
    if isinstance(item, Tensor):
        return ("tensor", item.dim(), item.is_floating_point())
    if isinstance(item, Mapping):
        return ("mapping", {name: structure(value) for name, value in item.items()})
    if isinstance(item, list | tuple) and tensors_of(item):
        return ("sequence", [structure(value) for value in item])
    return type(item).__name__  # numbers may be of any count


def describe_item(item: Any, depth: int = 2) -> str:
    """A description of an item without the values of tensors."""
    if isinstance(item, Tensor):
        return describe(item)
    if isinstance(item, Mapping) and depth:
        parts = [
            f"{name}: {describe_item(value, depth - 1)}" for name, value in list(item.items())[:4]
        ]
        more = ", ..." if len(item) > 4 else ""
        return f"{{{', '.join(parts)}{more}}}"
    if isinstance(item, list | tuple) and depth:
        parts = [describe_item(value, depth - 1) for value in item[:4]]
        more = ", ..." if len(item) > 4 else ""
        return f"[{', '.join(parts)}{more}]"
    if isinstance(item, Mapping | list | tuple):
        return f"a {type(item).__name__} of {len(item)}"
    return describe(item)


def describe_failure(failed: BaseException) -> str:
    """A model's error message for inputs it fails on, without the values of tensors."""
    text = str(failed).partition("tensor(")[0].strip()
    return text if len(text) <= WORDS else f"{text[:WORDS]}..."
