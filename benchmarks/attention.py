"""The native CPU kernels beside PyTorch's attention: grouped and dense, with gradients, beside a
busy process.

    python benchmarks/attention.py --json benchmarks/results/native_attention_zen4.json
    python benchmarks/attention.py --clustered --json benchmarks/results/native_clustered_zen5.json

Candidates take turns in one process, so that they meet the same machine: `sdpa` is
F.scaled_dot_product_attention, `dense` dgt.dense_attention, `grouped`
dgt.dynamic_group_attention with its ids, and `residual_1` and `residual_16` the same with so many
residual keys; `zentorch`, where that package is installed, is its attention, forward. With
`--clustered` they are dgt.clustered_attention, `first_order` or not, beside `sdpa` and `dense`, each
in float32 and in bfloat16. Of each the fastest turn and the median are kept, in milliseconds.
Queries, keys and values are random, so groups are balanced; those of a trained model are less so. A
case whose result differs from the reference is not timed. The file is written anew after every case.
"""

import argparse
import datetime
import importlib.util
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.utils.errors import Disagreement
from dgt.utils.records import command_line, processor, write_record

CASES = (  # images x heads x tokens x channels : keys of a group
    "8x8x196x32:98",
    "8x4x784x32:98",
    "1x2x3136x32:98",
    "8x2x3136x32:98",
    "1x2x16384x32:98",
    "1x2x25600x32:500",
    "1x2x4096x64:98",
)
CLUSTERED_CASES = (  # and : groups : residual keys, as in plans of DINOv2-S
    "1x6x1369x64:186:62:23",
    "1x6x1369x64:263:88:33",
    "1x6x5477x64:136:62:48",
    "1x6x5477x64:313:124:76",
)
TRAINED_CASES = ("8x8x196x32:98", "8x4x784x32:98", "8x2x3136x32:98", "1x2x16384x32:98")
LEAST_TURNS = 5
CHECKED_TOKENS = 4096  # the most for the dense reference
LARGEST_DIFFERENCE = 1e-5
LARGEST_DISTANCE = 1e-2


class Case(NamedTuple):
    """A size of the operator."""

    images: int
    heads: int
    tokens: int
    channels: int
    top_k: int
    groups: int = 0  # of clustered attention
    residual_keys: int = 0


class Setting(NamedTuple):
    """How a case is measured."""

    threads: int
    busy: int
    backward: bool
    dtype: str
    groups: int
    seconds: float


def parse_case(text: str) -> Case:
    """Read ``BxHxLxD:k``, or ``BxHxLxD:k:G:M`` of clustered attention."""
    if not re.fullmatch(r"\d+x\d+x\d+x\d+:\d+(:\d+:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected BxHxLxD:k such as {CASES[0]}, got {text!r}")
    return Case(*map(int, re.split("[x:]", text)))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that never wait."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_calls(case: Case, setting: Setting) -> dict[str, Callable[[], Any]]:
    """The candidates on the same random tensors."""
    torch.manual_seed(0)
    shape = (case.images, case.heads, case.tokens, case.channels)
    dtype = getattr(torch, setting.dtype)
    query, key, value = (
        torch.randn(shape).to(dtype).requires_grad_(setting.backward) for _ in range(3)
    )
    centroids = F.normalize(torch.randn(case.heads, setting.groups, case.channels), dim=-1)
    grad = torch.randn(shape).to(dtype)

    def grouped(residual_keys: int = 0) -> Tensor:
        return dgt.dynamic_group_attention(
            query, key, value, centroids, case.top_k, residual_keys=residual_keys
        ).output

    def gradients(attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), (query, key, value), grad)

    forward: dict[str, Callable[[], Tensor]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value),
        "dense": lambda: dgt.dense_attention(query, key, value),
        "grouped": grouped,
        "residual_1": lambda: grouped(1),
        "residual_16": lambda: grouped(16),
    }
    if not setting.backward:
        if importlib.util.find_spec("zentorch"):
            import zentorch  # noqa: F401 - it registers the operator

            forward["zentorch"] = lambda: torch.ops.zentorch.zentorch_sdpa(query, key, value)[0]
        return dict(forward)
    return {name: partial(gradients, attend) for name, attend in forward.items()}


def clustered(
    case: Case, query: Tensor, key: Tensor, value: Tensor, first_order: bool = False
) -> Tensor:
    """Clustered attention with the sizes of a case."""
    return dgt.clustered_attention(
        query,
        key,
        value,
        num_groups=case.groups,
        top_k=case.top_k,
        residual_keys=case.residual_keys,
        num_prefix_tokens=1,
        first_order=first_order,
    )


