"""An attention put into a model, as a module in another one's place or as an answer to its calls,
and out again.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from dgt.swap.sdpa import Call, SDPAInterceptMode

CHILD = "dgt_groups"  # the name under which a module holds what answers its calls


class CallAnswer(nn.Module):
    """What answers the attention calls of a module that it is installed in; it has no weights.

    A subclass defines ``forward(call)``, which returns the output of the shape ``call.shape``, or
    None where the call is to run as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exact = False
        """Whether the module has its own attention back."""
        self.patched: Any = None
        """The forward that somebody had given the module before; None for that of its class."""

    def forward(self, call: Call) -> Tensor | None:
        """Answer a call."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(
            {**state, "exact": False}
        )  # a copy made in exact_attention ends without it


def install_answer(module: nn.Module, answer: CallAnswer) -> None:
    """Have a module's attention calls answered from now on."""
    answer.patched = vars(module).get("forward")
    module.add_module(CHILD, answer.train(module.training))
    module.forward = partial(
        _forward_with_answer, module
    )  # can be pickled, unlike a method of another class


def uninstall_answers(model: nn.Module) -> None:
    """Make a model what it was before any :func:`install_answer`."""
    for name, answer in installed_answers(model).items():
        module = model.get_submodule(name)
        delattr(module, CHILD)
        del module.forward
        if answer.patched is not None:
            module.forward = answer.patched


def _forward_with_answer(module: Any, *arguments: Any, **named: Any) -> Any:
    answer = getattr(module, CHILD)
    forward = answer.patched or partial(type(module).forward, module)
    with contextlib.nullcontext() if answer.exact else SDPAInterceptMode(answer):
        return forward(*arguments, **named)


def has_answer(module: nn.Module) -> bool:
    """Whether something answers a module's own calls."""
    return hasattr(module, CHILD)


def installed_answers(model: nn.Module) -> dict[str, CallAnswer]:
    """What answers the calls of a model, by the name of the module that makes them."""
    found = [
        (name, module) for name, module in model.named_modules() if isinstance(module, CallAnswer)
    ]
    return {name.removesuffix(CHILD).removesuffix("."): module for name, module in found}


def replace_modules(model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Put modules in the places of others, by name."""
    for name, replacement in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)


@contextlib.contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Run an accelerated model with its own attention while this is entered.

    Args:
        model: after :func:`dgt.accelerate` or :func:`dgt.apply_plan`.

    Returns:
        A context manager.

    Example:
        >>> with dgt.exact_attention(model):
        ...     before = model(images)
    """
    before: dict[CallAnswer, bool] = {}
    for answer in installed_answers(model).values():
        before[answer] = answer.exact
        answer.exact = True
    try:
        yield
    finally:
        for answer, exact in before.items():
            answer.exact = exact
