"""Dense attention: the same contract as PyTorch's for every implementation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.ops import dense
from dgt.ops.cpu import library

needs_native = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)

SHAPES = [(5, 3), (2, 40, 16), (2, 3, 77, 40), (2, 2, 2, 33, 24), (1, 2, 300, 256)]


def random_mask(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    torch.manual_seed(1)
    if kind == "none":
        return None
    if kind == "bool":
        sees = torch.rand(shape) < 0.6
        sees[..., 0] = True
        return sees
    return torch.randn(shape)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_pytorch(shape, kind):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = random_mask(kind, (shape[-2], shape[-2]))
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    output = dgt.dense_attention(*inputs, attn_mask=mask)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=wide_mask)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, grad)
    for ours, theirs in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_other_numbers_of_queries_keys_and_heads():
    torch.manual_seed(0)
    query = torch.randn(2, 6, 50, 16, requires_grad=True)
    key = torch.randn(2, 2, 31, 16, requires_grad=True)
    value = torch.randn(2, 2, 31, 16, requires_grad=True)
    inputs = (query, key, value)
    ours = dgt.dense_attention(*inputs, scale=0.3, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(*inputs, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(ours)
    for mine, yours in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(theirs, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_is_zero_with_no_gradient():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[4] = False
    output = dgt.dense_attention(*inputs, attn_mask=mask)
    assert not output[:, :, 4].any()
    in_query = torch.autograd.grad(output.sum(), inputs[0])[0]
    assert in_query.isfinite().all()
    assert not in_query[:, :, 4].any()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_pytorch(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 200, 32).to(dtype) for _ in range(3)]
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in inputs))
    ours = (dgt.dense_attention(*inputs).double() - exact).abs().max()
    theirs = (F.scaled_dot_product_attention(*inputs).double() - exact).abs().max()
    assert ours <= 1.5 * theirs


@needs_native
def test_infinite_and_nan_inputs_come_through():
    query, key, value = torch.randn(3, 1, 1, 40, 16)
    value[0, 0, 7, 2] = torch.nan
    assert dgt.dense_attention(query, key, value)[..., 2].isnan().all()
    query[0, 0, 3] = torch.nan
    assert dgt.dense_attention(query, key, value)[0, 0, 3].isnan().all()


CALLS = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "causal": {"is_causal": True},
    "mask with gradient": {"attn_mask": torch.zeros(40, 40, requires_grad=True)},
}


@needs_native
@pytest.mark.parametrize("name", CALLS)
def test_who_computes_it(name, monkeypatch):
    calls = []
    monkeypatch.setattr(
        dense.F,
        "scaled_dot_product_attention",
        lambda *_, **__: calls.append(name) or torch.zeros(1),
    )
    query, key, value = torch.randn(3, 1, 1, 40, 16)
    dgt.dense_attention(query, key, value, **CALLS[name])
    assert bool(calls) == (name != "plain")


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 7), torch.randn(1, 2, 9, 7)),
        (torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8).double(), torch.randn(1, 2, 9, 8)),
        (torch.randn(1, 4, 9, 8), torch.randn(1, 3, 9, 8), torch.randn(1, 3, 9, 8)),
    ],
)
def test_wrong_calls_are_refused_as_pytorch_does(tensors):
    with pytest.raises(RuntimeError):
        dgt.dense_attention(*tensors)
