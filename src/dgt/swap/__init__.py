"""Putting another attention into a model that exists, and taking it out again.

``dgt.replace_attention``, ``dgt.accelerate`` and the attention under a name of transformers stand
on this.

- ``sdpa``: the calls of ``F.scaled_dot_product_attention`` in a model: reading, tracing, answering.
- ``install``: an attention put into a model, as a module or as an answer to calls, and out again.
- ``special_tokens``: class and register tokens, which are no patches: how many, and where.
"""

from dgt.swap.install import (
    CallAnswer,
    exact_attention,
    has_answer,
    install_answer,
    installed_answers,
    replace_modules,
    uninstall_answers,
)
from dgt.swap.sdpa import Call, SDPAInterceptMode, is_traced, read_call, trace_sdpa
from dgt.swap.special_tokens import FrameTokens, SpecialTokens, count_special_tokens, special_places

__all__ = [
    "Call",
    "CallAnswer",
    "FrameTokens",
    "SDPAInterceptMode",
    "SpecialTokens",
    "count_special_tokens",
    "exact_attention",
    "has_answer",
    "install_answer",
    "installed_answers",
    "is_traced",
    "read_call",
    "replace_modules",
    "special_places",
    "trace_sdpa",
    "uninstall_answers",
]
