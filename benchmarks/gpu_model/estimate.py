"""How long every kernel takes according to the cycle model: a table, or rows of JSON. No GPU is
needed.

    python benchmarks/gpu_model/estimate.py [--json FILE] [--shapes "L3136 k98,L196 k98"] [--check]

bfloat16, D 32, G 48, sm_90, on random scores and on photographs, whose statistics are in
`benchmarks/results/gpu_inputs.json` (written by `inputs.py`). Each row has the shape, the
inputs, the pass, the step (a kernel, or "all"), and microseconds. With ``--check``, the exit status
is 1 if a forward pass exceeds its budget.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from compiling import body, compile_here, source_of
from paths import path
from sass import Code, Needs, disassemble, needs_of
from simulate import CLOCK, PROCESSORS, cycles_of, microseconds, side_by_side
from trips import TRIPS, MissingRuleError, Part, Statistics

from dgt.ops.triton import operators
from dgt.ops.triton.launch import Launch, interpreting, recording

ABOUT = (
    "predictions of a cycle model of the machine code (docs/kernels.md), no measurements: "
    "trust them to 40 %"
)
INPUTS = Path(__file__).resolve().parents[1] / "results" / "gpu_inputs.json"
GROUPS, CHANNELS = 48, 32
SHAPES = {  # images, heads, tokens, k
    "L196 k98": (128, 8, 196, 98),
    "L784 k98": (128, 4, 784, 98),
    "L3136 k98": (128, 2, 3136, 98),
    "L16384 k512": (32, 2, 16384, 512),
    "L16384 k513": (32, 2, 16384, 513),
    "L64000 k500": (8, 2, 64000, 500),
}
BACKWARD = ("L196 k98", "L3136 k98")
CHECKED = ("L196 k98", "L3136 k98", "L16384 k512", "L64000 k500")  # by `--check`, to save time
# Microseconds of a forward pass; on random scores what the model gave, plus 5 %.
BUDGETS: dict[str, dict[str, float]] = {
    "random": {
        "L196 k98": 138, "L784 k98": 495, "L3136 k98": 360,
        "L16384 k512": 640, "L16384 k513": 710, "L64000 k500": 594,
    },
    "photographs": {"L3136 k98": 400, "L16384 k512": 900, "L64000 k500": 900},
}  # fmt: skip


class Built(NamedTuple):
    """A compiled kernel."""

    code: Code
    needs: Needs


_built: dict[tuple[Any, ...], Built] = {}


def build(launch: Launch) -> Built:
    """Compile the kernel of a launch for sm_90, once for all launches that are alike."""
    source, options = source_of(launch)
    mark = (source.hash(), *sorted(options.items()))
    if mark not in _built:
        found = compile_here(source, options)
        cubin = found.asm["cubin"]
        needs = needs_of(cubin, options["num_warps"], found.metadata.shared)
        _built[mark] = Built(disassemble(cubin, launch.kernel.__name__), needs)
    return _built[mark]


def launches(shape: str, backward: bool) -> list[Launch]:
    """What the operator launches for a shape, on meta tensors."""
    batch, heads, tokens, top_k = SHAPES[shape]
    like: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    query, key, value = (
        torch.empty(batch, tokens, 3, heads, CHANNELS, **like).permute(2, 0, 3, 1, 4).unbind(0)
    )
    centroids = torch.empty(heads, GROUPS, CHANNELS, device="meta")
    with recording() as forward:
        found = body(operators.attention)(query, key, value, centroids, top_k, 1.0, None)
    if not backward:
        return forward
    output, logsum, group_ids, key_ids, *extra = found
    with recording() as after:
        saved = (output, query, key, value, output, logsum, group_ids, key_ids)
        body(operators.attend_backward)(*saved, *extra, 1.0)
    return after


def statistics_of(shape: str, inputs: str) -> Statistics:
    """The statistics of a shape on random scores, or the worst of two models' on photographs."""
    rows = json.loads(INPUTS.read_text(encoding="utf-8"))["rows"]
    by_inputs = {row["inputs"]: row for row in rows if row["shape"] == shape}
    random = by_inputs.pop("random")
    return random if inputs == "random" else worst_of(list(by_inputs.values()))


def worst_of(rows: list[Statistics]) -> Statistics:
    """Every number as in the row where it is largest, with the least equal groups."""
    unequal = max(rows, key=lambda row: float(row["largest_group_share"]))
    numbers = [name for name, value in unequal.items() if isinstance(value, int | float)]
    worst = {name: max(row[name] for row in rows) for name in numbers}
    sizes = unequal["groups_by_size"]
    return unequal | worst | {"groups_by_size": sizes + [0.0] * (GROUPS - len(sizes))}


