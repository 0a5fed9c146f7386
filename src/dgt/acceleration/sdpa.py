"""The calls of ``F.scaled_dot_product_attention`` in any model: finding them, and answering them with groups.

timm's, Hugging Face's and most people's attention ends in this one function, whatever comes before it (norms of query
and key, rotary positions, biases). So the call is replaced and the module around it stays what it is, with its weights
under their names. ``nn.MultiheadAttention`` (torchvision's and open_clip's ViT) calls it out of sight, so that there
the function around it is read instead, ``F.multi_head_attention_forward``.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dgt.layers.centroids import CentroidState
from dgt.ops import DynamicGroupAttentionOutput, dynamic_group_attention, find_centroids

STEPS = 1  # of k-means on the image at hand, before its queries are grouped
CHILD = "dgt_groups"  # the name under which a module holds what answers its call
watched: list[nn.Module] = []  # models whose calls are being looked at


class Call(NamedTuple):
    """One call: its operands, (B, H, L, D), why groups cannot answer it, if they cannot, and the call itself."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    reason: str | None
    run: Callable[[], Any]

    def first(self, count: int) -> "Call":
        """The same of the first images."""
        query, key, value = (part[:count] for part in self[:3])
        return read_call(query, key, value, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1])


def why_not(reasons: dict[str, bool]) -> str | None:
    """The first reason that applies."""
    return next((reason for reason, applies in reasons.items() if applies), None)


def read_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Call:  # fmt: skip
    """Read the arguments of ``F.scaled_dot_product_attention``; ``enable_gqa`` needs no word, heads tell."""
    reason = why_not({
        "a mask or bias of pairs": attn_mask is not None,
        "causal": is_causal,
        "dropout of the attention": dropout_p > 0,
        f"{query.dim()} dimensions instead of 4": query.dim() != 4,
        "queries and keys are of different tokens": query.shape[-2] != key.shape[-2],
        "queries and keys are of different batches": query.shape[0] != key.shape[0],
        "values of another width than keys": value.shape != key.shape,
    })  # fmt: skip
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    run = partial(F.scaled_dot_product_attention, query, key, value, attn_mask, **options)
    return Call(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, reason, run)


def read_multi_head(*operands: Any, **named: Any) -> tuple[Call, Callable[[Any], Any]]:
    """Read the arguments of ``F.multi_head_attention_forward``, (L, B, C), and what makes its output of an answer.

    Where groups cannot answer it, the call's operands are not projected, only their sizes are right, and the call
    itself is that of the whole function, whose output its answer is.
    """
    query, key, value, _, heads, weight, bias, bias_k, _, add_zero_attn, dropout_p, *output = operands
    reason = why_not({
        "queries and keys are of different tokens": query.shape[0] != key.shape[0],
        "a mask or bias of pairs": any(named.get(mask) is not None for mask in ("attn_mask", "key_padding_mask")),
        "its weights are asked for": named.get("need_weights", True),
        "dropout of the attention": named.get("training", True) and dropout_p > 0,
        "keys added, or projected apart": bias_k is not None or add_zero_attn or weight is None,
    })  # fmt: skip
    parts = [query, query, query]
    if reason is None and weight is not None:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        parts = [F.linear(*three) for three in zip((query, key, value), weight.chunk(3), biases, strict=True)]
    parts = [part if part.dim() == 3 else part[:, None] for part in parts]  # without batches: one image
    call = read_call(*(part.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for part in parts))

    def finish(answer: Tensor) -> tuple[Tensor, None]:
        joined = answer.permute(2, 0, 1, 3).flatten(2)
        return F.linear(joined if query.dim() == 3 else joined[:, 0], *output), None

    if reason is None:
        return call, finish
    whole = partial(F.multi_head_attention_forward, *operands, **named)
    return call._replace(reason=reason, run=whole), lambda output: output


class Intercept(TorchFunctionMode):
    """While it is entered, ``answer(call)`` is asked first; where it returns None the function runs as ever."""

    def __init__(self, answer: Callable[[Call], Tensor | None]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if (answer := self.answer(read_call(*args, **kwargs))) is not None:
                return answer
        elif func is F.multi_head_attention_forward:
            call, finish = read_multi_head(*args, **kwargs)
            if (answer := self.answer(call)) is not None:
                return finish(answer)
        return func(*args, **kwargs)


@contextlib.contextmanager
def watch_calls(model: nn.Module, answer: Callable[[str, Call], Tensor | None]) -> Iterator[None]:
    """While it is entered, ``answer`` is asked for every call, with the name of the innermost module that makes it."""
    inside, hooks = list[str](), list[Any]()

    def leave(*_: Any) -> None:  # nothing is to be returned: it would be the module's output
        inside.pop()

    watched.append(model)
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Intercept(lambda call: answer(inside[-1] if inside else "", call)):
            yield
    finally:
        watched.pop()
        for hook in hooks:
            hook.remove()


def attend_in_groups(call: Call, centroids: Tensor, top_k: int, prefix: int, steps: int) -> DynamicGroupAttentionOutput:
    """A call's output, (B, H, L, D), by groups around centroids that a few steps of k-means move to its queries."""
    query, key, value = call[:3]
    device = query.device.type
    if query.dtype != torch.float64 and torch.is_autocast_enabled(device):  # which casts for the function
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in call[:3])
    own = find_centroids(query[:, :, prefix:], centroids, steps)
    return dynamic_group_attention(query, key, value, own, top_k, call.scale, num_prefix_tokens=prefix, remainder=True)


