"""The forms of the paper's appendix as kernels: values and gradients against the plain version."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dgt

pytestmark = pytest.mark.usefixtures("poison")


def operands(device: str, queries: int, keys: int) -> dict[str, Tensor]:
    """Queries, keys, weights and ids with padding, empty places and a group without queries."""
    group_ids = torch.randint(0, 4, (2, 2, queries))
    group_ids[0, :, 4] = -1
    key_ids = torch.rand(2, 2, 5, keys).argsort(-1)[..., :20].sort(-1).values
    key_ids[1, 1, 0, 3:7] = -1
    key_ids[0, 1, 2] = -1
    tensors = {
        "queries": torch.randn(2, 2, queries, 24),
        "keys": torch.randn(2, 2, keys, 24),
        "weights": torch.randn(2, 2, queries, 20),
        "group_ids": group_ids,
        "key_ids": key_ids,
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def run(
    form: int, backend: str, dtype: torch.dtype, given: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """A form's result and gradients."""
    leaves = (
        given[name].to(dtype, copy=True).requires_grad_() for name in ("queries", "keys", "weights")
    )
    queries, keys, weights = leaves
    pair = {1: (queries, keys), 2: (weights, keys), 3: (queries, weights), 4: (weights, queries)}[
        form
    ]
    tokens = keys.shape[2] if form > 2 else None
    result = dgt.group_matmul(
        form, *pair, given["group_ids"], given["key_ids"], tokens=tokens, backend=backend
    )
    grad = torch.arange(result.numel()).remainder(7).view_as(result).to(result) / 4 - 1
    return result.detach(), *torch.autograd.grad(result, pair, grad)


# Every form with both sizes and both types, and every size with both types.
CASES = [
    *((form, 30, 41, torch.float32) for form in (1, 3)),
    *((form, 150, 80, torch.float16) for form in (1, 3)),
    *((form, 30, 41, torch.float16) for form in (2, 4)),
    *((form, 150, 80, torch.float32) for form in (2, 4)),
]


@pytest.mark.parametrize(("form", "queries", "keys", "dtype"), CASES, ids=str)
def test_equals_the_plain_version(
    form: int, queries: int, keys: int, dtype: torch.dtype, device: str
) -> None:
    given = {
        n: t.to(dtype) if t.is_floating_point() else t
        for n, t in operands(device, queries, keys).items()
    }
    wide = run(form, "torch", torch.float64, given)
    for ours, plain in zip(run(form, "triton", dtype, given), wide, strict=True):
        error = (ours.double() - plain).abs()
        assert ours.dtype == dtype
        assert error.max() <= (2e-6 if dtype == torch.float32 else 2e-3) * plain.abs().max()