def time_of(launch: Launch, statistics: Statistics) -> float:
    """Microseconds of one launch: up to two parts run one after the other, more side by side."""
    built = build(launch)
    facts = SimpleNamespace(**launch.named, programs=launch.programs)
    parts = [part for part in TRIPS[launch.kernel.__name__](facts, statistics) if part.programs > 0]
    if len(parts) <= 2:
        return sum(
            microseconds(built.code, path(built.code, part), built.needs, part.programs)
            for part in parts
        )
    return time_of_many(built, parts)


def time_of_many(built: Built, parts: list[Part]) -> float:
    """Microseconds of parts that share the multiprocessors: no less than the longest program takes."""
    blocks = side_by_side(built.needs, sum(part.programs for part in parts))
    total = longest = 0.0
    for part in parts:
        cycles = cycles_of(built.code, path(built.code, part), built.needs, blocks)
        total += part.programs / (PROCESSORS * blocks) * cycles
        longest = max(longest, cycles)
    return max(total, longest) / CLOCK * 1e6


def rows_of(shape: str, inputs: str, backward: bool) -> list[dict[str, Any]]:
    """A row for every kernel of a pass, and one for all of them."""
    statistics = statistics_of(shape, inputs)
    name = "backward" if backward else "forward"
    common = {"shape": shape, "inputs": inputs, "pass": name}
    times: dict[str, float] = {}
    needs: dict[str, Needs] = {}
    for launch in launches(shape, backward):
        kernel = launch.kernel.__name__
        times[kernel] = times.get(kernel, 0.0) + time_of(launch, statistics)
        needs[kernel] = build(launch).needs
    rows = [
        {
            **common,
            "step": kernel,
            "us": round(us, 1),
            "registers": needs[kernel].registers,
            "programs_at_once": needs[kernel].programs_at_once,
        }
        for kernel, us in times.items()
    ]
    return [*rows, {**common, "step": "all", "us": round(sum(times.values()), 1)}]


def over_budget(rows: list[dict[str, Any]]) -> list[str]:
    """The forward passes that exceed their budgets, one line each."""
    found = []
    for row in rows:
        if (row["step"], row["pass"]) != ("all", "forward"):
            continue
        limit = BUDGETS[row["inputs"]].get(row["shape"], math.inf)
        if row["us"] > limit:
            found.append(f"{row['shape']} on {row['inputs']}: {row['us']} us ({limit} allowed)")
    return found


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    """Shape, inputs, and whether it is the backward pass, of everything that is to be estimated."""
    for shape, inputs in itertools.product(options.shapes, BUDGETS):
        yield shape, inputs, False
        if shape in BACKWARD and not options.forward:
            yield shape, inputs, True


def line_of(rows: list[dict[str, Any]]) -> str:
    """The rows of one pass, the last of which is their sum, in a line."""
    *steps, total = rows
    times = ", ".join(f"{row['step']} {row['us']:.0f}" for row in steps)
    named = f"{total['shape']:12} {total['inputs']:12} {total['pass']:9}"
    return f"{named}{total['us']:7.0f} us: {times}"


def parse_arguments() -> argparse.Namespace:
    """The options of the command line, with a list of shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--shapes", help=f"comma-separated (default: all; with --check: {', '.join(CHECKED)})"
    )
    parser.add_argument("--forward", action="store_true", help="forward passes alone")
    parser.add_argument("--check", action="store_true", help="fail if a budget is exceeded")
    options = parser.parse_args()
    if interpreting():
        parser.error("TRITON_INTERPRET is set: nothing can be compiled; unset it")
    if options.shapes:
        options.shapes = options.shapes.split(",")
    else:
        options.shapes = CHECKED if options.check else list(SHAPES)
    return options


def main() -> int:
    """Print, write and check."""
    options = parse_arguments()
    started = time.time()
    print(
        f"Triton {triton.__version__}, torch {torch.__version__}, sm_90, bfloat16, D {CHANNELS}, G {GROUPS}"
    )
    rows = []
    for shape, inputs, backward in cases(options):
        try:
            found = rows_of(shape, inputs, backward)
        except MissingRuleError as error:
            print(f"error: {shape}: no rule in trips.py for the loop {error}", file=sys.stderr)
            return 1
        rows += found
        print(line_of(found), flush=True)
    print(f"{time.time() - started:.0f} s")
    if options.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        document = {"about": ABOUT, **versions, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failed = over_budget(rows) if options.check else []
    for line in failed:
        print(line, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
