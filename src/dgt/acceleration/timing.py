"""Runs of an accelerated model that are timed, with its attention in groups or as it was."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from dgt.acceleration.calls import Call
from dgt.acceleration.inputs import Paddings
from dgt.acceleration.intercept import (
    AttentionProcessor,
    exact_attention,
    installed_processors,
    trace_sdpa,
)
from dgt.acceleration.padding import note_padding


def timed(work: Callable[[], Any], rounds: int = 1) -> tuple[float, Any]:
    """Return the shortest time of a function in milliseconds, and its result."""
    # Waits for a GPU; only here: it loads torch's compilers.
    from torch.utils.benchmark import timer

    times = []
    output = None
    for _ in range(rounds):
        start = timer()
        output = work()
        times.append(1000 * (timer() - start))
    return min(times, default=math.inf), output


def speedup_limit(model_ms: float, attention_ms: float) -> float:
    """How many times as fast a model would be if its attention took no time."""
    return model_ms / max(model_ms - attention_ms, 1e-9)


class TimedRun:
    """A run of a model: its output, its time and that of its attention.

    Args:
        model: after :func:`dgt.accelerate` or :func:`dgt.apply_plan`.
        run: calls the model.
        is_exact: whether it runs with its original attention.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], Any],
        is_exact: bool,
    ) -> None:
        self.processors: Mapping[str, AttentionProcessor] = {}
        if not is_exact:
            self.processors = installed_processors(model)
        self.site_ms: dict[str, float] = defaultdict(float)
        """Milliseconds of the attention of call sites, by name."""
        self.tokens: dict[str, tuple[int, int]] = {}
        """How many queries and keys the last call of a call site had, by name."""
        self.paddings: Paddings = {}
        with exact_attention(model), trace_sdpa(model, self.answer):
            self.model_ms, self.output = timed(run)

    @property
    def attention_ms(self) -> float:
        """Of all attention."""
        return sum(self.site_ms.values())

    def answer(self, name: str, _: int, call: Call) -> Any:
        """Compute a call, and time it."""
        note_padding(call, self.paddings)
        self.tokens[name] = (call.query.shape[2], call.key.shape[2])
        ms, output = timed(partial(self.process, name, call))
        self.site_ms[name] += ms
        return output

    def process(self, name: str, call: Call) -> Any:
        """Compute a call as the model does."""
        output = None
        if name in self.processors:
            output = self.processors[name].process(call)
        return call.run() if output is None else output
