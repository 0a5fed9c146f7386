"""A machine whose times are known."""

from __future__ import annotations

import pytest
import torch.utils.benchmark

from dgt.acceleration import sdpa, search
from dgt.acceleration.sdpa import GroupedCall


class Clock:
    """Seconds that pass only by what is known to take them, and a little whenever they are read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


@pytest.fixture
def slow_attention(monkeypatch) -> Clock:
    """A machine on which a model's own attention is slow, whatever the size, and groups take time by their count."""
    clock, read, forward = Clock(), sdpa.read_call, GroupedCall.forward

    def slow(*arguments, **options) -> sdpa.Call:
        call = read(*arguments, **options)

        def run():
            clock.now += 0.1
            return call.run()

        return call._replace(run=run)

    def counted(grouped: GroupedCall, call: sdpa.Call):
        clock.now += (grouped.centroids.shape[1] + grouped.top_k) / 1e4
        return forward(grouped, call)

    monkeypatch.setattr(torch.utils.benchmark, "timer", clock)
    monkeypatch.setattr(sdpa, "read_call", slow)
    monkeypatch.setattr(GroupedCall, "forward", counted)
    monkeypatch.setattr(search, "ROUNDS", 1)
    monkeypatch.setattr(search, "LEAST_TOKENS", 16)
    return clock
