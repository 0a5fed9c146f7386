"""How near the operator comes to its bound by FLOPs, on one thread and on all, alone and beside
busy processes.

The bound is the 2 L L D multiply-adds of global attention over the 2 L G D + 2 L k D of
DG-Attention. Both take turns in one process; the fastest turn of each counts, beside busy processes
the median. Queries, keys and values are random, so groups are balanced; those of a trained model
are less so. Rows are added to the JSON file, which keeps those of other labels, so that two
versions of the package (PYTHONPATH) can be laid side by side.

    python benchmarks/attention_bound.py --label NAME --json FILE [--threads 1 2] [--busy 0 1] [--cases 1x2x3136x32:98]
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from native_attention import busy_processes

import dgt
from dgt.bench.measures import machine, milliseconds

CASES = (  # batch x heads x tokens x channels : keys of a group
    "1x2x3136x32:98",
    "8x2x3136x32:98",
    "8x4x784x32:98",
    "8x8x196x32:98",
    "1x2x16384x32:98",
    "1x2x25600x32:500",
    "1x2x4096x64:98",
    "1x2x4096x64:512",
    "1x1x16384x64:98",
    "1x1x16384x64:512",
)


def check(tensors: list[torch.Tensor], centroids: torch.Tensor, top_k: int) -> None:
    """Compare the backend of PyTorch kernels with the reference."""
    found = dgt.dynamic_group_attention(*tensors, centroids, top_k, backend="torch").output
    truth = dgt.dynamic_group_attention(*tensors, centroids, top_k, backend="reference").output
    assert (found - truth).abs().max() < 1e-5


def gradients(
    call: Callable[[], torch.Tensor], tensors: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The gradients of the operands of a call."""
    return torch.autograd.grad(call().sum(), tensors)


def compare(
    case: str, groups: int, dtype: torch.dtype, seconds: float, backward: bool
) -> dict[str, list[float]]:
    """Times of global attention and of DG-Attention, in turns, for so many seconds and at least
    three turns.
    """
    *shape, top_k = map(int, re.split("[x:]", case))
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=backward) for _ in range(3)]
    centroids = F.normalize(torch.randn(shape[1], groups, shape[3]), dim=-1).to(dtype)
    if shape[2] <= 4096 and dtype == torch.float32:
        check([tensor[:1].detach() for tensor in tensors], centroids, top_k)
    calls = {
        "sdpa": lambda: F.scaled_dot_product_attention(*tensors),
        "dgt": lambda: dgt.dynamic_group_attention(*tensors, centroids, top_k).output,
    }
    if backward:
        calls = {name: partial(gradients, call, tensors) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode(not backward):
        for call in calls.values():
            call()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times["dgt"]) < 3:
            for name, call in calls.items():
                times[name].append(milliseconds(call))
    return times


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="BxHxLxD:k")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="busy processes beside it")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--seconds", type=float, default=1.5, help="a case")
    args = parser.parse_args()
    info = Path("/proc/cpuinfo").read_text()
    family = re.findall(r"^(?:cpu family|model)\s*: (\d+)", info, re.MULTILINE)[:2]
    where = {
        **machine(),
        "family and model": "/".join(family),
        "load before": Path("/proc/loadavg").read_text()[:14],
    }
    rows = json.loads(args.json.read_text()) if args.json.exists() else []
    for busy in args.busy:
        with busy_processes(busy):
            for threads in args.threads:
                torch.set_num_threads(threads)
                for case in args.cases:
                    times = compare(
                        case, args.groups, getattr(torch, args.dtype), args.seconds, args.backward
                    )
                    sdpa, ours = (statistics.median(t) if busy else min(t) for t in times.values())
                    tokens = int(case.split("x")[2])
                    top_k = int(case.split(":")[1])
                    bound = tokens / (args.groups + top_k)
                    row = {
                        "label": args.label,
                        "case": case,
                        "threads": threads,
                        "busy": busy,
                        "dtype": args.dtype,
                        "backward": args.backward,
                        "sdpa_ms": round(sdpa, 3),
                        "dgt_ms": round(ours, 3),
                        "ratio": round(sdpa / ours, 2),
                        "bound": round(bound, 1),
                        "share": round(sdpa / ours / bound, 3),
                        "turns": len(times["dgt"]),
                    }
                    print(row, flush=True)
                    rows.append({**row, "machine": {**where, "threads": threads}})
                    args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
