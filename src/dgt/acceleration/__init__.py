"""Accelerate pretrained vision transformers at high resolution, within a chosen error: :func:`dgt.accelerate`.

In the order in which they work:

- ``pipeline``: the function itself: what follows what.
- ``search``: the request, checked, and what is known of the model; ``inputs``: of the model, and
  what it returns.
- ``sites``: the call sites of attention; ``measure``: what their settings cost.
- ``choose``: the fastest choice of settings at an error.
- ``confirm``: the model with a choice: its error, and the ``bound`` of that; ``sensitivity``: how
  far the errors of layers reach.
- ``install``: the fastest choice in the model, timed.
- ``report``: the result; ``plan``: the same applied again, ``plan_file``: the keys of its file;
  ``check``: what it does on other inputs.

In a model: ``calls`` (of attention, read), ``intercept`` (modules whose calls are computed by
something else), ``grouped`` (what computes them), ``guard`` (a check on every input), ``settings``,
``prefix_tokens``, ``decomposed_bias`` (SAM's attention, whose forward is replaced), ``bypass``
(what has attention elude all this), and ``adapters`` (names of transformers for an attention).
"""

from dgt.acceleration.adapters import register_attention
from dgt.acceleration.check import check_plan
from dgt.acceleration.grouped import guard_counts
from dgt.acceleration.guard import GuardCounts
from dgt.acceleration.intercept import exact_attention
from dgt.acceleration.pipeline import accelerate, inspect_model
from dgt.acceleration.plan import apply_plan, plan_names
from dgt.acceleration.prefix_tokens import FrameTokens
from dgt.acceleration.report import Report
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement

__all__ = [
    "AttentionSite",
    "FrameTokens",
    "GuardCounts",
    "Measurement",
    "Report",
    "Setting",
    "accelerate",
    "apply_plan",
    "check_plan",
    "exact_attention",
    "guard_counts",
    "inspect_model",
    "plan_names",
    "register_attention",
]
