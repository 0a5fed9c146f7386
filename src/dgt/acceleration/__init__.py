"""Any pretrained vision transformer, faster at high resolution, with an error that one chooses: :func:`dgt.accelerate`.

- ``search``: what every layer may do, what it costs in time and error, and the choice among it.
- ``sdpa``: the calls of ``F.scaled_dot_product_attention`` in a model, found and answered by groups.
- ``report``: what was found and done, kept as a plan.
"""

from dgt.acceleration.report import Report, apply_plan
from dgt.acceleration.sdpa import exact_attention
from dgt.acceleration.search import accelerate

__all__ = ["Report", "accelerate", "apply_plan", "exact_attention"]
