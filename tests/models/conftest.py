"""Shared by the tests of models: a very small network with all features of the large ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

import dgt

TINY = {
    "stem_width": 8,
    "dims": (16, 16, 32, 32),
    "num_heads": (1, 2, 2, 2),
    "depths": (1, 2, 2, 1),
    "head_width": 24,
}


def make_model(seed: int = 5, **options) -> dgt.DynamicGroupTransformer:
    """A shrunken ``dgt_nano`` with ten classes and norms as after training, in evaluation mode."""
    torch.manual_seed(seed)
    model = timm.create_model(
        "dgt_nano", **{"num_classes": 10, "num_groups": 5, "top_k": 7, **TINY, **options}
    )
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, 0.0, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
        if isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(part.weight, 1.0, 0.2)
            nn.init.normal_(part.bias, 0.0, 0.2)
    return model.eval()


@pytest.fixture
def small() -> Callable[..., dgt.DynamicGroupTransformer]:
    """The function :func:`make_model`."""
    return make_model
