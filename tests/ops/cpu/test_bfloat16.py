"""Products of bfloat16 by the processor's instructions: who uses it, who does not, and what it costs in accuracy."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.ops.cpu import library

LEVELS = ("x86-64-v4-bf16", "x86-64-v4-amx")
WITHOUT = "x86-64-v4"

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """A level with an instruction for products of bfloat16, if this processor has it."""
    name: str = request.param
    if not library.has_level(name):
        pytest.skip(f"this processor has {library.processor_level()}")
    return name


def make_inputs(dtype: torch.dtype, channels: int = 32, tokens: int = 196) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, 3, tokens, channels)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def make_centroids(channels: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return F.normalize(torch.randn(3, 12, channels, generator=generator), dim=-1)


def attend(inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, grouped and dense; outputs of clustered attention."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    centroids = make_centroids(inputs[0].shape[-1])
    grouped = dgt.dynamic_group_attention(*leaves, centroids, 60).output
    found = []
    for output in (grouped, dgt.dense_attention(*leaves)):
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
        found += [output, *torch.autograd.grad(output, leaves, weights)]
    for first_order in (False, True):
        found.append(
            dgt.clustered_attention(
                *inputs,
                num_groups=12,
                top_k=20,
                residual_keys=7,
                num_prefix_tokens=1,
                first_order=first_order,
            )
        )
    return [tensor.detach() for tensor in found]


def attend_at(level: str, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The same with the library of one level."""
    loaded = ctypes.CDLL(str(library.FOLDER / f"dgt_native_{level}.kernels"))
    loaded.dgt_lanes.restype = ctypes.c_int
    with monkeypatch.context() as patch:
        patch.setattr(library, "load", lambda: loaded)
        return attend(inputs)


@pytest.mark.parametrize(
    ("dtype", "channels"), [(torch.float32, 32), (torch.float16, 32), (torch.bfloat16, 33)]
)
@pytest.mark.parametrize("tokens", [196, 700])
def test_other_types_and_odd_channels_are_unchanged_to_the_bit(
    dtype: torch.dtype, channels: int, tokens: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(dtype, channels, tokens)
    expected = attend_at(WITHOUT, inputs, monkeypatch)
    for before, now in zip(expected, attend_at(level, inputs, monkeypatch), strict=True):
        assert torch.equal(before, now)


def test_bfloat16_is_multiplied_by_the_instruction(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded weights change a few last places."""
    inputs = make_inputs(torch.bfloat16)
    expected = attend_at(WITHOUT, inputs, monkeypatch)
    for before, now in zip(expected, attend_at(level, inputs, monkeypatch), strict=True):
        assert not torch.equal(before, now)
        torch.testing.assert_close(before, now, rtol=2**-6, atol=2**-6 * before.abs().max().item())


@pytest.mark.parametrize("channels", [18, 32, 33])
@pytest.mark.parametrize("tokens", [50, 700])
def test_ids_are_those_of_the_same_numbers_in_float32(channels: int, tokens: int) -> None:
    inputs = make_inputs(torch.bfloat16, channels, tokens)
    centroids = make_centroids(channels)
    found = dgt.dynamic_group_attention(*inputs, centroids, 40)
    expected = dgt.dynamic_group_attention(*[tensor.float() for tensor in inputs], centroids, 40)
    assert torch.equal(found.group_ids, expected.group_ids)
    assert torch.equal(found.key_ids, expected.key_ids)


@pytest.mark.parametrize("tokens", [196, 700])
def test_tokens_may_begin_at_any_address(tokens: int) -> None:
    """Two channels are read at a time, also where they are not aligned to four bytes."""
    inputs = make_inputs(torch.bfloat16, 32, tokens)
    moved = []
    for tensor in inputs:
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        moved.append(memory[1:].view(tensor.shape).copy_(tensor))
        assert moved[-1].data_ptr() % 4 == 2
    for expected, found in zip(attend(inputs), attend(moved), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("tokens", [30, 196])
def test_values_of_keys_that_no_group_selects_are_not_read(value: float, tokens: int) -> None:
    query, key, values = make_inputs(torch.bfloat16, 32, tokens)
    alike = 1 + 0.01 * torch.cat([make_centroids(32), -make_centroids(32)], 1)
    top_k = tokens // 2
    expected = dgt.dynamic_group_attention(query, key, values, alike, top_k)
    unused = torch.ones(2, 3, tokens, dtype=torch.bool)
    unused.scatter_(2, expected.key_ids.flatten(2), False)
    assert unused.any(2).all()
    assert (expected.group_ids.flatten(1).amax(1) > 0).all()
    changed = values.masked_fill(unused[..., None], value)
    found = dgt.dynamic_group_attention(query, key, changed, alike, top_k)
    assert torch.equal(found.output, expected.output)


@pytest.mark.parametrize(("channels", "tokens"), [(32, 196), (64, 500), (18, 333)])
def test_dense_attention_and_its_gradients_err_no_more_than_pytorch(
    channels: int, tokens: int
) -> None:
    inputs = [tensor.requires_grad_() for tensor in make_inputs(torch.bfloat16, channels, tokens)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for attention, operands in (
        (dgt.dense_attention, inputs),
        (F.scaled_dot_product_attention, inputs),
        (F.scaled_dot_product_attention, exact),
    ):
        output = attention(*operands)
        results.append([output, *torch.autograd.grad(output, operands, grad.to(output.dtype))])
    for ours, theirs, right in zip(*results, strict=True):
        assert (ours.double() - right).abs().max() <= 1.5 * (theirs.double() - right).abs().max()


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize(
    ("channels", "tokens", "prefix", "top_k", "residual_keys"),
    [
        (64, 500, 1, 40, 20),
        (18, 333, 0, 3, 1),
        (32, 197, 5, 1, 40),
        (48, 130, 1, 129, 2),
    ],
)
def test_clustered_attention_errs_no_more_than_pytorch(
    channels: int, tokens: int, prefix: int, top_k: int, residual_keys: int, first_order: bool
) -> None:
    inputs = make_inputs(torch.bfloat16, channels, tokens)
    exact = [tensor.double() for tensor in inputs]
    sizes = {
        "num_groups": 14,
        "top_k": top_k,
        "residual_keys": residual_keys,
        "num_prefix_tokens": prefix,
        "first_order": first_order,
    }
    ours = dgt.clustered_attention(*inputs, **sizes, backend="native").double()
    theirs = F.scaled_dot_product_attention(*inputs).double()
    error = (ours - dgt.clustered_attention(*exact, **sizes)).abs().max()
    rounding = (theirs - F.scaled_dot_product_attention(*exact)).abs().max()
    assert error <= 1.5 * rounding
