"""How many functions a value passes through, counted by a profiler: what a reader has to follow.

A *stop* is a function of the package that receives the value. Argument checks count as one stop. A
    *door* is a public function: once inside, a value never passes through another one. A *stay* is
        a stretch within one file, until a function in another file receives the value; a *return*
        is a stay in a file where it has been before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgt
import dgt.layers
import dgt.ops
import dgt.runs
from dgt.acceleration.task import Task
from dgt.weights import SHIPPED

ROOT = str(Path(dgt.__file__).parent)
CHECKS = "ops/checks.py"
MOST_STOPS = 22
MOST_STAYS = 6  # of the arguments of `dgt.accelerate`
MOST_RETURNS = 2


class Stop:
    """A function that was called, and the tensors it received."""

    def __init__(self, frame: FrameType) -> None:
        self.code = frame.f_code
        self.file = frame.f_code.co_filename[len(ROOT) + 1 :]
        count = self.code.co_argcount + self.code.co_kwonlyargcount + bool(self.code.co_flags & 4)
        given = [frame.f_locals.get(name) for name in self.code.co_varnames[:count]]
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(given)}
        self.has_task = any(isinstance(value, Task) for value in given)

    def __str__(self) -> str:
        return f"{self.file}: {self.code.co_name}"


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors among values and in tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_in(value)


def record(run: Callable[[], Any]) -> list[Stop]:
    """The package's functions that a call enters, in order, without comprehensions."""
    stops: list[Stop] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(ROOT)
            and frame.f_code.co_name[0] != "<"
        ):
            stops.append(Stop(frame))

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return stops


def doors(*modules: Any) -> set[CodeType]:
    """The code objects of all public functions of some packages."""
    values = [getattr(module, name) for module in modules for name in module.__all__]
    functions = [getattr(value, "__wrapped__", value) for value in values]
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


def distinct(stops: Iterable[Stop]) -> list[str]:
    """Each stop once, in order, with all argument checks as one."""
    return list(dict.fromkeys(CHECKS if stop.file == CHECKS else str(stop) for stop in stops))


@pytest.mark.skipif(not dgt.native_status().available, reason="the native kernel was not built")
@pytest.mark.parametrize("training", [False, True])
def test_a_query_on_the_cpu_passes_few_functions(training: bool) -> None:
    """From its projection to the kernel of the backend."""
    layer = dgt.DGAttention(64, num_heads=2).train(training)
    x = torch.randn(1, 28, 28, 64)
    split = layer.split_heads
    queries: list[Tensor] = []

    def remember(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = split(tokens)
        queries.append(found[0])
        return found

    with torch.no_grad():
        layer(x)  # initializes the centroids, and loads what is loaded only once
        layer.split_heads = remember  # type: ignore[method-assign]
        entered = record(lambda: layer(x))
    storage = queries[0].untyped_storage().data_ptr()
    held = [stop for stop in entered if storage in stop.storages]
    names = [stop.code.co_name for stop in entered]
    if training:  # followed by the update of the centroids
        end = names.index("observe")
        held = [stop for stop in held if entered.index(stop) < end]
    assert len(distinct(held)) <= MOST_STOPS, "\n".join(distinct(held))
    public = doors(dgt, dgt.ops, dgt.layers)
    passed = [str(stop) for stop in held if stop.code in public]
    assert len(passed) <= 1, passed


def test_load_run_never_goes_through_another_door() -> None:
    dgt.runs.load_run(SHIPPED)
    public = doors(dgt, dgt.runs)
    passed = [
        str(stop) for stop in record(lambda: dgt.runs.load_run(SHIPPED)) if stop.code in public
    ]
    assert passed == ["runs/model.py: load_run"]


class OneAttention(nn.Module):
    """A model's attention, from tokens to tokens."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return attended.transpose(1, 2).flatten(2)


def test_what_is_to_be_accelerated_stays_in_few_files() -> None:
    """From the check of the request to the report, without the model's own run."""
    inputs = torch.randn(3, 700, 32)
    entered = record(lambda: dgt.accelerate(OneAttention(), inputs, 0.9))
    ways = [
        stop
        for stop in entered
        if stop.has_task or stop.code.co_name in ("accelerate", "read_task")
    ]
    files = [stop.partition(":")[0] for stop in distinct(ways)]
    stays = [file for place, file in enumerate(files) if place == 0 or file != files[place - 1]]
    assert len(stays) <= MOST_STAYS, "\n".join(distinct(ways))
    assert len(stays) - len(set(stays)) <= MOST_RETURNS, stays
