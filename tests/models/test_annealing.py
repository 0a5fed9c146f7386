"""Annealed k: from all tokens down to the layer's own k, only in training."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.models.annealing import TopKAnnealing, annealed_top_k


def test_k_falls_from_all_tokens_to_the_layers_own() -> None:
    """Linearly toward 0, stopping at the layer's k."""
    assert [annealed_top_k(16, 256, done) for done in (0, 0.25, 0.5, 0.9, 1, 7)] == [
        256,
        192,
        128,
        26,
        16,
        16,
    ]
    assert annealed_top_k(98, 49, 0.0) == 98


@pytest.mark.parametrize("residual_keys", [0, 1, 5])
@pytest.mark.parametrize(("start", "expected"), [(None, [64, 16, 2]), (8, [8, 2, 2])])
def test_a_layer_has_its_own_k_in_evaluation(
    start: int | None, expected: list[int], residual_keys: int
) -> None:
    """In evaluation the output is unaffected by annealing; in training it starts as global attention."""
    torch.manual_seed(0)
    layer = dgt.DGAttention(8, 2, num_groups=3, top_k=2, residual_keys=residual_keys)
    x = torch.randn(1, 8, 8, 8)
    layer.train()(x)
    plain = layer.eval()(x)
    annealing = TopKAnnealing(nn.Sequential(layer), 0.5, start)
    for progress, top_k in zip((0.0, 0.375, 1.0), expected, strict=True):
        annealing.progress = progress
        layer.train()(x)
        assert layer.top_k == top_k
        assert torch.equal(layer.eval()(x), plain)
        assert layer.top_k == 2


def test_a_model_without_groups_is_refused() -> None:
    """There is nothing to anneal; without a schedule any model works."""
    model = timm.create_model("test_vit")
    TopKAnnealing(model, None)
    with pytest.raises(ValueError, match="must contain DGAttention layers"):
        TopKAnnealing(model, 0.5)
