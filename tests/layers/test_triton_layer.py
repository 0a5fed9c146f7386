"""A training step on the Triton backend (in Triton's interpreter where there is no GPU) is that of the plain one."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton's interpreter or a GPU")
def test_a_training_step_is_the_same(layer, tokens, step) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = []
    for backend in ("eager", "triton"):
        attention = layer(backend=backend).to(device)
        optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
        for i in range(2):
            step(attention, optimizer, tokens(i).to(device))
        states.append(attention.state_dict())
    for name, expected in states[0].items():
        torch.testing.assert_close(
            states[1][name], expected, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