def make_clustered_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Clustered attention and what it replaces, in two types."""
    torch.manual_seed(0)
    shape = (case.images, case.heads, case.tokens, case.channels)
    floats = [torch.randn(shape) for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {}
    for kind in (torch.float32, torch.bfloat16):
        query, key, value = (tensor.to(kind) for tensor in floats)
        name = str(kind).removeprefix("torch.")
        calls[f"sdpa_{name}"] = partial(F.scaled_dot_product_attention, query, key, value)
        calls[f"dense_{name}"] = partial(dgt.dense_attention, query, key, value)
        calls[f"clustered_{name}"] = partial(clustered, case, query, key, value)
        calls[f"first_order_{name}"] = partial(clustered, case, query, key, value, first_order=True)
    return calls


def check(case: Case, setting: Setting) -> None:
    """Compare one head with the dense reference.

    Raises:
        Disagreement: They differ.
    """
    torch.manual_seed(0)
    shape = (1, 1, min(case.tokens, CHECKED_TOKENS), case.channels)
    query, key, value = (torch.randn(shape) for _ in range(3))
    centroids = F.normalize(torch.randn(1, setting.groups, case.channels), dim=-1)
    ours = dgt.dynamic_group_attention(query, key, value, centroids, case.top_k).output
    truth = dgt.dynamic_group_attention(
        query.double(), key.double(), value.double(), centroids, case.top_k, backend="reference"
    ).output
    error = (ours.double() - truth).abs().max().item()
    if not error < LARGEST_DIFFERENCE:
        raise Disagreement(
            f"DG-Attention differs from the reference by {error:.1e} "
            f"(limit {LARGEST_DIFFERENCE:.0e}): not timed"
        )


def check_clustered(case: Case) -> None:
    """Compare one head with PyTorch's operations in float64.

    Raises:
        Disagreement: They differ, and not by a few tokens that are as near to two centers.
    """
    torch.manual_seed(0)
    shape = (1, 1, min(case.tokens, CHECKED_TOKENS), case.channels)
    query, key, value = (torch.randn(shape) for _ in range(3))
    ours = clustered(case, query, key, value, first_order=True)
    truth = clustered(case, query.double(), key.double(), value.double(), first_order=True)
    error = ((ours - truth).norm() / truth.norm()).item()
    if not error < LARGEST_DISTANCE:
        raise Disagreement(
            f"clustered attention differs from float64 by {error:.1e} of its norm "
            f"(limit {LARGEST_DISTANCE:.0e}): not timed"
        )


def measure(case: Case, setting: Setting) -> dict[str, list[float]]:
    """Milliseconds of the candidates, in turns."""
    if case.groups:
        check_clustered(case)
        calls = make_clustered_calls(case)
    else:
        check(case, setting)
        calls = make_calls(case, setting)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode(not setting.backward):
        for call in calls.values():
            call()
            call()
        end = time.perf_counter() + setting.seconds
        while time.perf_counter() < end or min(map(len, times.values())) < LEAST_TURNS:
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def row_of(
    text: str, case: Case, setting: Setting, times: dict[str, list[float]]
) -> dict[str, Any]:
    """A row of the results: fastest turns, medians, and ratios of the fastest (beside busy
    processes of medians).
    """
    fastest = {name: round(min(turns), 4) for name, turns in times.items()}
    medians = {name: round(statistics.median(turns), 4) for name, turns in times.items()}
    if case.groups:
        return {
            "case": text,
            "threads": setting.threads,
            "fastest_ms": fastest,
            "median_ms": medians,
            "turns": min(map(len, times.values())),
        }
    compared = medians if setting.busy else fastest
    sdpa_to_grouped = compared["sdpa"] / compared["grouped"]
    bound = case.tokens / (setting.groups + case.top_k)
    return {
        "case": text,
        "threads": setting.threads,
        "busy": setting.busy,
        "backward": setting.backward,
        "dtype": setting.dtype,
        "fastest_ms": fastest,
        "median_ms": medians,
        "sdpa_to_grouped": round(sdpa_to_grouped, 2),
        "dense_to_grouped": round(compared["dense"] / compared["grouped"], 2),
        "sdpa_to_dense": round(compared["sdpa"] / compared["dense"], 2),
        "bound": round(bound, 1),
        "share_of_bound": round(compared["dense"] / compared["grouped"] / bound, 2),
        "turns": len(times["grouped"]),
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--cases", nargs="+", default=None, metavar="BxHxLxD:k")
    parser.add_argument("--clustered", action="store_true", help="clustered attention instead")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="busy processes beside it")
    parser.add_argument(
        "--backward", choices=("no", "yes", "both"), default="both", help="with gradients"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a case")
    args = parser.parse_args()
    status = dgt.native_status()
    if not status.available:
        parser.error(f"the native kernels are not in use: {status.reason}")
    machine = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "level": status.level,
        "command": command_line(),
    }
    wanted = {"no": (False,), "yes": (True,), "both": (False, True)}[args.backward]
    cases: tuple[str, ...] = CASES
    if args.clustered:
        wanted = (False,)
        cases = CLUSTERED_CASES
    rows: list[dict[str, Any]] = []
    for busy in args.busy:
        with busy_processes(busy):
            for threads in args.threads:
                torch.set_num_threads(threads)
                for backward in wanted:
                    for text in args.cases or (TRAINED_CASES if backward else cases):
                        setting = Setting(
                            threads, busy, backward, args.dtype, args.groups, args.seconds
                        )
                        case = parse_case(text)
                        rows.append(row_of(text, case, setting, measure(case, setting)))
                        print(rows[-1], flush=True)
                        if args.json is not None:
                            write_record(args.json, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
