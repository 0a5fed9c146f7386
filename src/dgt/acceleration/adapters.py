"""Register the attention with transformers, as ``attn_implementation="dgt"``.

transformers checks whether a model supports "sdpa", and models ask whether that is their attention's
name. Both pass by a name of one's own, so what is not as it would be with "sdpa" is refused here.
"""

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dgt.acceleration.calls import Call
from dgt.acceleration.decomposed_bias import register_vision_attention
from dgt.acceleration.exact import attend_where_faster
from dgt.acceleration.grouped import compute_call, fits
from dgt.acceleration.intercept import (
    SDPAInterceptMode,
    is_accelerated,
    is_traced,
    original_class,
)
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import UserError

SDPA_NAME = "sdpa"
OF_TOKENS = frozenset(  # tensors among the options of attention that say nothing of scores
    {
        "position_ids",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "num_items_in_batch",
    }
)
REMEDY = 'load the model with attn_implementation="eager"'
PLAIN_REMEDY = 'load it with attn_implementation="sdpa" and call dgt.accelerate(model, error=0)'


def register_attention(
    name: str | None = None,
    num_groups: int | None = None,
    top_k: int | None = None,
    num_prefix_tokens: int = 0,
    residual_keys: int = 1,
    exact: bool = False,
) -> None:
    """Make ``attn_implementation=name`` known to transformers, for any model that takes such names.

    Without numbers it is ``"sdpa"``, to the bit, until :func:`dgt.accelerate` or
    :func:`dgt.apply_plan` has a layer done in groups. With numbers every attention is done by
    :func:`dgt.clustered_attention` at once, without measuring anything: no error is promised, nor
    that it is faster. Attention with a mask of pairs, causal, to another number of keys, with dropout, or of
    fewer than 4 ``top_k`` or 8 ``num_groups`` tokens remains ``"sdpa"``.

    With ``exact`` attention is computed exactly, by the native dense kernel at shapes where that is
    faster on this processor (as ``dgt.accelerate(model, error=0)`` has it), and otherwise "sdpa"; in
    SAM's image encoder without making its bias of all pairs. Models that do not look up their
    attention by this name, such as TimeSformer, compute it as ever.

    Args:
        name: what models are then loaded with; "dgt" by default, "dgt-exact" where it is ``exact``.
        num_groups, top_k: groups of each head, and keys of each group; both or neither.
        num_prefix_tokens: class and register tokens: nothing else identifies them if only numbers
            are given. Only with ``num_groups``.
        residual_keys: residual keys of each group; only with ``num_groups``.
        exact: whether attention is exact; without numbers.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed. The
            first call of a model's attention raises a ValueError where "sdpa" would be refused or
            be another function than that under this name: for models that do not support it, such
            as those with attention sinks or capped scores, for those whose code asks for the name
            "sdpa", and for tensors that change scores.

    Example:
        >>> dgt.register_attention("dgt-64-96", num_groups=64, top_k=96, num_prefix_tokens=5)
        >>> model = AutoModel.from_pretrained(name, attn_implementation="dgt-64-96")
    """
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be True or False, got {describe(exact)}")
    if exact and num_groups is not None:
        raise UserError(f"num_groups must be None where attention is exact, got {num_groups}")
    if name is None:
        name = "dgt-exact" if exact else "dgt"
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, got {describe(name)}")
    if name in ("eager", SDPA_NAME):
        raise UserError(f"name must not be a built-in name of transformers, got {name!r}")
    check_numbers(num_groups, top_k, num_prefix_tokens, residual_keys)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    setting = None
    if num_groups is not None and top_k is not None:
        least_tokens = max(4 * top_k, 8 * num_groups) + num_prefix_tokens
        setting = Setting("groups", num_groups, top_k, residual_keys, least_tokens=least_tokens)

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        check_attention(name, module, options)
        mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if exact and not is_accelerated(module) and not is_traced():
            mode = SDPAInterceptMode(attend_where_faster)
        elif setting is not None and not is_accelerated(module):
            mode = SDPAInterceptMode(partial(compute, setting, num_prefix_tokens))
        with mode:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, attend)
    # otherwise transformers drops masks for unknown names
    AttentionMaskInterface.register(name, sdpa_mask)
    register_vision_attention(name, is_replaced=exact)


