"""A simulated machine with known times."""

from __future__ import annotations

import pytest
import torch.utils.benchmark

from dgt.acceleration import calls, grouped, intercept, measure

OWN_SECONDS = 0.1


class Clock:
    """A clock that advances by known amounts, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


@pytest.fixture
def slow_attention(monkeypatch) -> Clock:
    """A machine on which a model's own attention is always slow, and groups take time in proportion to their number.

    The native dense kernel takes as long as the model's own.
    """
    clock, read, answer = Clock(), calls.read_call, grouped.compute_call

    def slow(*arguments, **options) -> calls.Call:
        call = read(*arguments, **options)

        def run():
            clock.now += OWN_SECONDS
            return call.run()

        return call._replace(run=run)

    def counted(call: calls.Call, site, setting):
        is_grouped = setting.choice == "groups"
        clock.now += (
            (setting.groups + setting.keys + setting.residual_keys) / 1e4
            if is_grouped
            else OWN_SECONDS
        )
        return answer(call, site, setting)

    monkeypatch.setattr(torch.utils.benchmark, "timer", clock)
    for module in (calls, intercept, measure):
        monkeypatch.setattr(module, "read_call", slow)
    for module in (grouped, measure):
        monkeypatch.setattr(module, "compute_call", counted)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "LONG", 1e9)
    monkeypatch.setattr(measure, "LEAST_TOKENS", 16)
    return clock
