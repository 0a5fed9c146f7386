"""Shared by the operator's tests: random inputs, and the single place where tolerances are defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops.native_loader import reason_against_native

FLOAT32_ERROR = 1e-5
FAST = ("torch", *(["native"] if reason_against_native() is None else []))
"""The backends that run on this CPU, except the reference."""
CHOICES = {"fast": FAST, "backend": ("reference", *FAST)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture ``backend`` on all backends, and with ``fast`` on all but the reference."""
    marks = metafunc.definition.iter_markers("parametrize")
    given = " ".join(str(mark.args[0]) for mark in marks)
    for name, backends in CHOICES.items():
        if name in metafunc.fixturenames and name not in given:
            metafunc.parametrize(name, backends)


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor


def draw_inputs(
    batch: int, heads: int, tokens: int, channels: int, groups: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Normal queries, keys and values (B, H, L, D) and random unit centroids (H, G, D)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, channels)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    centroids = F.normalize(torch.randn(heads, groups, channels, generator=generator), dim=-1)
    return Inputs(query, key, value, centroids)


def check_close(actual: Tensor, expected: Tensor, what: str = "output") -> None:
    """Compare in float32: 1e-5, relative to the largest expected value if that is above one.

    Each entry is a sum of products whose rounding errors (each 6e-8 of the largest term) add up
    like a random walk: 5000 terms give 4e-6 of the largest entry.
    """
    assert actual.shape == expected.shape, what
    assert actual.isfinite().all(), what
    if expected.numel():
        allowed = FLOAT32_ERROR * max(1.0, expected.abs().max().item())
        error = (actual - expected).abs().max().item()
        assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}"


def gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], *rest: Any) -> tuple[Tensor, ...]:
    """Output of ``function(*inputs, *rest)``, and gradients of a fixed random sum of it for all ``inputs``."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves, *rest)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (output.detach(), *torch.autograd.grad(output, leaves, weights.to(output.dtype)))


@pytest.fixture
def draw() -> Callable[..., Inputs]:
    """The function :func:`draw_inputs`."""
    return draw_inputs


@pytest.fixture
def close() -> Callable[..., None]:
    """The function :func:`check_close`."""
    return check_close


@pytest.fixture
def with_gradients() -> Callable[..., tuple[Tensor, ...]]:
    """The function :func:`gradients`."""
    return gradients
