"""Compute an accelerated module's attention calls in groups or by the native dense kernel."""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dgt.acceleration.calls import MOST_FORMS, Call
from dgt.acceleration.decomposed_bias import DecomposedAttention, form_of, reason_against
from dgt.acceleration.exact import attend_where_faster
from dgt.acceleration.guard import (
    MORE_KEYS,
    GuardCounts,
    attend_densely,
    can_check,
    estimate_errors,
    replace_images,
    select_images,
)
from dgt.acceleration.intercept import (
    AttentionProcessor,
    install_processors,
    installed_processors,
)
from dgt.acceleration.prefix_tokens import PrefixTokens, front_order, prefix_positions
from dgt.acceleration.settings import Setting, scale_setting
from dgt.acceleration.sites import AttentionSite
from dgt.ops import dense_attention
from dgt.ops.clustered import attend_in_clusters
from dgt.utils.errors import NonFiniteInput

_counting = threading.Lock()  # of what guards do, in all threads


class Work(NamedTuple):
    """What a setting is for calls of so many queries and keys, as :func:`dgt.clustered_attention` has
    its arguments.
    """

    num_groups: int
    top_k: int
    residual_keys: int
    num_prefix_tokens: int
    first_order: bool
    scattered: tuple[int, ...]
    """The positions of the prefix tokens where they are not at the start; empty where they are."""


def plan_work(
    setting: Setting, prefix: PrefixTokens, planned: tuple[int, int], tokens: int, key_tokens: int
) -> Work:
    """What a setting that was ``planned`` for so many queries and keys is for other numbers of them."""
    positions = prefix_positions(prefix, tokens) if tokens == key_tokens else []
    scaled = scale_setting(setting, tokens / planned[0], key_tokens / planned[1])
    patches = key_tokens - len(positions)
    is_at_start = positions == list(range(len(positions)))
    return Work(
        num_groups=min(scaled.groups, tokens - len(positions)),
        top_k=min(scaled.keys, patches),
        residual_keys=min(scaled.residual_keys, patches),
        num_prefix_tokens=len(positions),
        first_order=scaled.first_order,
        scattered=() if is_at_start else tuple(positions),
    )


kept_work = functools.lru_cache(MOST_FORMS)(plan_work)


def compute_call(call: Call, site: AttentionSite, setting: Setting) -> Tensor:
    """Compute a call of a call site, by "groups" or "exact"; prefix tokens see, and are seen by,
    all tokens.

    Returns:
        The output, of ``call.shape``.
    """
    if setting.choice == "exact":
        exact: Tensor = dense_attention(**(call.arguments or {}))
        return exact
    query, key, value = call.query, call.key, call.value
    key_mask = call.key_mask
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        query, key, value = _as_autocast(call)
    tokens, key_tokens = query.shape[2], key.shape[2]
    plan: Callable[..., Work] = kept_work
    if torch.compiler.is_compiling() or type(query) is FakeTensor:  # sizes may be symbols
        plan = plan_work
    elif torch.jit.is_tracing():  # there they are tensors
        tokens, key_tokens = int(tokens), int(key_tokens)
    prefix = (
        tuple(site.prefix_tokens) if isinstance(site.prefix_tokens, list) else site.prefix_tokens
    )
    work = plan(setting, prefix, (site.tokens, site.key_tokens), tokens, key_tokens)
    order = None
    if work.scattered:
        order = front_order(work.scattered, tokens, query.device)
        query, key, value = (tensor[:, :, order] for tensor in (query, key, value))
        key_mask = None if key_mask is None else key_mask[:, order]
    output = attend_in_clusters(
        query,
        key,
        value,
        num_groups=work.num_groups,
        top_k=work.top_k,
        residual_keys=work.residual_keys,
        num_prefix_tokens=work.num_prefix_tokens,
        scale=call.scale,
        query_mask=None,
        key_mask=key_mask,
        first_order=work.first_order,
    )
    if order is not None:
        output = output[:, :, order.argsort()]
    return output.reshape(call.shape)


