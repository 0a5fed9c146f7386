"""Runs of an accelerated model that are timed, with its attention in groups or as it was."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from dgt.acceleration.calls import Call
from dgt.acceleration.intercept import (
    AttentionProcessor,
    installed_processors,
    switched_off,
    trace_sdpa,
)


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
        installed = installed_processors(model)
        self.processors: Mapping[str, AttentionProcessor] = {} if is_exact else installed
        self.replaced = {name for name, processor in installed.items() if processor.mixin}
        """Modules whose forward is replaced: all of it is timed, before as after."""
        self.site_ms: dict[str, float] = defaultdict(float)
        """Milliseconds of the attention of call sites, by name."""
        self.tokens: dict[str, tuple[int, int]] = {}
        """How many queries and keys the last call of a call site had, by name."""
        off = [
            processor
            for name, processor in installed.items()
            if is_exact or name not in self.replaced
        ]
        with switched_off(off), trace_sdpa(model, self.answer), self.forwards_timed(model):
            self.model_ms, self.output = timed(run)

    @contextlib.contextmanager
    def forwards_timed(self, model: nn.Module) -> Iterator[None]:
        """Time the forward of modules that is replaced while this is entered."""
        from torch.utils.benchmark import timer

        hooks: list[Any] = []
        starts: dict[str, float] = {}

        def start(name: str, *_: Any) -> None:
            starts[name] = timer()

        def stop(name: str, *_: Any) -> None:
            self.site_ms[name] += 1000 * (timer() - starts[name])

        for name in self.replaced:
            module = model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(partial(start, name)))
            hooks.append(module.register_forward_hook(partial(stop, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def attention_ms(self) -> float:
        """Of all attention."""
        return sum(self.site_ms.values())

    def answer(self, name: str, _: int, call: Call) -> Any:
        """Compute a call, and time it."""
        self.tokens[name] = (call.query.shape[2], call.key.shape[2])
        if name in self.replaced:
            return None
        ms, output = timed(partial(self.process, name, call))
        self.site_ms[name] += ms
        return output

    def process(self, name: str, call: Call) -> Any:
        """Compute a call as the model does."""
        output = None
        if name in self.processors:
            output = self.processors[name].process(call)
        return call.run() if output is None else output
