"""The matcher of the examples: its attention is kornia's, and groups are found in it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("kornia")

from kornia.feature.lightglue import CrossBlock

from dgt.acceleration import inspect_model
from examples import matcher as example


@torch.no_grad()
def test_the_same_as_kornias() -> None:
    torch.manual_seed(0)
    theirs = CrossBlock(32, 2).eval()
    ours = CrossBlock(32, 2).eval()
    ours.load_state_dict(theirs.state_dict())
    ours.__class__ = example.CrossAttention
    first, second = torch.randn(2, 9, 32), torch.randn(2, 13, 32)
    real = (torch.rand(2, 9, 1) < 0.7) & (torch.rand(2, 1, 13) < 0.7)
    for mask in (None, real[:, None]):
        for found, expected in zip(
            ours(first, second, mask), theirs(first, second, mask), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_its_cross_attention_is_seen(capsys) -> None:
    matcher = example.make_matcher(None)
    items = [(example.random_pair(number, 260),) for number in range(2)]
    names = [site.name for site in inspect_model(matcher, items) if not site.reason]
    assert sum(name.endswith("cross_attn") for name in names) == len(matcher.transformers)
