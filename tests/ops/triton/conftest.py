"""Kernels run on the GPU if there is one, otherwise in Triton's interpreter; fresh memory is full of NaN.

The interpreter must be switched on before anything imports Triton: the suite's own conftest does so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton

import dgt


@pytest.fixture(autouse=True)
def _runnable() -> None:
    """Fail with a clear message if kernels can run neither on a GPU nor in the interpreter."""
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.fail(
            "set TRITON_INTERPRET=1 for this run: Triton was imported before the interpreter was switched on"
        )


@pytest.fixture(autouse=True)
def _usable_device() -> Iterator[None]:
    """End a process whose device refuses everything since an illegal access, or all later tests would fail of it.

    pytest-xdist begins another.
    """
    yield
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            time.sleep(1.0)  # until the test's own failure has been told
            os._exit(1)
        pytest.exit(f"the device takes nothing more from this process: {error}", returncode=1)


@pytest.fixture(scope="session")
def device() -> str:
    """The device on which kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an allocation return NaN, or huge ids."""

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        tensor = allocate(*arguments, **options)
        if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
            return tensor.fill_(torch.nan)
        return tensor.fill_(min(0x3F3F3F3F, torch.iinfo(tensor.dtype).max))

    return poisoned


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything that a kernel does not write becomes visible."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", _poisoned(Tensor.new_empty))


class Case(NamedTuple):
    """Inputs for the operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor
    top_k: int
    query_mask: Tensor | None
    key_mask: Tensor | None

    def ids(self) -> tuple[Tensor, Tensor]:
        """Groups and keys from the plain path."""
        groups = dgt.group_queries(self.query, self.centroids, self.query_mask, "torch")
        return groups, dgt.select_keys(self.centroids, self.key, self.top_k, self.key_mask, "torch")


@pytest.fixture
def make_case(device: str) -> Callable[..., Case]:
    """Inputs whose scores are exact in any order of summation, so that ids can be compared one by one.

    Queries, keys and centroids are multiples of 1/4, which makes ties frequent. Heads are interleaved in memory, as a
    layer's projection leaves them.
    """

    def make(
        batch: int, heads: int, tokens: int, channels: int, groups: int, top_k: int,
        dtype: torch.dtype = torch.float32, masked: bool = False, exact: bool = True,
    ) -> Case:  # fmt: skip
        def round_off(x: Tensor) -> Tensor:
            return (4 * x).round() / 4 if exact else x

        qkv = torch.randn(batch, tokens, 3, heads, channels)
        query, key, value = round_off(qkv).to(device, dtype).permute(2, 0, 3, 1, 4).unbind(0)
        centroids = round_off(F.normalize(torch.randn(heads, groups, channels), dim=-1)).to(device)
        masks = (torch.rand(2, batch, tokens) > 0.3).to(device) if masked else (None, None)
        tensors = (t.detach().requires_grad_() for t in (query, key, value))
        return Case(*tensors, centroids, top_k, *masks)

    return make
