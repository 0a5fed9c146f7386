"""Exact attention at once: the native dense kernel at shapes where it is faster than PyTorch's on this
processor, which is timed at the first call of a shape; and the modules that call attention, by their
code.
"""

import inspect
import math
import statistics
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from time import perf_counter as timer
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from dgt.acceleration.bypass import bypass_at, bypass_in
from dgt.acceleration.calls import SDPA, Call, is_graph_kept
from dgt.acceleration.intercept import original_class
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import PASSED_BY, AttentionSite, Measurement, is_inside
from dgt.ops import dense_attention
from dgt.ops.dense import is_native
from dgt.utils.errors import UserError

EXACT_GAIN = 0.97  # of the time of PyTorch's attention, that ours must be below: it costs no error
SECONDS = 0.6  # of timing a shape, beside the least pairs
LEAST_PAIRS = 3  # of PyTorch's attention and ours, of which the first warms up
PAIRS = 15  # at most
MOST_SCORES = 1 << 24  # of a call: of larger ones a part is timed
# Of such a part, one head a thread: with fewer queries than keys, preparing these counts too much.
MOST_QUERIES = 8192
STEPS = 4  # for every doubling: sizes that differ by less than a fifth share what is timed
FUNCTIONS = frozenset(  # that attention ends in, and what transformers calls them by
    {"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"}
)
DEPTH = 2  # of functions that call functions
ELSEWHERE = "its attention is in another method than forward: pass inputs, so that its calls can be looked at"

_timing = threading.RLock()  # one module may be inside another whose calls are computed as well
_is_faster: dict[Hashable, bool] = {}
"""Whether the native kernel is faster, by the shape of a call, its type and the number of threads."""


def attend_where_faster(call: Call) -> Tensor | None:
    """Exact attention by the native kernel; None where PyTorch's is to run: where that is faster, and
    where ours would be another function: with gradients, under autocast that casts, in a graph.

    The first call of a shape is timed, about a second, with both kernels in turns; but never one that
    is PyTorch's in any case, as with dropout, which draws random numbers.
    """
    if call.arguments is None or is_recorded(call) or not is_native(**call.arguments):
        return None
    operands = (call.query, call.key, call.value)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return None
    shape = shape_of(call)
    if shape not in _is_faster:
        with _timing:
            if shape not in _is_faster:
                _is_faster[shape] = ratio_of_times(call) < EXACT_GAIN
    if not _is_faster[shape]:
        return None
    exact: Tensor = dense_attention(**call.arguments)
    return exact


def is_recorded(call: Call) -> bool:
    """Whether a call is part of a graph, where nothing can be timed."""
    is_fake = type(call.query) not in (Tensor, nn.Parameter)
    return torch.compiler.is_compiling() or is_graph_kept() or is_fake


def shape_of(call: Call) -> Hashable:
    """What the faster kernel depends on; sizes are rounded."""
    arguments = call.arguments or {}
    mask = arguments["attn_mask"]
    batch, heads, tokens, _ = call.query.shape
    return (
        rounded_sizes(batch * heads, tokens, call.key.shape[2]),
        call.query.shape[3],
        call.query.dtype,
        None if mask is None else (mask.dtype, mask.dim() > 2 and mask.shape[-2] > 1),
        torch.get_num_threads(),
    )


def rounded_sizes(*sizes: int) -> tuple[int, ...]:
    """Sizes on a scale with four steps for every doubling."""
    return tuple(round(STEPS * math.log2(max(size, 1))) for size in sizes)


def ratio_of_times(call: Call) -> float:
    """The time of the native kernel over that of PyTorch's."""
    arguments = part_of(call)
    return median_ratio(partial(SDPA, **arguments), partial(dense_attention, **arguments))


