"""A training step on the Triton backend (in its interpreter without a GPU) equals one on the plain backend."""

from __future__ import annotations

import copy
import os

import pytest
import torch

import dgt

pytest.importorskip("triton", reason="needs Triton")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton's interpreter or a GPU"
)
def test_a_training_step_is_the_same(layer, tokens, step) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = []
    for backend in ("torch", "triton"):
        attention = layer(backend=backend).to(device)
        optimizer = torch.optim.SGD(attention.parameters(), lr=1e-3)
        for i in range(2):
            step(attention, optimizer, tokens(i).to(device))
        states.append(attention.state_dict())
    for name, expected in states[0].items():
        torch.testing.assert_close(
            states[1][name], expected, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton's interpreter or a GPU"
)
@pytest.mark.parametrize(
    ("tau_weighs", "rate"), [("old", 0.01), ("new", 0.3), ("new", torch.tensor(0.3))], ids=str
)
def test_the_step_of_eq_4_in_one_launch(
    monkeypatch: pytest.MonkeyPatch, tau_weighs: str, rate: float | torch.Tensor
) -> None:
    """The same centroids, counts, and sums as with PyTorch's operators, also for empty groups and divergence."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = dgt.DGAttention(
        80, num_heads=2, num_groups=37, top_k=3, tau_weighs=tau_weighs, backend="torch"
    ).to(device)
    plain.centroids.mul_(1 + torch.rand(2, 37, 1, device=device))  # as after weight averaging
    plain.observed.counts.copy_(torch.randint(0, 3, (2, 37)))
    plain.observed.sums.copy_(torch.randn(2, 37, 40) * plain.observed.counts[..., None].cpu())
    plain.observed.sums[0, 5], plain.observed.counts[0, 5] = torch.inf, 1.0
    fused = copy.deepcopy(plain)
    fused.backend = "triton"
    before = fused.centroids._version
    for layer in (plain, fused):
        layer.move(rate)
        layer.move(rate)  # nothing observed: no centroid moves and no update is counted
    torch.testing.assert_close(fused.centroids, plain.centroids, rtol=0, atol=1e-6)
    assert int(fused.num_updates) == int(plain.num_updates) == 1
    assert not fused.observed.sums.any()
    assert not fused.observed.counts.any()
    assert fused.centroids._version > before
