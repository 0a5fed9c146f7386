"""Shared by the operator's tests: random inputs, and the single place where tolerances are defined."""

from __future__ import annotations

import random
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
    """Run a test with the fixture ``backend`` on all backends, and with ``fast`` on all but the reference.

    One with ``case`` runs on all of CASES.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    given = " ".join(str(mark.args[0]) for mark in marks)
    for name, backends in CHOICES.items():
        if name in metafunc.fixturenames and name not in given:
            metafunc.parametrize(name, backends)
    if "case" in metafunc.fixturenames and "case" not in given:
        names = [f"{case.number}-L{case.tokens}-k{case.top_k}-{case.kind}" for case in CASES]
        metafunc.parametrize("case", CASES, ids=names)


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor


def draw_inputs(
    batch: int,
    heads: int,
    tokens: int,
    channels: int,
    groups: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Normal queries, keys and values (B, H, L, D) and random unit centroids (H, G, D)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, channels)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    )
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


def gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], *rest: Any
) -> tuple[Tensor, ...]:
    """Output of ``function(*inputs, *rest)``, and gradients of a fixed random sum of it for all ``inputs``."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves, *rest)
    weights = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return (output.detach(), *torch.autograd.grad(output, leaves, weights.to(output.dtype)))


KINDS = (
    "plain",
    "plain",
    "strided",
    "masked",
    "masked",
    "padded image",
    "one group",
    "zero queries",
)


class Case(NamedTuple):
    """A shape, and what is special about the tensors."""

    number: int
    batch: int
    heads: int
    tokens: int
    channels: int
    groups: int
    top_k: int
    kind: str


def draw_case(number: int) -> Case:
    """A shape by its number: most are small, every tenth is medium-sized, and some reach 5000 tokens.

    Odd numbers have few groups and keys, so that many of them fall into the many-token regime.
    """
    rng = random.Random(number)
    tokens = rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, 200), rng.randint(60, 200)))
    if number % 10 == 0:
        tokens = rng.randint(300, 900)
    if number % 33 == 1:
        tokens = 5000 if number == 1 else rng.randint(1500, 5000)
    batch, heads = (1, 1) if tokens > 900 else (rng.randint(1, 3), rng.randint(1, 3))
    groups, top_k = rng.randint(1, 48), rng.choice((1, rng.randint(1, 60), tokens, 2 * tokens))
    if number % 2 or tokens > 900:
        groups, top_k = rng.randint(1, 10), rng.randint(1, 12 if tokens < 900 else 128)
    return Case(
        number, batch, heads, tokens, rng.choice((1, 3, 8, 32)), groups, top_k, rng.choice(KINDS)
    )


CASES = [draw_case(number) for number in range(220)]


def build_case(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors of a case: query, key, value, centroids, key_mask."""
    query, key, value, centroids = draw_inputs(
        case.batch, case.heads, case.tokens, case.channels, case.groups, case.number
    )
    key_mask = None
    if case.kind == "strided":  # as after a joint projection
        packed = torch.stack([query, key, value]).permute(1, 3, 0, 2, 4).contiguous()
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        assert case.tokens == 1 or case.heads == case.batch == 1 or not key.is_contiguous()
    elif case.kind == "one group":
        query = centroids[None, :, -1:] + 0.001 * query
    elif case.kind == "zero queries":
        query = torch.zeros_like(query)
    elif case.kind in ("masked", "padded image"):
        key_mask = (
            torch.rand(
                case.batch, case.tokens, generator=torch.Generator().manual_seed(case.number)
            )
            < 0.6
        )
        # The first image has no padding, or no real token at all.
        key_mask[0] = case.kind == "masked"
    return query, key, value, centroids, key_mask


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


@pytest.fixture
def build() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
    """The function :func:`build_case`."""
    return build_case
