"""Register the attention with transformers, as ``attn_implementation="dgt"``."""

import contextlib
from functools import partial
from typing import Any

from torch import Tensor

from dgt.acceleration.calls import Call
from dgt.acceleration.exact import attend_where_faster
from dgt.acceleration.grouped import compute_call, fits
from dgt.acceleration.intercept import (
    SDPAInterceptMode,
    is_accelerated,
    is_traced,
    original_class,
)
from dgt.acceleration.padding import hides_queries
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import UserError


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
    that it is faster. Attention with a mask of pairs, causal, across sequences, with dropout, or of
    fewer than 4 ``top_k`` or 8 ``num_groups`` tokens remains ``"sdpa"``.

    With ``exact`` attention is computed exactly, by the native dense kernel at shapes where that is
    faster on this processor (as ``dgt.accelerate(model, error=0)`` has it), and otherwise "sdpa".

    Args:
        name: what models are then loaded with; "dgt" by default, "dgt-exact" where it is ``exact``.
        num_groups, top_k: groups of each head, and keys of each group; both or neither.
        num_prefix_tokens: class and register tokens: nothing else identifies them if only numbers
            are given.
        residual_keys: residual keys of each group.
        exact: whether attention is exact; without numbers.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

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
    if (num_groups is None) != (top_k is None):
        raise UserError(
            f"num_groups and top_k must be given both or neither, got {num_groups} and {top_k}"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, got {describe(name)}")
    if name in ("eager", "sdpa"):
        raise UserError(f"name must not be a built-in name of transformers, got {name!r}")
    for argument, count in (("num_groups", num_groups), ("top_k", top_k)):
        check_count(argument, 1 if count is None else count)
    check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    check_count("residual_keys", residual_keys, least=0)
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
        mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if exact and not is_accelerated(module) and not is_traced():
            mode = SDPAInterceptMode(attend_where_faster)
        elif setting is not None and not is_accelerated(module):
            mode = SDPAInterceptMode(partial(compute, setting, num_prefix_tokens))
            mode.hides_queries = hides_queries(original_class(module))  # type: ignore[arg-type]
        with mode:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, attend)
    # otherwise transformers drops masks for unknown names
    AttentionMaskInterface.register(name, sdpa_mask)


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
    if not fits(site, call):
        return None
    if is_traced():
        raise UserError(
            'model must use its original attention: load it with attn_implementation="sdpa"'
        )
    return compute_call(call, site, setting)
