"""The exponential moving average of the weights that is validated and exported, without the weights
of the start.

An average that begins at the first weights keeps a share d^t of them after t steps, which is most
of it in a short training. With `decay_at` as the decay of step t it is

    sum_i d^(t-i) w_i / sum_i d^(t-i),  i = 1 ... t,

the average of the weights after each step alone: after one step these themselves, after many the
plain average with decay d.
"""

from __future__ import annotations

import math

from timm.utils import ModelEmaV3
from torch import nn


def decay_at(decay: float, step: int) -> float:
    """d_t = d (1 - d^(t-1)) / (1 - d^t), the share of the average that step t keeps.

    Args:
        decay: d, in [0, 1).
        step: t, from 1; how many steps the average holds with this one.
    """
    if decay == 0:
        return 0.0
    # d^t is close to 1 for slow averages, where 1 - d^t would lose digits
    before, now = (-math.expm1(steps * math.log(decay)) for steps in (step - 1, step))
    return decay * before / now


class WeightAverage(ModelEmaV3):
    """An average of a network's weights and buffers; `module` is a copy of the network with them.

    It has no state but these: the number of its steps is passed to `update`.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__(network, decay)
        # Of timm from 1.0.31 on, by a generator whose state no checkpoint would hold.
        self.stochastic_rounding = False

    def get_decay(self, step: int | None = None) -> float:
        """As `decay_at`.

        Raises:
            ValueError: the step is not given, or below 1.
        """
        if step is None or step < 1:
            raise ValueError(f"step must be the number of averaged steps, from 1, got {step}")
        return decay_at(self.decay, step)
