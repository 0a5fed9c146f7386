"""With many tokens nothing of size L x L is ever allocated, forward or backward."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dgt


def allocations(run) -> tuple[int, int]:
    """The largest single allocation and the total peak, in bytes, during ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = run()
    events = [
        event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    assert kept is not None
    assert peak > 0, "the profiler must have seen the allocations"
    return max(event.nbytes() for event in events), peak


def test_the_measure_sees_a_square_matrix(draw) -> None:
    """The reference allocates L x L inside some operator: the measurement must notice."""
    query, key, value, centroids = draw(1, 1, 1024, 8, 4)
    _, peak = allocations(
        lambda: dgt.dynamic_group_attention(query, key, value, centroids, 8, backend="reference")
    )
    assert peak > 4 * 1024**2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_peak_memory_is_far_below_an_attention_mask(backward, masked, draw) -> None:
    """At L = 16384, all allocations, including results, compared with a bool mask (1, 2, L, L).

    The peak of the forward pass is below a tenth of one head's mask; with backward, below a fifth
    of both heads'.
    """
    tokens, heads = 16384, 2
    query, key, value, centroids = draw(1, heads, tokens, 32, 48)
    mask = torch.rand(1, tokens) < 0.9 if masked else None
    leaves = [tensor.requires_grad_(backward) for tensor in (query, key, value)]

    def run():
        output = dgt.dynamic_group_attention(
            *leaves, centroids, 98, query_mask=mask, key_mask=mask
        ).output
        return torch.autograd.grad(output.sum(), leaves) if backward else output

    largest, peak = allocations(run)
    assert largest < tokens**2 / 10
    assert peak < (heads * tokens**2 / 5 if backward else tokens**2 / 10)
