"""Accelerate pretrained vision transformers at high resolution, within a chosen error: :func:`dgt.accelerate`.

In the order in which they work:

- ``pipeline``: the function itself: what follows what.
- ``task``: the request, checked.
- ``capture``: one pass over the inputs: every call site of attention; ``measure``: what its
  settings cost.
- ``choose``: the fastest choice of settings at an error.
- ``confirm``: the model as it is chosen: how far errors reach, whether the bound holds, how fast it
  is.
- ``summary`` and ``report``: what was found and done; ``plan``: the same done again.

In addition, ``settings`` (how a budget is split), ``grouped`` (what answers a call),
``statistics``, ``progress``, and ``adapters`` (transformers' names for an attention).
"""

from dgt.acceleration.adapters import register_attention
from dgt.acceleration.intercept import exact_attention
from dgt.acceleration.pipeline import accelerate, inspect_model
from dgt.acceleration.plan import apply_plan
from dgt.acceleration.report import Report
from dgt.acceleration.settings import LayerReport
from dgt.acceleration.special_tokens import FrameTokens

__all__ = [
    "FrameTokens",
    "LayerReport",
    "Report",
    "accelerate",
    "apply_plan",
    "exact_attention",
    "inspect_model",
    "register_attention",
]
