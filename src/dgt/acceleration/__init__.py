"""Any pretrained vision transformer, faster at high resolution, with an error that one chooses: :func:`dgt.accelerate`.

- ``search``: what every layer may do, what it costs in time and error, and the choice among it.
- ``sdpa``: the calls of ``F.scaled_dot_product_attention`` in a model, found and answered by groups.
- ``doors``: what models of different libraries are called with, and transformers' names for an attention.
- ``report``: what was found and done, kept as a plan.
"""

from dgt.acceleration.doors import register_attention
from dgt.acceleration.report import Report, apply_plan
from dgt.acceleration.sdpa import exact_attention
from dgt.acceleration.search import accelerate, inspect_model

__all__ = ["Report", "accelerate", "apply_plan", "exact_attention", "inspect_model", "register_attention"]
