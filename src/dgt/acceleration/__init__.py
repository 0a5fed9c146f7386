"""Accelerate pretrained vision transformers at high resolution, within a chosen error: :func:`dgt.accelerate`.

In the order in which they work:

- ``pipeline``: the function itself: what follows what.
- ``task``: the request, checked.
- ``sites``: the call sites of attention; ``measure``: what their settings cost.
- ``choose``: the fastest choice of settings at an error.
- ``confirm``: the model as it is chosen: how far errors reach, whether the ``bound`` holds, how fast
  it is.
- ``report``: what was found and done; ``plan``: the same done again.

In a model: ``calls`` (of attention, read), ``intercept`` (modules whose calls are computed by
something else), ``grouped`` (what computes them), ``settings``, ``special_tokens``, ``bypass`` (what
has attention elude all this), and ``adapters`` (transformers' names for an attention).
"""

from dgt.acceleration.adapters import register_attention
from dgt.acceleration.intercept import exact_attention
from dgt.acceleration.pipeline import accelerate, inspect_model
from dgt.acceleration.plan import apply_plan
from dgt.acceleration.report import Report
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement
from dgt.acceleration.special_tokens import FrameTokens

__all__ = [
    "AttentionSite",
    "FrameTokens",
    "Measurement",
    "Report",
    "Setting",
    "accelerate",
    "apply_plan",
    "exact_attention",
    "inspect_model",
    "register_attention",
]
