"""The inputs of a model, one item a call, and the tensors that it returns."""

import copy
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, TypeAlias

from torch import Tensor

from dgt.ops.checks import describe
from dgt.utils.errors import UserError

Inputs: TypeAlias = Tensor | Mapping[str, Any] | Sequence[Any]
"""Images (N, ...), arguments by name whose tensors are all (N, ...), or a sequence with one item per call.
"""

MAX_MESSAGE = 300  # characters of an error that a model raised
CALL_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def read_items(inputs: Inputs) -> list[Any]:
    """Split inputs into items, one per call of the model. Raises as :func:`dgt.accelerate`."""
    if isinstance(inputs, Tensor) and inputs.dim() >= 2:
        return [inputs[at : at + 1] for at in range(len(inputs))]
    if isinstance(inputs, Mapping):
        first = next((part for part in inputs.values() if isinstance(part, Tensor)), None)
        if first is not None and first.dim() >= 2:
            check_lengths(inputs, len(first))
            return [take_item(inputs, at) for at in range(len(first))]
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
    for number, item in enumerate(items):
        if structure(item) != structure(items[0]):
            raise UserError(
                f"inputs must all have the structure of the first one, {describe_item(items[0])}, "
                f"but number {number} is {describe_item(item)}"
            )


def check_lengths(inputs: Mapping[str, Any], count: int) -> None:
    """Reject tensors that are not as long as there are inputs, or in lists, and anything else that is as
    long: nothing says whose they are.
    """
    for name, part in inputs.items():
        is_unclear = len(part) != count if is_split(part) else not is_single(part, count)
        if is_unclear:
            raise UserError(
                f"inputs must be tensors ({count}, ...), as the first of them is, but {name!r} is "
                f"{describe_item(part)}: pass a sequence with a mapping per call"
            )


def take_item(inputs: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Arguments by name for one input: its part of every tensor, and all else as it is."""
    return {name: part[at : at + 1] if is_split(part) else part for name, part in inputs.items()}


def is_single(part: Any, count: int) -> bool:
    """Whether an argument is the same for so many inputs: a number, also as a tensor, a text, or what has
    neither tensors nor one part an input.
    """
    if isinstance(part, Tensor | str) or not isinstance(part, Sized):
        return True
    return len(part) != count and not tensors_of(part)


def is_split(part: Any) -> bool:
    """Whether an argument has a part for every input."""
    return isinstance(part, Tensor) and part.dim() > 0


def check_values(items: list[Any]) -> None:
    """Reject tensors on the meta device, which have no values."""
    for tensor in (tensor for item in items[:1] for tensor in tensors_of(item)):
        if tensor.is_meta:
            raise TypeError(f"inputs must not be empty, got {describe(tensor)}")


def copied(item: Any) -> Any:
    """A copy of an item, whose tensors are copies, too: a model may change in place what it is called with."""
    return copy.deepcopy(item, {id(tensor): tensor.clone() for tensor in tensors_of(item)})


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


def outputs_of(output: Any) -> list[Tensor]:
    """All floating point tensors of what a model returns, as float32."""
    tensors = tensors_of(output)
    return [tensor.detach().float() for tensor in tensors if tensor.is_floating_point()]


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
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
