"""The calls of ``F.scaled_dot_product_attention`` in any model: finding them, and answering them with groups.

timm's, Hugging Face's and most people's attention ends in this one function, whatever comes before it (norms of query
and key, rotary positions, biases). So the call is replaced and the module around it stays what it is, with its weights
under their names.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dgt.ops import dynamic_group_attention, find_centroids

STEPS = 1  # of k-means on the image at hand, before its queries are grouped
CHILD = "dgt_groups"  # the name under which a module holds what answers its call


class Call(NamedTuple):
    """One call: its operands, (B, H, L, D), and why groups cannot answer it, if they cannot."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    reason: str | None


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """Read the arguments of ``F.scaled_dot_product_attention``; ``enable_gqa`` needs no word, heads tell."""
    reason = None
    if attn_mask is not None:
        reason = "a mask or bias of pairs"
    elif is_causal:
        reason = "causal"
    elif dropout_p > 0:
        reason = "dropout of the attention"
    elif query.dim() != 4:
        reason = f"{query.dim()} dimensions instead of 4"
    elif query.shape[2] != key.shape[2]:
        reason = "queries and keys are of different tokens"
    elif query.shape[0] != key.shape[0]:
        reason = "queries and keys are of different batches"
    elif value.shape != key.shape:
        reason = "values of another width than keys"
    return Call(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, reason)


class Intercept(TorchFunctionMode):
    """While it is entered, ``answer(call)`` is asked first; where it returns None the function runs as ever."""

    def __init__(self, answer: Callable[[Call], Tensor | None]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            answer = self.answer(read_call(*args, **kwargs))
            if answer is not None:
                return answer
        return func(*args, **kwargs)


@contextlib.contextmanager
def watch_calls(model: nn.Module, answer: Callable[[str, Call], Tensor | None]) -> Iterator[None]:
    """While it is entered, ``answer`` is asked for every call, with the name of the innermost module that makes it."""
    inside: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True))
    try:
        with Intercept(lambda call: answer(inside[-1] if inside else "", call)):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class GroupedCall(nn.Module):
    """Answers the one call of a module: groups of queries, the best keys of each, and what these leave out.

    Args:
        centroids: (H, G, D), unit norm. They are no part of the state dict: the weights stay the model's own.
        top_k: keys of every group.
        num_prefix_tokens: tokens of no group, at the beginning.
        least_tokens: shorter sequences are attended to densely: there groups were not found faster.
    """

    centroids: Tensor

    def __init__(self, centroids: Tensor, top_k: int, num_prefix_tokens: int, least_tokens: int) -> None:
        super().__init__()
        self.register_buffer("centroids", centroids, persistent=False)
        self.top_k, self.num_prefix_tokens, self.least_tokens = top_k, num_prefix_tokens, least_tokens
        self.exact = False
        self.patched: Callable[..., Any] | None = None  # the forward that somebody had given the module before

    def forward(self, call: Call) -> Tensor | None:
        """The attention's output, (B, H, L, D); None where the call is to run as ever."""
        if self.exact or call.reason is not None or call.query.shape[2] < self.least_tokens:
            return None
        query, key, value = call[:3]
        device = query.device.type
        if query.dtype != torch.float64 and torch.is_autocast_enabled(device):  # which casts for the function
            query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in call[:3])
        centroids = find_centroids(query[:, :, self.num_prefix_tokens :], self.centroids, STEPS)
        return dynamic_group_attention(
            query, key, value, centroids, self.top_k, call.scale,
            num_prefix_tokens=self.num_prefix_tokens, remainder=True,
        ).output  # fmt: skip

    def extra_repr(self) -> str:
        heads, groups, channels = self.centroids.shape
        return f"heads={heads}, groups={groups}, channels={channels}, top_k={self.top_k}"


def install(module: nn.Module, grouped: GroupedCall) -> None:
    """Have a module's call answered by groups from now on."""
    grouped.patched = vars(module).get("forward")
    module.add_module(CHILD, grouped.train(module.training))
    module.forward = partial(_forward_in_groups, module)  # what can be pickled, unlike a method of another class


def uninstall_all(model: nn.Module) -> None:
    """Make a model what it was before any :func:`install`."""
    for name in grouped_calls(model):
        module = model.get_submodule(name)
        patched = getattr(module, CHILD).patched
        delattr(module, CHILD)
        del module.forward
        if patched is not None:
            module.forward = patched


def _forward_in_groups(module: Any, *arguments: Any, **named: Any) -> Any:
    grouped = getattr(module, CHILD)
    with Intercept(grouped):
        if grouped.patched is not None:
            return grouped.patched(*arguments, **named)
        return type(module).forward(module, *arguments, **named)


def grouped_calls(model: nn.Module) -> dict[str, GroupedCall]:
    """What answers the calls of a model, by the name of the module."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedCall))
    return {name.removesuffix(CHILD).removesuffix("."): module for name, module in found}


@contextlib.contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Run an accelerated model with its own attention while this is entered: ``with dgt.exact_attention(model):``."""
    calls = grouped_calls(model).values()
    before = [call.exact for call in calls]
    for call in calls:
        call.exact = True
    try:
        yield
    finally:
        for call, exact in zip(calls, before, strict=True):
            call.exact = exact
