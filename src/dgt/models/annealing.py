"""Annealing k: a training begins with all keys and comes down to its layers' ``top_k``."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.models.inspect import attention_layers


def annealed_top_k(top_k: int, first: int, done: float) -> int:
    """Return k part of the way from ``first`` to ``top_k``.

    Args:
        top_k: the k at which the annealing stops.
        first: the initial k; from there it decreases linearly to 0.
        done: how much of the annealing is over, from 0 to 1.
    """
    return max(top_k, round(first * (1 - done)))


class TopKAnnealing:
    """Sets k of a model's DG-Attention layers before each forward pass in training.

    Args:
        model: any module with DG-Attention layers.
        share: of the training that the annealing takes; None for none.
        start: k to begin with, clamped to the number of tokens; None for all of them.

    Attributes:
        progress: of the training, from 0 to 1; to be set between steps.
    """

    def __init__(self, model: nn.Module, share: float | None, start: int | None = None) -> None:
        self.share = share
        self.start = start
        self.progress = 0.0
        for layer in attention_layers(model).values() if share else ():
            layer.register_forward_pre_hook(partial(self._set, layer.top_k))

    def _set(self, final: int, layer: DGAttention, arguments: tuple[Tensor, Any]) -> None:
        if not layer.training:
            layer.top_k = final
            return
        tokens = arguments[0].shape[1:-1].numel()
        first = min(tokens, self.start or tokens)
        layer.top_k = annealed_top_k(final, first, self.progress / (self.share or 1.0))
