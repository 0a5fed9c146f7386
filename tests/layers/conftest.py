"""Shared by the tests of layers: a small layer, inputs, and a plain training step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dgt


def make_layer(**options) -> dgt.DGAttention:
    """A layer of two heads and five groups over 16 channels; the same weights every time."""
    torch.manual_seed(7)
    settings = {"num_groups": 5, "top_k": 6, "tau": 0.3, "tau_weighs": "new", **options}
    return dgt.DGAttention(16, 2, **settings)


def make_batch(
    number: int, batch: int = 4, height: int = 6, width: int = 5, dim: int = 16
) -> Tensor:
    """(B, H, W, C) tokens with an offset that makes groups uneven."""
    return (
        torch.randn(batch, height, width, dim, generator=torch.Generator().manual_seed(number))
        + 0.3
    )


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Tensor) -> None:
    """One optimizer step on the summed loss of one or several micro-batches."""
    optimizer.zero_grad()
    for batch in batches:
        model(batch).square().sum().backward()
    optimizer.step()


@pytest.fixture
def layer() -> Callable[..., dgt.DGAttention]:
    """The function :func:`make_layer`."""
    return make_layer


@pytest.fixture
def tokens() -> Callable[..., Tensor]:
    """The function :func:`make_batch`."""
    return make_batch


@pytest.fixture
def step() -> Callable[..., None]:
    """The function :func:`run_step`."""
    return run_step
