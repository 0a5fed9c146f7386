"""Dense attention: the same contract as PyTorch's for every implementation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

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


def attend_exactly(*inputs: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's attention in plain operations."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask)


def assert_equal_to_pytorch(mask: Tensor, dtype: torch.dtype, queries: int = 20, keys: int = 30):
    """Forward and backward, beside PyTorch's plain operations in float64."""
    torch.manual_seed(0)
    sizes = (queries, keys, keys)
    inputs = [torch.randn(2, 3, size, 16).to(dtype).requires_grad_() for size in sizes]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wide_mask = mask if mask.dtype == torch.bool else mask.double()
    expected = attend_exactly(*wide, mask=wide_mask)
    output = dgt.dense_attention(*inputs, attn_mask=mask)
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    if (mask == torch.finfo(torch.float16).min).any():
        near = max(near, 2.0**-8)  # the step of float32 there, by which scores are rounded
    torch.testing.assert_close(output.double(), expected, rtol=near, atol=near)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(output, inputs, grad.to(dtype))
    for ours, theirs in zip(found, torch.autograd.grad(expected, wide, grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * near, atol=4 * near)


LOWEST = torch.finfo(torch.float32).min


@needs_native  # without it PyTorch computes it, whose gradients of such rows are its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "row",
    [
        [torch.finfo(torch.float32).min] * 30,
        [torch.finfo(torch.bfloat16).min] * 30,
        [torch.finfo(torch.float16).min] * 30,
        [LOWEST] * 13 + [-torch.inf] * 17,
        [-torch.inf] * 29 + [LOWEST],
        [LOWEST] * 10 + [-(2.0**127)] * 20,
        [0.0] * 7 + [torch.finfo(torch.float32).max] * 23,
    ],
    ids=["float32", "bfloat16", "float16", "some -inf", "one key", "two numbers", "highest"],
)
def test_numbers_that_absorb_the_scores_weigh_equal_keys_alike(row, dtype):
    mask = torch.randn(20, 30)
    mask[4] = torch.tensor(row)
    mask[11, :29] = LOWEST  # one key that is seen
    assert_equal_to_pytorch(mask, dtype)


@needs_native
def test_rows_of_the_lowest_number_in_long_masks_of_every_head():
    mask = torch.zeros(2, 3, 70, 700)
    mask[1, 2, 5:9] = LOWEST
    mask[0, :, :, 300:] = LOWEST
    assert_equal_to_pytorch(mask, torch.float32, queries=70, keys=700)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("queries", "keys"), [(20, 30), (20, 20), (1, 30)])
def test_causal_biases_are_read_as_pytorch_reads_them(make, queries, keys):
    query, key, value = (torch.randn(2, 1, size, 16) for size in (queries, keys, keys))
    bias = make(queries, keys)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(dgt.dense_attention(query, key, value, attn_mask=bias), expected)


def test_other_subclasses_decide_for_themselves():
    class Logged(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls += function is F.scaled_dot_product_attention
            return super().__torch_function__(function, types, args, kwargs or {})

    query = torch.randn(1, 2, 9, 8).as_subclass(Logged)
    assert isinstance(dgt.dense_attention(query, query, query), Logged)
    assert Logged.calls == 1
    assert type(dgt.dense_attention(*[nn.Parameter(torch.randn(1, 2, 9, 8))] * 3)) is Tensor


@needs_native
def test_backends_that_the_caller_leaves_out_are_left_out(monkeypatch):
    calls = []
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1))
    inputs = torch.randn(3, 1, 2, 9, 8)
    dgt.dense_attention(*inputs)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        dgt.dense_attention(*inputs)
    assert not calls
    with sdpa_kernel(SDPBackend.MATH):
        dgt.dense_attention(*inputs)
    assert len(calls) == 1


def test_a_scale_is_a_number_as_in_pytorch():
    inputs = torch.randn(3, 1, 2, 9, 8)
    expected = dgt.dense_attention(*inputs, scale=0.25)
    torch.testing.assert_close(dgt.dense_attention(*inputs, scale=torch.tensor(0.25)), expected)
    for wrong in (torch.tensor(0.25, requires_grad=True), torch.tensor([0.25])):
        with pytest.raises(TypeError, match="scale"):
            dgt.dense_attention(*inputs, scale=wrong)


def test_transforms_of_torch_func():
    query, key, value = torch.randn(3, 2, 2, 9, 8)

    def loss(attention, query):
        return attention(query, key, value).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        ours = transform(lambda query: loss(dgt.dense_attention, query))(query)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = transform(lambda query: loss(F.scaled_dot_product_attention, query))(query)
        torch.testing.assert_close(ours, theirs)
    singly = torch.vmap(lambda query: dgt.dense_attention(query, key[0], value[0]))(query)
    torch.testing.assert_close(singly[1], dgt.dense_attention(query[1], key[0], value[0]))
