"""What the host does in a call of the Triton attention, counted: no GPU is needed.

    python benchmarks/attention_host.py --out FILE.json

Launches are recorded instead of made, on bfloat16 tensors of a CPU, after a first call has planned
them. Checks of the arguments are left out, and so is what Triton does in a launch.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgt.ops.triton import backend
from dgt.ops.triton.launch import recording
from dgt.utils.records import write_record
from dgt_command.measures import machine

SHAPES = ((128, 8, 196), (128, 4, 784), (128, 2, 3136))  # B, H, L: stages three to one of DGT-T
CHANNELS, GROUPS, TOP_K = 32, 48, 98
SCALE = CHANNELS**-0.5


class Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that allocate memory, however little."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.allocations += name.startswith(("empty", "new_empty", "zeros", "new_zeros"))
        return func(*args, **(kwargs or {}))


def count(run: Callable[[], Any]) -> dict[str, int]:
    """Launches, allocations, and calls of Python and of built-in functions in the second of two calls."""
    calls: Counter[str] = Counter()

    def see(_frame: FrameType, event: str, _argument: Any) -> None:
        calls[event] += 1

    with recording():
        run()
    with recording() as launches, Operators() as operators:
        run()
    gc.collect()  # so that none of its calls is among them
    with recording():
        sys.setprofile(see)
        run()
        sys.setprofile(None)
    return {
        "launches": len(launches),
        "allocations": operators.allocations,
        "python": calls["call"] - 1,  # without `run` itself
        "built_in": calls["c_call"] - 1,  # without `sys.setprofile`
    }


def passes(batch: int, heads: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """Calls of the backend with tensors of a stage."""
    qkv = torch.empty(batch, tokens, 3, heads, CHANNELS, dtype=torch.bfloat16)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    centroids = torch.empty(heads, GROUPS, CHANNELS)

    def forward(return_ids: bool) -> tuple[Tensor, ...]:
        return backend.attention(
            query,
            key,
            value,
            centroids,
            top_k=TOP_K,
            scale=SCALE,
            query_mask=None,
            key_mask=None,
            num_prefix_tokens=0,
            residual_keys=0,
            key_cluster_ids=None,
            return_ids=return_ids,
        )

    with recording():
        output, sums, group_ids, key_ids, residual = forward(return_ids=True)
    saved = (query, key, value, output, sums)
    return {
        "inference": lambda: forward(return_ids=False),
        "training, forward": lambda: forward(return_ids=True),
        "training, backward": lambda: backend.attend_backward(
            output,
            *saved,
            grad_logsumexp=None,
            residual=residual,
            group_ids=group_ids,
            key_ids=key_ids,
            key_bias=None,
            key_cluster_ids=None,
            scale=SCALE,
            residual_keys=0,
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    """Count all passes, print them, and write them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of the counts")
    options = parser.parse_args(arguments)
    rows = []
    with patch.multiple(backend, check_runnable=lambda *_: None, check_no_nan=lambda *_: None):
        for shape in SHAPES:
            for name, run in passes(*shape).items():
                rows.append({"shape": shape, "pass": name, **count(run)})
                print(rows[-1])
    if options.out is not None:
        write_record(options.out, {"machine": machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