class GroupedCall(CentroidState):
    """Answers the one call of a module: groups of queries, the best keys of each, and what these leave out.

    While the module is trained its centroids move as those of :class:`dgt.DGAttention` do, by Eqs. 3-4.

    Args:
        centroids: (H, G, D), unit norm. They are no part of the state dict: the weights stay the model's own.
        top_k: keys of every group.
        num_prefix_tokens: tokens of no group, at the beginning.
        least_tokens: shorter sequences are attended to densely: there groups were not found faster.
    """

    def __init__(self, centroids: Tensor, top_k: int, num_prefix_tokens: int, least_tokens: int) -> None:
        super().__init__()
        self.init_centroids(centroids.shape, None, "old", centroids.device, saved=False)
        self.centroids.copy_(centroids)
        self.seeded = True
        self.top_k, self.num_prefix_tokens, self.least_tokens = top_k, num_prefix_tokens, least_tokens
        self.exact = False
        self.patched: Callable[..., Any] | None = None  # the forward that somebody had given the module before
        self.owner: tuple[nn.Module, ...] = ()  # the module, which is none of this one's parts

    def forward(self, call: Call) -> Tensor | None:
        """The attention's output, (B, H, L, D); None where the call is to run as ever."""
        if call.reason is not None or call.query.shape[2] < self.least_tokens:
            return None
        found = attend_in_groups(call, self.unit_centroids(), self.top_k, self.num_prefix_tokens, STEPS)
        if self.training:
            self.observe(call.query, found.group_ids, "auto")
        return found.output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the module: the centroids move with the steps of their optimizer."""
        return (parameter for owner in self.owner for parameter in owner.parameters(recurse))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "exact": False})  # exact_attention, in which a copy is made, ends without it

    def extra_repr(self) -> str:
        return f"(heads, groups, channels)={tuple(self.centroids.shape)}, top_k={self.top_k}"


def install(module: nn.Module, grouped: GroupedCall) -> None:
    """Have a module's call answered by groups from now on."""
    grouped.patched, grouped.owner = vars(module).get("forward"), (module,)
    module.add_module(CHILD, grouped.train(module.training))
    module.forward = partial(_forward_in_groups, module)  # what can be pickled, unlike a method of another class


def uninstall_all(model: nn.Module) -> None:
    """Make a model what it was before any :func:`install`."""
    for name, grouped in grouped_calls(model).items():
        module = model.get_submodule(name)
        delattr(module, CHILD)
        del module.forward
        if grouped.patched is not None:
            module.forward = grouped.patched


def _forward_in_groups(module: Any, *arguments: Any, **named: Any) -> Any:
    grouped = getattr(module, CHILD)
    forward = grouped.patched or partial(type(module).forward, module)
    with contextlib.nullcontext() if grouped.exact else Intercept(grouped):
        return forward(*arguments, **named)


def grouped_calls(model: nn.Module) -> dict[str, GroupedCall]:
    """What answers the calls of a model, by the name of the module."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedCall))
    return {name.removesuffix(CHILD).removesuffix("."): module for name, module in found}


@contextlib.contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Run an accelerated model with its own attention while this is entered: ``with dgt.exact_attention(model):``."""
    before = {call: call.exact for call in grouped_calls(model).values()}
    for call in before:
        call.exact = True
    try:
        yield
    finally:
        for call, exact in before.items():
            call.exact = exact


def timed(work: Callable[[], Any], rounds: int = 1) -> tuple[float, Any]:
    """How many ms it takes at least, and what it returns."""
    from torch.utils.benchmark import timer  # waits for a GPU; only here, for it loads torch's compilers

    times = []
    for _ in range(rounds):
        start, output = timer(), work()
        times.append(1000 * (timer() - start))
    return min(times), output


def time_calls(model: nn.Module, run: Callable[[], Any], exact: bool) -> tuple[float, dict[str, float]]:
    """Time ``run()``, which calls the model, and each layer's attention in it, its own if ``exact``, in ms."""
    times, grouped = defaultdict[str, float](float), {} if exact else grouped_calls(model)

    def answer(name: str, call: Call) -> Any:
        spent, output = timed(partial(grouped[name], call) if name in grouped else call.run)
        times[name] += spent
        return output

    with exact_attention(model), watch_calls(model, answer):
        return timed(run)[0], times


def in_turns(model: nn.Module, run: Callable[[], Any], rounds: int) -> list[tuple[float, dict[str, float]]]:
    """The fastest of some runs with the model's own attention, and of those as it is accelerated, in turns."""
    turns = [[time_calls(model, run, exact) for exact in (True, False)] for _ in range(rounds)]
    return [min(runs, key=lambda run: run[0]) for runs in zip(*turns, strict=True)]
