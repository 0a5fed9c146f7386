"""The exponential moving average of the weights that is validated and exported, without the weights
of the start.

An average that begins at the first weights keeps a share d^t of them after t steps, which is most
of it in a short training. With `decay_at` as the decay of step t it is

    sum_i d^(t-i) w_i / sum_i d^(t-i),  i = 1 ... t,

the average of the weights after each step alone: after one step these themselves, after many the
plain average with decay d.

Its sums are in float32 at least: a step adds a share 1 - d of what changed, which bfloat16 rounds
away.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)


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


class WeightAverage:
    """An average of a network's weights and buffers; `module` is a copy of the network with them, in
    float32 where the network is in a type of 16 bits.

    It has no state but these: the number of its steps is passed to `update`.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(network).eval()
        self.decay = decay
        if any(value.dtype in HALF for value in network.state_dict().values()):
            self.module.float()

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Take the network's weights into the average.

        Args:
            network: like the one that it was made of.
            step: the number of averaged steps, with this one.

        Raises:
            ValueError: the step is below 1.
        """
        if step < 1:
            raise ValueError(f"step must be the number of averaged steps, from 1, got {step}")
        share = 1 - decay_at(self.decay, step)
        averages, values = list[torch.Tensor](), list[torch.Tensor]()
        before, now = (each.state_dict(keep_vars=True) for each in (self.module, network))
        # weights that layers share have several names, and are averaged once
        pairs = {id(a): (a, b) for a, b in zip(before.values(), now.values(), strict=True)}
        for average, value in pairs.values():
            if average.is_floating_point():
                averages.append(average)
                values.append(value.to(average.dtype))
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, share)

    def like(self, network: nn.Module) -> nn.Module:
        """The network with the average, in the type that the network itself has."""
        kinds = {value.dtype for value in network.state_dict().values() if value.dtype in HALF}
        return copy.deepcopy(self.module).to(*kinds) if kinds else self.module
