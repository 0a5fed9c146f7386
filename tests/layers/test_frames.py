"""How many of our functions a query passes through to the C++ kernel."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import dgt
from dgt.ops.cpu import library

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)
SOURCE = str(Path(dgt.__file__).parent)
LAST = "run"  # of dgt.ops.cpu.interface, which calls the kernel


def calls_before_kernel(function: Callable[[], Any]) -> list[str]:
    """Names of our functions, as often as they are called until the kernel is."""
    called: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        ours = frame.f_code.co_filename.startswith(SOURCE)
        if event == "call" and ours and LAST not in called:
            called.append(frame.f_code.co_name)

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert LAST in called
    return called


@pytest.mark.parametrize("residual_keys", [0, 1])
@torch.no_grad()
def test_from_a_layer_to_the_kernel(residual_keys: int) -> None:
    layer = dgt.DGAttention(
        64, num_heads=2, num_groups=8, top_k=10, residual_keys=residual_keys
    ).eval()
    x = torch.randn(1, 49, 64)
    layer(x)  # what is loaded once
    called = calls_before_kernel(lambda: layer(x))
    assert len(called) <= 13, called
    assert len(set(called)) >= len(called) - 1, called  # the operator and its kernel share a name


def frames_above_kernel(function: Callable[[], Any]) -> list[str]:
    """Names of our functions that wait for the kernel when it is called first."""
    waiting: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        ours = frame.f_code.co_filename.startswith(SOURCE)
        if event == "call" and ours and frame.f_code.co_name == LAST and not waiting:
            while frame is not None:
                if frame.f_code.co_filename.startswith(SOURCE):
                    waiting.append(frame.f_code.co_name)
                frame = frame.f_back

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert waiting
    return waiting


@torch.no_grad()
def test_from_an_accelerated_module_to_the_kernel(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=32, num_heads=2).eval()
    site = {"name": "blocks.0.attn", "heads": 2, "channels": 16, "tokens": 197}
    site |= {"key_tokens": 197, "prefix": 1, "choice": "groups", "groups": 8, "keys": 16}
    site |= {"residual_keys": 4, "least_tokens": 16}
    report = dict.fromkeys(("asked_error", "predicted_error", "measured_error"), 0.1)
    report |= {"attention_speedup": 2.0, "model_speedup": 1.5, "bound": 2.0, "layers": [site]}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"format": "dgt-plan-2", "report": report}))
    dgt.apply_plan(model, plan)
    images = torch.randn(1, 3, 224, 224)
    model(images)  # what is loaded once
    waiting = frames_above_kernel(lambda: model(images))
    assert len(waiting) <= 12, waiting
    called = calls_before_kernel(lambda: model(images))
    assert len(called) <= 30, called