@torch.no_grad()
def median_ratio(*kernels: Callable[[], Any]) -> float:
    """The time of the second of two kernels over that of the first, computed in turns: the median.

    Modes that watch operators do not see these; with those that watch functions, nothing is timed.
    """
    ratios: list[float] = []
    with _disable_current_modes():
        start = timer()
        while len(ratios) < LEAST_PAIRS or (len(ratios) < PAIRS and timer() - start < SECONDS):
            seconds = []
            for kernel in kernels:
                begin = timer()
                kernel()
                seconds.append(timer() - begin)
            ratios.append(seconds[1] / max(seconds[0], 1e-9))
    return statistics.median(ratios[1:])  # the first pair warms up


def part_of(call: Call) -> dict[str, Any]:
    """The arguments of a call, of a long one those of a part: as many heads of the first image as there are
    threads; all of it where heads are shared or there is a mask of pairs.
    """
    arguments = call.arguments or {}
    query, key, mask = call.query, call.key, arguments["attn_mask"]
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    is_whole = arguments["enable_gqa"] or mask is not None
    if scores <= MOST_SCORES or is_whole:
        return arguments
    heads = torch.get_num_threads()
    return {
        **arguments,
        "query": query[:1, :heads, :MOST_QUERIES],
        "key": key[:1, :heads],
        "value": call.value[:1, :heads],
    }


def exact_sites(model: nn.Module, biases: Mapping[str, str]) -> list[AttentionSite]:
    """A call site for every module of a model that calls attention, by its code, or whose forward is
    replaced.

    Args:
        model: what is looked at.
        biases: modules with a decomposed bias, by name: why their forward is not replaced; empty where
            it is.

    Raises:
        UserError: there is none.
    """
    setting = Setting("exact", where_faster=True)
    sites: list[AttentionSite] = []
    for name, module in model.named_modules():
        if any(is_inside(name, site.name) for site in sites if not site.reason):
            continue
        reason = biases.get(name, "")
        is_replaced = name in biases and not reason
        if is_replaced or (calls_attention(module) and bypass_at(model, name) is None):
            note = PASSED_BY if is_passed_by(model, name) else reason
            sites.append(AttentionSite(name, note=note, measurement=Measurement(setting)))
        elif reason or attends_elsewhere(module):
            sites.append(AttentionSite(name, reason=reason or ELSEWHERE))
    if all(site.reason for site in sites):
        causes = (site.reason for site in sites)
        cause = bypass_in(model) or next(causes, "pass inputs, so that its calls can be looked at")
        raise UserError(
            "model must have modules whose code calls F.scaled_dot_product_attention, "
            f"got a {type(model).__name__} without: {cause}"
        )
    return sites


def is_passed_by(model: nn.Module, name: str) -> bool:
    """Whether a module is an attention whose calls PyTorch's encoder leaves out in eval mode without gradients."""
    layer = model.get_submodule(name.rpartition(".")[0])
    is_of_pytorch = original_class(layer).forward is nn.TransformerEncoderLayer.forward
    return is_of_pytorch and getattr(model.get_submodule(name), "batch_first", False)


def calls_attention(module: nn.Module) -> bool:
    """Whether the code of a module's forward, or of what it has attention processed by, calls attention."""
    kind = original_class(module)
    if ends_in_attention(kind, kind.forward, DEPTH):
        return True
    processor = type(getattr(module, "processor", None))  # of diffusers
    return ends_in_attention(processor, vars(processor).get("__call__"), DEPTH)


def attends_elsewhere(module: nn.Module) -> bool:
    """Whether a method of a module's class names attention, and its forward does not come to it."""
    kind = original_class(module)
    names_it = any(ends_in_attention(kind, method, 0) for method in vars(kind).values())
    return names_it and not calls_attention(module)


def ends_in_attention(kind: type, function: Any, depth: int) -> bool:
    """Whether a function of a class names attention, or calls one of its class or of its file that does."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType):
        return False
    names = set(names_in(function.__code__))
    if names & FUNCTIONS:
        return True
    called = [getattr(kind, name, None) or function.__globals__.get(name) for name in names]
    return depth > 0 and any(ends_in_attention(kind, other, depth - 1) for other in called)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Global names and attributes in a function's code, and in that of functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
