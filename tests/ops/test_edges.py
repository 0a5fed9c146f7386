"""At the edges of values and types every backend is the reference in double precision, up to rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt

from .conftest import FAST

HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ("reference", *FAST, *(["triton"] if HAS_TRITON else []))
TOKENS, GROUPS = 12, 3
GROUP_IDS = torch.arange(TOKENS).remainder(GROUPS).expand(1, 2, -1).contiguous()
KEY_IDS = torch.arange(TOKENS).view(GROUPS, -1).expand(1, 2, -1, -1).contiguous()
NONE = torch.zeros(1, TOKENS, dtype=torch.bool)
FEW = torch.arange(TOKENS)[None] < 2
LARGEST = torch.finfo(torch.float16).max

pytestmark = [
    pytest.mark.parametrize("backend", BACKENDS),
    pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str),
]


def draw(
    dtype: torch.dtype, queries: int = TOKENS, keys: int = TOKENS, channels: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of two heads."""
    generator = torch.Generator().manual_seed(3)
    counts = (queries, keys, keys)
    return tuple(
        torch.randn(1, 2, count, channels, generator=generator).to(dtype) for count in counts
    )


def draw_centroids(groups: int = GROUPS, channels: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return F.normalize(torch.randn(2, groups, channels, generator=generator), dim=-1)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype, largest_score: float = 1.0) -> None:
    """Compare with what double precision gives.

    The output is rounded once and its summands a few times; scores are sums in float32.
    """
    rounding = 4 * torch.finfo(dtype).eps + 2e-6 * max(1.0, largest_score)
    assert found.dtype == dtype
    assert found.isfinite().all()
    allowed = rounding * max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) <= allowed


WHOLE: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "one key": lambda _: {"top_k": 1},
    "all keys": lambda _: {"top_k": TOKENS},
    "more keys than there are": lambda _: {"top_k": 99},
    "one group": lambda _: {"centroids": draw_centroids(1)},
    "more groups than tokens": lambda _: {"centroids": draw_centroids(40)},
    "one query": lambda dtype: dict(zip(OPERANDS, draw(dtype, 1), strict=True)),
    "one key there is": lambda dtype: dict(zip(OPERANDS, draw(dtype, TOKENS, 1), strict=True)),
    "one channel": lambda dtype: {
        **dict(zip(OPERANDS, draw(dtype, channels=1), strict=True)),
        "centroids": draw_centroids(channels=1),
    },
    "equal keys": lambda dtype: {"key": torch.ones(1, 2, TOKENS, 16, dtype=dtype)},
    "zeros": lambda dtype: dict.fromkeys(OPERANDS, torch.zeros(1, 2, TOKENS, 16, dtype=dtype)),
    "no real key": lambda _: {"key_mask": NONE},
    "no real query": lambda _: {"query_mask": NONE},
    "no real token": lambda _: {"key_mask": NONE, "query_mask": NONE},
    "fewer real keys than top_k": lambda _: {"key_mask": FEW},
    "one prefix token": lambda _: {"num_prefix_tokens": 1},
    "all but one prefix tokens": lambda _: {"num_prefix_tokens": TOKENS - 1},
    "no scale": lambda _: {"scale": 0.0},
    "negative scale": lambda _: {"scale": -0.25},
    "large scores": lambda _: {"scale": 1000.0},
    "largest values": lambda dtype: {
        "value": torch.full((1, 2, TOKENS, 16), LARGEST, dtype=dtype)
    },
    "largest queries": lambda dtype: {
        "query": torch.full((1, 2, TOKENS, 16), LARGEST, dtype=dtype), "scale": 1e-5
    },
}  # fmt: skip
OPERANDS = ("query", "key", "value")


@pytest.mark.parametrize("residual_keys", [0, 1])
@pytest.mark.parametrize("edge", WHOLE)
def test_the_whole(edge: str, residual_keys: int, backend: str, dtype: torch.dtype) -> None:
    call: dict[str, Any] = dict(zip(OPERANDS, draw(dtype), strict=True))
    call |= {"centroids": draw_centroids(), "top_k": 4, "residual_keys": residual_keys}
    call |= WHOLE[edge](dtype)
    found = dgt.dynamic_group_attention(**call, backend=backend)
    wide = {name: call[name].double() for name in OPERANDS}
    expected = dgt.dynamic_group_attention(**{**call, **wide}, backend="reference")
    assert torch.equal(found.group_ids, expected.group_ids)
    assert torch.equal(found.key_ids, expected.key_ids)
    query, key = wide["query"], wide["key"]
    scale = call.get("scale", query.shape[-1] ** -0.5)
    largest = float((query @ key.mT * scale).abs().max())
    check(found.output, expected.output, dtype, largest)


def choice_with(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Groups and lists of keys, without the keys of no weight."""
    is_out = bias.isneginf()[:, :, None].expand(-1, -1, GROUPS, -1).gather(-1, KEY_IDS)
    return GROUP_IDS, KEY_IDS.masked_fill(is_out, -1)


LOWEST = {
    "minus infinity": -torch.inf,
    "the lowest number of float16": -LARGEST,
    "the lowest number": torch.finfo(torch.float32).min,
}


@pytest.mark.parametrize("places", [[2], [0, 1, 2, 3]], ids=["a key", "a group"])
@pytest.mark.parametrize("lowest", LOWEST)
def test_keys_of_no_weight(
    lowest: str, places: list[int], backend: str, dtype: torch.dtype
) -> None:
    """Of minus infinity they are as if they were not listed; any other number is one."""
    operands = draw(dtype)
    bias = torch.linspace(-1, 1, TOKENS).expand(1, 2, -1).clone()
    bias[..., places] = LOWEST[lowest]
    found = dgt.attend_with_logsumexp(*operands, GROUP_IDS, KEY_IDS, backend=backend, key_bias=bias)
    assert (
        dgt.attend(*operands, GROUP_IDS, KEY_IDS, backend=backend, key_bias=bias).isfinite().all()
    )
    ids = choice_with(bias)
    finite = bias.double().masked_fill(bias.isneginf(), 0.0)
    wide = [tensor.double() for tensor in operands]
    expected = dgt.attend_with_logsumexp(*wide, *ids, backend="reference", key_bias=finite)
    # Beside a large number scores are rounded; beside the largest nothing is left of them.
    sees = (expected[1] > -1e4) | (expected[1] < -1e6)
    assert torch.equal(found[1].isneginf(), expected[1].isneginf())
    check(found[0] * sees[..., None], expected[0] * sees[..., None], dtype)
    assert not found[0][expected[1].isneginf()].any()


@pytest.mark.parametrize(
    "of", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_a_bias_of_any_type(of: torch.dtype, backend: str, dtype: torch.dtype) -> None:
    operands = draw(dtype)
    bias = torch.linspace(-1, 1, TOKENS).expand(1, 2, -1).to(of)
    call = {"group_ids": GROUP_IDS, "key_ids": KEY_IDS, "key_bias": bias}
    found = dgt.attend(*operands, **call, backend=backend)
    wide = [tensor.double() for tensor in operands]
    check(found, dgt.attend(*wide, **call, backend="reference"), dtype)
    for wrong in (torch.inf, torch.nan):
        call["key_bias"] = bias.masked_fill(torch.arange(TOKENS) == 5, wrong)
        with pytest.raises(ValueError, match="key_bias must be below infinity"):
            dgt.attend(*operands, **call, backend=backend)
