"""The examples of training in loops of others: weights learn, centroids move, what is saved opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.data.scenes import KINDS
from dgt.runs import load_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EPOCHS, IMAGES, STEPS = 2, 40, 4  # two batches an epoch


@pytest.fixture
def train(
    load_script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[nn.Module, float]]:
    """The function `train` of an example by name, at small scale."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    return lambda name, **options: load_script(EXAMPLES / f"{name}.py").train(
        EPOCHS, IMAGES, **options
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain_loop", {}),
        (
            "lightning_module",
            {"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
        ),
        ("hf_trainer", {"out": "out"}),
    ],
)
def test_a_loop_of_others_trains_a_dgt(
    name: str,
    options: dict[str, Any],
    train: Callable[..., tuple[nn.Module, float]],
    tmp_path: Path,
) -> None:
    model, accuracy = train(name, **options)
    assert 0 <= accuracy <= 1
    before = timm.create_model("dgt_nano.imagenette", pretrained=True)
    layers, first = (
        [module for module in network.modules() if isinstance(module, dgt.DGAttention)]
        for network in (model, before)
    )
    for layer, old in zip(layers, first, strict=True):
        assert layer.num_updates == old.num_updates + STEPS
        assert not torch.equal(layer.centroids, old.centroids)
        assert not torch.equal(layer.qkv.weight, old.qkv.weight)
    if "out" in options:
        images, run = torch.randn(1, 3, 64, 64), load_run(tmp_path / "out")
        assert run.class_names == list(KINDS)
        model.eval()
        with torch.inference_mode():
            assert torch.equal(run.network(images), model(images).logits)