def check_numbers(
    num_groups: int | None, top_k: int | None, num_prefix_tokens: int, residual_keys: int
) -> None:
    """Check the numbers of :func:`register_attention`, which are all of groups. Raises as it does."""
    if (num_groups is None) != (top_k is None):
        raise UserError(
            f"num_groups and top_k must be given both or neither, got {num_groups} and {top_k}"
        )
    for argument, count in (("num_groups", num_groups), ("top_k", top_k)):
        check_count(argument, 1 if count is None else count)
    check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    check_count("residual_keys", residual_keys, least=0)
    usual = {"num_prefix_tokens": (num_prefix_tokens, 0), "residual_keys": (residual_keys, 1)}
    for argument, (count, without) in usual.items():
        if num_groups is None and count != without:
            raise UserError(f"{argument} must be left out without num_groups, got {count}")


def check_attention(name: str, module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse attention that is not what "sdpa" computes, or for which transformers refuses that.

    Args:
        name: under which the attention is registered.
        module: that calls it.
        options: that it passes on, beside query, key, value and mask.

    Raises:
        UserError: with the reason and what to do.
    """
    reason = reason_against(original_class(module), type(getattr(module, "config", None)))
    if reason is not None:
        raise UserError(f"the attention of a model must not be {name!r} {reason}")
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in {*OF_TOKENS, "position_bias"}:
            raise UserError(
                f"the attention of a model must not be {name!r} with {option}, which "
                f"{SDPA_NAME!r} leaves out: {REMEDY}"
            )


@torch.compiler.assume_constant_result
def reason_against(kind: type[nn.Module], config: type) -> str | None:
    """As :func:`find_reason`, which is asked once, and not traced by compilers."""
    return find_reason(kind, config)  # type: ignore[arg-type]


@functools.cache
def find_reason(kind: type[nn.Module], config: type) -> str | None:
    """Why attention that is called by a module of this class, with a configuration of that one, must not
    have a name of one's own; None if nothing is known against it.
    """
    from transformers import PreTrainedModel

    for base in kind.__mro__:
        file = sys.modules.get(base.__module__)
        if file is None:
            continue
        models = [
            model
            for model in vars(file).values()
            if isinstance(model, type)
            and issubclass(model, PreTrainedModel)
            and model.__module__ == base.__module__
        ]
        if not models:
            continue
        for model in [model for model in models if model.config_class is config] or models:
            if not model._supports_sdpa:
                return f"where {model.__name__} does not support {SDPA_NAME!r}: {REMEDY}"
        if asks_for_name(file):
            return f"where its code asks for the name {SDPA_NAME!r}: {PLAIN_REMEDY}"
        return None
    return None


def asks_for_name(file: ModuleType) -> bool:
    """Whether code of a file compares something with "sdpa"."""
    try:
        tree = ast.parse(inspect.getsource(file))
    except (OSError, TypeError):  # without its source
        return False
    comparisons = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return any(
        isinstance(leaf, ast.Constant) and leaf.value == SDPA_NAME
        for comparison in comparisons
        for leaf in ast.walk(comparison)
    )


def compute(setting: Setting, num_prefix_tokens: int, call: Call) -> Tensor | None:
    """Compute a call in groups; None if it is too short for them, or of another kind."""
    tokens = call.query.shape[2]
    measurement = Measurement(setting)
    site = AttentionSite(
        "",
        tokens=tokens,
        key_tokens=tokens,
        prefix_tokens=num_prefix_tokens,
        measurement=measurement,
    )
    if call.key.shape[2] != tokens or not fits(site, call):
        return None
    if is_traced():
        raise UserError(
            'model must use its original attention: load it with attn_implementation="sdpa"'
        )
    return compute_call(call, site, setting)
