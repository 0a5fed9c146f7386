"""A machine whose times are known."""

from __future__ import annotations

import pytest

from dgt.acceleration import search
from dgt.acceleration.sdpa import GroupedCall


@pytest.fixture
def slow_attention(monkeypatch) -> None:
    """A machine on which a model's own attention is slow, whatever the size, and groups take time by their count."""

    def seconds(work, rounds: int = 1) -> float:
        work()
        grouped = getattr(work, "func", None)
        return (grouped.centroids.shape[1] + grouped.top_k) / 1e4 if isinstance(grouped, GroupedCall) else 0.1

    monkeypatch.setattr(search, "_seconds", seconds)
    monkeypatch.setattr(search, "_in_turns", lambda *_: (0.2, 0.1))
    monkeypatch.setattr(search, "LEAST_TOKENS", 16)
