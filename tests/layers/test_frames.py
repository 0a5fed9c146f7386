"""How many of our functions a query passes through from a layer to the C++ kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


@torch.no_grad()
def test_from_a_layer_to_the_kernel() -> None:
    layer = dgt.DGAttention(64, num_heads=2, num_groups=8, top_k=10).eval()
    x = torch.randn(1, 49, 64)
    layer(x)  # what is loaded once
    called = calls_before_kernel(lambda: layer(x))
    assert len(called) <= 12, called
    assert len(set(called)) >= len(called) - 1, called  # the operator and its kernel share a name
