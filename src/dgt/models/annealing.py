"""Annealing k: a training begins with all keys and comes down to its layers' ``top_k``, as a function of progress."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.models.inspect import attention_layers


def annealed_top_k(top_k: int, first: int, done: float) -> int:
    """k when the share ``done`` of the annealing is over: a line from ``first`` to 0 that stops at ``top_k``."""
    return max(top_k, round(first * (1 - done)))


class TopKAnnealing:
    """Sets k of a model's DG-Attention layers before each forward in training, in a ``share`` of it; None for never."""

    def __init__(self, model: nn.Module, share: float | None, start: int | None = None) -> None:
        self.share, self.start, self.progress = share, start, 0.0  # the last, from 0 to 1, is to be set between steps
        for layer in attention_layers(model).values() if share else ():
            layer.register_forward_pre_hook(partial(self._set, layer.top_k))

    def _set(self, own: int, layer: DGAttention, arguments: tuple[Tensor, Any]) -> None:
        first, done = arguments[0].shape[1:-1].numel(), self.progress / (self.share or 1.0)
        layer.top_k = annealed_top_k(own, min(first, self.start or first), done) if layer.training else own