def _as_autocast(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """A call's operands, cast as autocast casts them."""
    operands = (call.query, call.key, call.value)
    if call.query.dtype == torch.float64:
        return operands
    kind = torch.get_autocast_dtype(call.query.device.type)
    return (call.query.to(kind), call.key.to(kind), call.value.to(kind))


class GroupedAttention(AttentionProcessor):
    """Computes the attention calls of a module by its call site's setting, scaled to the sizes of each.

    Args:
        site: the module's call site.
    """

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()
        self.site = site
        self.counts = GuardCounts()
        """What the guard did; changed under a lock, and not part of copies."""

    def process(self, call: Call) -> Tensor | None:
        """The attention's output, of ``call.shape``; None if the call runs unchanged."""
        site = self.site
        if not fits(site, call):
            return None
        setting = site.measurement.setting
        if setting.where_faster:
            return attend_where_faster(call)
        try:
            output = compute_call(call, site, setting)
        except NonFiniteInput:  # in some image: PyTorch's attention serves the others
            return None
        if setting.allowed_error is None or not can_check(call):
            return output
        return self.guard(call, output)

    def guard(self, call: Call, output: Tensor) -> Tensor:
        """The output with that of images whose error is above the allowed one computed again, with
        more keys, or densely where that is not enough.
        """
        site = self.site
        # A search allows what more queries show: what is done again is decided by as many.
        is_searching = site.setting.allowed_error == math.inf
        errors = estimate_errors(call, output, site, closely=is_searching)
        counts = GuardCounts(checked=len(errors))
        suspects = images_above(errors, site)
        if suspects:
            output = output.reshape(call.query.shape)
            suspected = select_images(call, suspects)
            closer = estimate_errors(suspected, output[suspects], site, closely=True)
            counts.checked_closely = len(suspects)
            for image, error in zip(suspects, closer, strict=True):
                errors[image] = error
            again = [suspects[image] for image in images_above(closer, site)]
            if again:
                replacement = self.attend_again(select_images(call, again), counts)
                output = replace_images(output, again, replacement)
            output = output.reshape(call.shape)
        counts.largest_error = max(errors)
        with _counting:
            self.counts.add(counts)
        return output

    def attend_again(self, call: Call, counts: GuardCounts) -> Tensor:
        """(B, H, L, D): the output with more keys, that of images for which these are not enough
        densely. Adds to the counts.
        """
        site = self.site
        harder = scale_setting(site.setting, MORE_KEYS, MORE_KEYS)
        output = compute_call(call, site, harder).reshape(call.query.shape)
        still = images_above(estimate_errors(call, output, site, closely=True), site)
        if still:
            output = replace_images(output, still, attend_densely(select_images(call, still)))
        counts.more_keys += len(call.query) - len(still)
        counts.dense += len(still)
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "counts": GuardCounts()}

    def __str__(self) -> str:
        words = f"{self.site.title}: {self.site.setting}"
        if not self.counts.acted:
            return words
        return f"{words}, guard acted on {self.counts.acted} of {self.counts.checked} images"


def images_above(errors: Sequence[float], site: AttentionSite) -> list[int]:
    """The images of a batch whose error is above the allowed one, or not a number."""
    allowed = site.setting.allowed_error
    if allowed is None:
        return []
    return [image for image, error in enumerate(errors) if not error <= allowed]


def guard_counts(model: nn.Module) -> dict[str, GuardCounts]:
    """How often the guards of an accelerated model acted, by the call site.

    Args:
        model: after :func:`dgt.accelerate` or :func:`dgt.apply_plan`.

    Returns:
        For every call site with a guard what it did since the model was accelerated, copied or
        loaded, in all threads.

    Example:
        >>> dgt.guard_counts(model)["blocks.3.attn"]
        GuardCounts(checked=40, checked_closely=2, more_keys=1, dense=0, largest_error=0.31)
    """
    return {
        processor.site.title: replace(processor.counts)
        for processor in installed_processors(model).values()
        if isinstance(processor, GroupedAttention)
        and processor.site.setting.allowed_error is not None
    }


def take_counts(model: nn.Module) -> dict[str, GuardCounts]:
    """What :func:`guard_counts` returns, counted from 0 again."""
    counts = guard_counts(model)
    for processor in installed_processors(model).values():
        if isinstance(processor, GroupedAttention):
            processor.counts = GuardCounts()
    return counts


def fits(site: AttentionSite, call: Call) -> bool:
    """Whether a site's setting applies to a call: not shorter, no larger batch, and of the same kind."""
    setting = site.measurement.setting
    if setting.most_batch is not None and call.query.shape[0] > setting.most_batch:
        return False
    if setting.choice == "exact":
        return call.arguments is not None
    if setting.choice != "groups" or call.reason is not None:
        return False
    tokens, key_tokens = call.query.shape[2], call.key.shape[2]
    if min(tokens, key_tokens) < setting.least_tokens:
        return False
    prefix = site.prefix_tokens
    if isinstance(prefix, int):
        return tokens > prefix
    return len(prefix_positions(prefix, tokens)) < tokens


def install_sites(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Install the settings of call sites in a model, instead of those of before; dense ones are its own."""
    processors: dict[str, AttentionProcessor] = {**processors_of(sites)}
    for site in sites:
        module = model.get_submodule(site.name)
        is_exact = site.setting.choice == "exact"
        if is_exact and form_of(module) is not None and not reason_against(module):
            processors[site.name] = DecomposedAttention(site)
    install_processors(model, processors)


def processors_of(sites: Sequence[AttentionSite]) -> dict[str, GroupedAttention]:
    """What computes the calls of these call sites, by module name; none where all are dense."""
    return {site.name: GroupedAttention(site) for site in sites if site.setting.choice != "dense"}
