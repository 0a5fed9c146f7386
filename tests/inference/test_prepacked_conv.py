"""Packed convolutions give what plain ones give, notice new weights, and step aside where oneDNN's path cannot go."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dgt.inference.prepacked_conv import PACKABLE, PACKED, PackedConv

needs_packing = pytest.mark.skipif(torch.float32 not in PACKABLE, reason="this PyTorch has no oneDNN")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(1, 1, 0), (3, 1, 1), (3, 2, 1), (7, 4, 2)]),
    *(st.booleans() for _ in range(4)),
)
def test_it_gives_what_a_convolution_and_gelu_give(shape, place, depthwise, bias, gelu, channels_last) -> None:
    batch, height, width = shape
    kernel, stride, padding = place
    conv = nn.Conv2d(8, 8, kernel, stride, padding, groups=8 if depthwise else 1, bias=bias)
    x = torch.randn(batch, 8, height + kernel, width + kernel)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    packed = PackedConv(conv, gelu=gelu)
    with torch.no_grad():
        for size in (x, x[:, :, 1:, :-1]):  # packed for the one size, it takes another
            expected = F.gelu(conv(size)) if gelu else conv(size)
            torch.testing.assert_close(packed(size), expected, rtol=1e-5, atol=1e-5)


@needs_packing
@torch.no_grad()
def test_weights_are_packed_once_and_anew_when_they_change() -> None:
    first, second, x = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), torch.randn(1, 4, 5, 6)
    packed = PackedConv(copy.deepcopy(first))
    before = len(PACKED)
    torch.testing.assert_close(packed(x), first(x))
    kept = PACKED[packed.weight]
    packed(x)
    assert PACKED[packed.weight] is kept
    packed.load_state_dict(second.state_dict())
    torch.testing.assert_close(packed(x), second(x))
    assert len(PACKED) == before + 1
    del packed
    assert len(PACKED) == before


@needs_packing
@torch.no_grad()
def test_other_weights_at_the_same_address_are_packed_anew() -> None:
    """As a round trip of types gives, whose result may take the memory that the first weights left."""
    memory, x = np.random.default_rng(0).normal(size=(8, 8, 1, 1)).astype(np.float32), torch.randn(1, 8, 3, 4)
    packed = PackedConv(nn.Conv2d(8, 8, 1))
    for _ in range(2):
        packed.weight.data = torch.from_numpy(memory)  # a storage of its own each time, the same address and version
        torch.testing.assert_close(packed(x), F.conv2d(x, packed.weight, packed.bias))
        memory += 1


@torch.no_grad()
def test_weights_without_a_version_are_notPACKED() -> None:
    with torch.inference_mode():
        packed, x = PackedConv(copy.deepcopy(nn.Conv2d(4, 4, 1)), gelu=True), torch.randn(1, 4, 5, 6)
        assert packed.weight.is_inference()
        packed(x)
        packed.weight.mul_(2)
        torch.testing.assert_close(packed(x), F.gelu(F.conv2d(x, packed.weight, packed.bias)))


@torch.no_grad()
def test_it_is_copied_and_pickled() -> None:
    packed, x = PackedConv(nn.Conv2d(4, 4, 3, padding=1), gelu=True), torch.randn(1, 4, 5, 6)
    expected = packed(x)
    for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        torch.testing.assert_close(twin(x), expected)


@pytest.mark.parametrize("size", [(5, 6), (1, 1)])
@torch.no_grad()
def test_a_compiler_takes_it_as_one_operator(size) -> None:
    conv, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, *size).contiguous(memory_format=torch.channels_last)
    torch.compiler.reset()
    compiled = torch.compile(PackedConv(conv, gelu=True), fullgraph=True)
    torch.testing.assert_close(compiled(x), F.gelu(conv(x)), rtol=1e-5, atol=1e-5)


def test_gradients_flow_to_the_input() -> None:
    conv, x = nn.Conv2d(4, 4, 3, padding=1), torch.randn(1, 4, 5, 6, requires_grad=True)
    expected = torch.autograd.grad(F.gelu(conv(x)).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(PackedConv(conv, gelu=True)(x).sum(), x)[0], expected)


@torch.no_grad()
def test_types_and_devices() -> None:
    conv, x = nn.Conv2d(4, 4, 1), torch.randn(1, 4, 5, 6)
    packed = PackedConv(conv)
    assert packed.double()(x.double()).dtype == torch.float64
    assert packed.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert packed.to("meta")(x.bfloat16().to("meta")).shape == (1, 4, 5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert PackedConv(conv)(x).dtype == torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(PackedConv(nn.Conv2d(4, 4, 1))(x).shape, x.shape)
