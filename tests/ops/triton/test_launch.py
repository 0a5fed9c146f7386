"""Planned launches: for whom a plan holds, what it keeps, and whose memory results lie in."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import dgt
from dgt.ops.triton.launch import recording

pytestmark = pytest.mark.usefixtures("poison")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads interleaved": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "contiguous": lambda x: x.contiguous(),
    "channels apart": lambda x: x.mT.contiguous().mT,
    "a part of more": lambda x: torch.cat([x, x, x], dim=-1).chunk(3, dim=-1)[1],
}


def attend(
    tensors: tuple[Tensor, ...], case: Any, scale: float, backend: str
) -> tuple[Tensor, ...]:
    """Output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = dgt.dynamic_group_attention(
        *leaves, case.centroids, case.top_k, scale, backend=backend
    ).output
    return (output.detach(), *torch.autograd.grad(output.square().sum(), leaves))


@pytest.mark.parametrize("tokens", [24, 260], ids=["few tokens", "many tokens"])
def test_tensors_of_one_shape_that_lie_differently(make_case: Any, tokens: int) -> None:
    """One after the other, and the first again with another scale: nobody gets the plan of another."""
    scale = 0.2
    for lay in (*LAYOUTS.values(), LAYOUTS["heads interleaved"]):
        case = make_case(1, 2, tokens, 8, 2, 5)
        tensors = tuple(lay(tensor.detach()) for tensor in case[:3])
        found = attend(tensors, case, scale, "triton")
        expected = attend(case[:3], case, scale, "reference")
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        scale = -0.3


@pytest.mark.parametrize("tokens", [40, 270], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("return_ids", [True, False], ids=["with ids", "without"])
def test_results_have_memory_of_their_own(make_case: Any, tokens: int, return_ids: bool) -> None:
    """None keeps buffers of the call alive, or shares them with another."""
    case = make_case(1, 1, tokens, 8, 2, 5)
    results = torch.ops.dgt.attention(
        *(tensor.detach() for tensor in case[:4]),
        top_k=5,
        scale=0.25,
        query_mask=None,
        key_mask=None,
        num_prefix_tokens=0,
        residual_keys=0,
        key_cluster_ids=None,
        return_ids=return_ids,
        backend="triton",
    )
    for result in results:
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
    addresses = [result.data_ptr() for result in results if result.numel()]
    assert len(addresses) == len(set(addresses)) == (4 if return_ids else 1)


def plans_of(run: Callable[[], Any]) -> list[str]:
    """Names of the functions that plan something while another runs."""
    found: list[str] = []

    def see(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and name.startswith("plan_"):
            found.append(name)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("tokens", [43, 273], ids=["few tokens", "many tokens"])
def test_a_plan_holds_for_all_that_lies_alike(make_case: Any, tokens: int) -> None:
    """It is made once, whatever the values and the scale, and keeps no tensor."""
    case, other = make_case(1, 2, tokens, 16, 3, 9), make_case(1, 2, tokens, 16, 3, 9)
    kept: list[weakref.ref[Tensor]] = []

    def run(case: Any, scale: float) -> None:
        with recording():  # nothing is launched
            results = attend(case[:3], case, scale, "triton")
        kept.extend(weakref.ref(result) for result in results)

    assert plans_of(lambda: run(case, 0.2))
    assert plans_of(lambda: run(other, 0.3)) == []
    longer = make_case(1, 2, tokens + 1, 16, 3, 9)
    assert plans_of(lambda: run(longer, 0.3))
    assert all(reference() is None for reference in kept)
