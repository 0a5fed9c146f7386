"""The operator's steps as ONNX: equal to eager for any number of tokens, with the same ties, in both modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dgt.inference import Source, encode_onnx, open_onnx
from dgt.layers import InvertedResidualFFN

pytest.importorskip("onnxscript", reason="onnx, onnxscript and onnxruntime are not installed")
pytest.importorskip("onnxruntime", reason="onnx, onnxscript and onnxruntime are not installed")

Check = Callable[[Tensor], None]


@pytest.fixture(scope="module")
def check(steps: nn.Module, same_as_eager: Callable[..., None]) -> Check:
    """Whether a file for any size gives the same result as eager mode."""
    return partial(
        same_as_eager, open_onnx(encode_onnx(Source(steps, ("groups", "keys", "output"))))
    )


# Up to 30 tokens = 2 (k + G) attend densely, and 8 or fewer are less than k; from 31 on there are
# tiles, and from 145 on (above 16 k) keys are selected by runs.
@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    height=st.integers(1, 24),
    width=st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_equal_to_eager_for_any_size(
    check: Check, batch: int, height: int, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(torch.randn(batch, 3, height, width, generator=generator))


@settings(max_examples=40)
@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    most=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_ties_go_to_the_lowest_as_in_eager(
    check: Check, height: int, width: int, most: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(torch.randint(-most, most + 1, (2, 3, height, width), generator=generator).float())


def test_a_group_may_be_larger_than_a_tile_and_others_empty(check: Check) -> None:
    images = torch.randn(1, 3, 1, 1).expand(2, 3, 40, 40) + 0.01 * torch.randn(2, 3, 40, 40)
    check(images.contiguous())


class Gelus(nn.Module):
    """Both variants of GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> list[Tensor]:
        return [F.gelu(images * self.one), F.gelu(images * self.one, approximate="tanh")]


def test_gelu() -> None:
    module = Gelus().eval()
    images = torch.linspace(-6, 6, 3 * 40 * 40).view(1, 3, 40, 40)
    found = open_onnx(encode_onnx(Source(module, ("exact", "tanh"))))(images)
    with torch.no_grad():
        # 1 + erf(x) cancels for negative x: the error is one unit in the last place of 1, times x.
        torch.testing.assert_close(found, module(images), rtol=1e-5, atol=6 * 2**-22)


class Pools(nn.Module):
    """UperNet's pooling layers, and one with unequal sides."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> list[Tensor]:
        return [F.adaptive_avg_pool2d(images * self.one, size) for size in (1, 2, 3, 6, (4, 5))]


def test_adaptive_pooling_of_any_size() -> None:
    module = Pools().eval()
    run = open_onnx(encode_onnx(Source(module, tuple("abcde"))))
    for height, width in ((33, 40), (7, 5), (3, 2), (1, 9), (64, 64)):
        images = torch.randn(2, 3, height, width)
        with torch.no_grad():
            torch.testing.assert_close(run(images), module(images), rtol=1e-5, atol=1e-6)


class Image(nn.Module):
    """A feed-forward network between images."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = InvertedResidualFFN(4)

    def forward(self, images: Tensor) -> Tensor:
        x = images.repeat(1, 2, 1, 1)[:, :4].permute(0, 2, 3, 1)
        return x + self.ffn(x)


def test_linears_between_convolutions_are_convolutions() -> None:
    """Else runtimes would copy images out of their layout and back."""
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    model, images = Image().eval(), torch.randn(1, 3, 32, 32)
    content = encode_onnx(Source(model, fixed=(1, 32, 32)))
    kinds = [node.op_type for node in onnx.load_from_string(content).graph.node]
    assert kinds.count("Conv") == 3
    assert "MatMul" not in kinds
    assert "Unsqueeze" not in kinds  # weights are ready
    torch.testing.assert_close(open_onnx(content)(images)[0], model(images), rtol=0, atol=1e-5)
