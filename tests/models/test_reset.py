"""A model made on the meta device is as a new one after `to_empty` and `init_weights`: nothing stays uninitialized."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import dgt  # registers the models
from dgt.models.from_transformers import BUILDERS
from dgt.models.variants import ROWS

SMALL = {
    "dims": (16, 32, 32, 64),
    "num_heads": (2, 2, 2, 4),
    "depths": (1, 2, 1, 1),
    "stem_width": 8,
    "head_width": 32,
}
SIZES = {
    **dict.fromkeys(ROWS, SMALL),
    **{name: {"depths": (1, 1, 1, 1)} for name in BUILDERS if name.startswith("pvt")},
    **{name: {"depths": (1, 2, 3)} for name in BUILDERS if name.startswith("cvt")},
    **{
        name: {"depth": 2, "embed_dim": 48, "num_heads": 2}
        for name in BUILDERS
        if name.startswith("cpvt")
    },
}


def build_from_anything(name: str) -> nn.Module:
    """A model in memory that held anything, after its reset."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5, **SIZES[name])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 12345)
    model.init_weights()
    return model


def is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


@pytest.mark.parametrize("name", SIZES)
def test_a_reset_model_is_as_a_new_one(name) -> None:
    new = timm.create_model(name, num_classes=5, **SIZES[name])
    made = build_from_anything(name)
    buffers = dict(made.named_buffers())
    for place, expected in new.named_buffers():
        assert torch.equal(buffers[place], expected), place
    parameters = dict(made.named_parameters())
    for place, expected in new.named_parameters():
        found = parameters[place]
        if is_constant(expected):
            assert torch.equal(found, expected), place
        else:
            assert found.isfinite().all(), place
        if expected.numel() >= 256 and not is_constant(expected):
            assert 0.5 < found.std() / expected.std() < 2, place


@pytest.mark.parametrize("cosine", [False, True])
def test_a_layer_resets_all_that_it_has(cosine) -> None:
    layer = dgt.DGAttention(16, 2, num_groups=5, top_k=6, cosine=cosine, device="meta")
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 12345)
    layer.reset_parameters()
    tokens = torch.randn(2, 6, 5, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(tokens).square().mean().backward()
    optimizer.step()
    assert layer.num_updates == 1
    assert all(value.isfinite().all() for value in layer.state_dict().values())
