"""Compile every kernel for a GPU that need not be there, and list what it needs of the chip.

    python benchmarks/compile_kernels.py [--arch 90] [--dtype bfloat16] [--json]
    python benchmarks/compile_kernels.py --others

The operator, its gradients and the forms of the appendix are walked on meta tensors with the shapes
of DGT-T's stages, and everything that they would launch is compiled. The exit status is 1 if a
kernel does not compile, spills registers, or, in bfloat16 for sm_90, exceeds its budget of
registers, shared memory, programs at once or instructions of a loop. ``--others`` compiles what a
model launches for other GPUs and types, two shapes each, checks that it fits their shared memory,
and prints what spills.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from gpu_model.compiling import body, programs_that_fit, registers_and_stack, source_of, tool
from torch import Tensor
from triton.backends.compiler import GPUTarget

from dgt.ops.triton import common, operators, products
from dgt.ops.triton.launch import Launch, interpreting, recording
from dgt.ops.triton.passes import sort_queries

# Images, tokens, heads and k of DGT-T's stages at 224 px and of dense prediction; G is 48, and D 32
# but for CHANNELS.
STAGES = {
    "stage 1": (128, 3136, 2, 98), "stage 2": (128, 784, 4, 98), "stage 3": (128, 196, 8, 98),
    "dense": (32, 16384, 2, 512), "k 513": (32, 16384, 2, 513), "large": (8, 64000, 2, 500),
    # forward of an accelerated model: D 64, a prefix of 5 tokens, a remainder
    "vision": (8, 4101, 6, 98),
    "wide": (8, 4096, 6, 98),  # the widest heads
}  # fmt: skip
OTHER_STAGES = ("stage 1", "stage 3")
OTHER_TARGETS = (
    (80, "float16"),
    (86, "bfloat16"),
    (90, "float32"),
    (100, "bfloat16"),
    (100, "float16"),
)
# the most of a program, by architecture
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
USUAL_SHARED_BYTES = 227 << 10
CHANNELS = {"vision": 64, "wide": 128}
PREFIX = 5
GROUPS = 48
CLUSTERS = 100  # of keys, each with a residual key
# The most registers per thread, bytes of shared memory, and instructions in an innermost loop, and
# the fewest programs that run at once on a multiprocessor of sm_90. Raise a budget only for a kernel
# that the cycle model finds faster, or for what the last block needs to be right.
BUDGETS = {
    "score_tokens": (240, 49152, 1000, 2), "bound_and_place": (96, 8192, 480, 4),
    "mark_candidates": (128, 49152, 400, 3),
    "pick_best": (128, 8192, 720, 4), "pick_all": (64, 4096, 120, 32), "attend_tiles": (128, 28672, 365, 4),
    "query_gradient": (128, 32768, 360, 4), "key_gradients": (160, 20480, 540, 3),
    "attend_densely": (96, 16384, 220, 5),
    "query_gradient_densely": (128, 32768, 320, 4), "key_gradients_densely": (168, 16384, 500, 6),
    "add_runs": (64, 8192, 80, 8),
    "gather_partials": (96, 8192, 200, 4), "mark_keys": (48, 8192, 0, 8), "fill_entries": (64, 8192, 140, 8),
    "sum_up_unselected": (152, 49152, 704, 3), "sum_run": (128, 16384, 400, 4),
}  # fmt: skip
WIDE = {  # what differs for D 64 and D 128
    "vision": {
        "score_tokens": (240, 75776, 560, 2), "mark_candidates": (128, 81920, 460, 2),
        "attend_tiles": (168, 49152, 550, 2),
    },
    "wide": {
        # Triton 3.8 needs 4 KiB more than 3.6 and 3.9; registers alone decide how many programs run.
        "score_tokens": (240, 28672, 700, 2), "mark_candidates": (64, 32768, 220, 6),
        "attend_tiles": (176, 53248, 410, 2), "query_gradient": (168, 65536, 320, 2),
        "key_gradients": (176, 40960, 330, 2), "sum_run": (240, 32768, 720, 2),
        "add_runs": (96, 8192, 110, 6),
    },
}  # fmt: skip


class Budget(NamedTuple):
    """The limits of one kernel, as `BUDGETS` lists them."""

    registers: int
    shared_bytes: int
    loop: int
    blocks: int


class Report(NamedTuple):
    """What one kernel needs on one shape; -1 if it did not compile, or was not looked for."""

    kernel: str
    shape: str
    warps: int
    registers: int = -1
    shared_bytes: int = -1
    spilled_bytes: int = -1
    loop: int = -1
    blocks: int = -1
    error: str = ""


def walk(
    name: str, channels: int = 32, dtype: torch.dtype = torch.bfloat16, plain: bool = False
) -> list[Launch]:
    """Record all launches of the operator, its gradients and the forms on the shape of a stage.

    Args:
        name: of the stage.
        channels: D, where the stage has no other.
        dtype: of queries, keys and values.
        plain: without masks, and without steps by themselves: only what a model launches.

    Returns:
        The launches, in order.
    """
    batch, tokens, heads, top_k = STAGES[name]
    channels = CHANNELS.get(name, channels)
    like: dict[str, Any] = {"device": "meta", "dtype": dtype}
    # Heads interleaved, as a layer's projection leaves them.
    query, key, value = (
        torch.empty(batch, tokens, 3, heads, channels, **like).permute(2, 0, 3, 1, 4).unbind(0)
    )
    centroids = torch.empty(heads, GROUPS, channels, device="meta")
    mask = torch.empty(batch, tokens, device="meta", dtype=torch.bool)
    if name == "vision":
        return walk_accelerated(query, key, value, centroids, mask, top_k)
    with recording() as launches:
        for key_mask in (None,) if plain else (None, mask):
            output, logsum, group_ids, key_ids, *extra = body(operators.attention)(
                query, key, value, centroids, top_k, 1.0, key_mask
            )
            if plain:
                continue
            body(operators.select_keys)(centroids, key, top_k, key_mask)
            body(operators.group_queries)(query, centroids, key_mask)
        saved = (output, query, key, value, output, logsum, group_ids, key_ids, *extra, 1.0)
        body(operators.attend_backward)(*saved)
        body(operators.group_statistics)(query, group_ids, GROUPS)
        if plain:
            return launches
        body(operators.attend)(query, key, value, group_ids, key_ids, 1.0)
        counts = torch.empty(heads, GROUPS, device="meta")
        updates = torch.empty((), dtype=torch.int64, device="meta")
        operators.move_centroids(centroids, torch.empty_like(centroids), counts, updates, 0.5)
        segments = sort_queries(group_ids, GROUPS)
        weights = products.by_rows(1, query, key, segments, key_ids)
        products.by_rows(2, weights, value, segments, key_ids)
        products.by_columns(weights, output, segments, key_ids, tokens)
    return launches


def walk_accelerated(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, mask: Tensor, top_k: int
) -> list[Launch]:
    """Record the launches of a forward pass of an accelerated model: with a prefix, with a mask, with
    a bias, and with residual keys of clusters.
    """
    attention = body(operators.attention)
    with recording() as launches:
        attention(query[:, :, PREFIX:], key, value, centroids, top_k, 1.0, None, True)
        _, _, *ids = attention(query, key, value, centroids, top_k, 1.0, mask, True)
        bias = torch.empty(key.shape[:3], device="meta")
        body(operators.attend)(query, key, value, *ids[:2], 1.0, bias)
        clusters = torch.empty(key.shape[:3], device="meta", dtype=torch.int64)
        body(operators.sum_groups)(key, clusters, CLUSTERS)
        body(operators.summarize_clusters)(query, key, value, *ids[:2], 1.0, clusters, CLUSTERS)
    return launches


class Span(NamedTuple):
    """Instructions from ``start`` to ``end``."""

    start: int
    end: int

    def contains(self, other: Span) -> bool:
        """Whether another span is inside it."""
        return self != other and self.start <= other.start and other.end <= self.end


def loops_of(listing: str) -> list[Span]:
    """The loops of a disassembled kernel, each from the target of a jump back to that jump."""
    labels: dict[str, int] = {}
    loops, count = [], 0
    for row in listing.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", row):
            labels[found[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", row):
            count += 1
            found = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", row)
            if found and labels.get(found[1], count) < count - 1:
                loops.append(Span(labels[found[1]], count))
    return loops


def longest_loop(cubin: bytes) -> int:
    """Instructions of the longest loop that contains no other; 0 without loops."""
    loops = loops_of(tool("nvdisasm", "--no-dataflow", "-c", cubin=cubin))
    inner = [loop for loop in loops if not any(map(loop.contains, loops))]
    return max((loop.end - loop.start for loop in inner), default=0)


def over_budget(row: Report, arch: int, budgets: bool = True) -> str:
    """What is wrong with a kernel: an error, spilled registers, too much shared memory, or what
    exceeds its budget.

    Args:
        row: what it needs.
        arch: the architecture it was compiled for; budgets are those of sm_90.
        budgets: whether budgets count.

    Returns:
        A description; empty if nothing is wrong.
    """
    if row.error or row.spilled_bytes:
        return row.error or f"spills {row.spilled_bytes} bytes"
    available = SHARED_BYTES.get(arch, USUAL_SHARED_BYTES)
    if row.shared_bytes > available:
        return f"shared bytes {row.shared_bytes} ({available} available)"
    limits = BUDGETS | WIDE.get(row.shape, {})
    if not budgets or arch != 90 or row.kernel not in limits:
        return ""
    return ", ".join(exceeded(row, Budget(*limits[row.kernel])))


def exceeded(row: Report, budget: Budget) -> Iterator[str]:
    """Yield each limit of a budget that a kernel exceeds."""
    measured = (
        ("registers", row.registers, budget.registers),
        ("shared bytes", row.shared_bytes, budget.shared_bytes),
        ("instructions in a loop", row.loop, budget.loop),
    )
    for name, value, limit in measured:
        if value > limit:
            yield f"{name} {value} ({limit} allowed)"
    if row.blocks < budget.blocks:
        yield f"{row.blocks} programs on a multiprocessor ({budget.blocks} needed)"


def compile_launch(launch: Launch, shape: str, arch: int, count_loop: bool = True) -> Report:
    """Compile one launch for one architecture.

    Args:
        launch: with its arguments.
        shape: the name of its stage.
        arch: the architecture.
        count_loop: whether to disassemble the kernel, which takes half as long as compiling it, to
            count the instructions of its longest loop.
    """
    source, options = source_of(launch)
    name, warps = launch.kernel.__name__, options["num_warps"]
    common.compiled_for.append(arch)
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cubin, shared = built.asm["cubin"], built.metadata.shared
        registers, spilled = registers_and_stack(cubin)
        blocks = programs_that_fit(registers, shared, warps)
        loop = longest_loop(cubin) if count_loop else -1
        return Report(name, shape, warps, registers, shared, spilled, loop, blocks)
    except Exception as error:
        # whatever the compiler trips over is what this command is here to report
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return Report(name, shape, warps, error=first_line)
    finally:
        common.compiled_for.pop()


def reports(
    arch: int,
    dtype: torch.dtype = torch.bfloat16,
    shapes: Iterable[str] = tuple(STAGES),
    plain: bool = False,
) -> Iterator[Report]:
    """Compile every distinct launch of some stages."""
    seen = set()
    for shape in shapes:
        for launch in walk(shape, dtype=dtype, plain=plain):
            source, options = source_of(launch)
            mark = (source.hash(), tuple(sorted(options.items())))
            if mark not in seen:
                seen.add(mark)
                yield compile_launch(launch, shape, arch, count_loop=not plain)


def others() -> Iterator[tuple[int, str, Report]]:
    """Architecture, type and report of what a model launches on other GPUs and in other types."""
    for arch, dtype in OTHER_TARGETS:
        for row in reports(arch, getattr(torch, dtype), OTHER_STAGES, plain=True):
            yield arch, dtype, row


def check_others() -> int:
    """Compile for other GPUs and types; print one line for each, and one for every kernel that spills
    registers.

    Spilling makes a kernel slower, not wrong: its sizes are chosen for sm_90 in bfloat16.

    Returns:
        The exit status: 1 if a kernel does not compile or does not fit.
    """
    failed, spilling = [], []
    count = collections.Counter[str]()
    for arch, dtype, row in others():
        target = f"sm_{arch} {dtype}"
        count[target] += 1
        words = over_budget(row._replace(spilled_bytes=0), arch, budgets=False)
        if words:
            failed.append(f"{target} {row.kernel} on {row.shape}: {words}")
        elif row.spilled_bytes:
            spilling.append(
                f"{target} {row.kernel} on {row.shape} spills {row.spilled_bytes} bytes"
            )
    for target, number in count.items():
        print(f"{target}: {number} kernels")
    print(*spilling, sep="\n")
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed))


def table(rows: list[Report]) -> str:
    """The reports as aligned text."""
    titles = f"{'warps':>6}{'registers':>11}{'shared':>9}{'spilled':>9}{'loop':>7}{'blocks':>8}"
    lines = [f"{'kernel':22}{'shape':10}{titles}"]
    for row in rows:
        numbers = f"{row.warps:6}{row.registers:11}{row.shared_bytes:9}{row.spilled_bytes:9}{row.loop:7}{row.blocks:8}"
        lines.append(f"{row.kernel:22}{row.shape:10}{row.error or numbers}")
    return "\n".join(lines)


def as_json(found: list[Report], options: argparse.Namespace, failed: int) -> str:
    """The reports as JSON, with versions and the number of kernels that failed."""
    document = {
        "arch": options.arch,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "failed": failed,
        "kernels": [row._asdict() for row in found],
    }
    return json.dumps(document, indent=1)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="compile_kernels.py", description="Compile every kernel.")
    parser.add_argument(
        "--arch",
        type=int,
        default=90,
        help="compute capability times ten: 80, 90, 100 (default: 90)",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument(
        "--others", action="store_true", help="other GPUs and types instead, two shapes each"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if interpreting():
        parser.error("TRITON_INTERPRET is set: nothing can be compiled; unset it")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compile everything and print what it needs.

    Returns:
        The exit status: 1 if a kernel does not compile, spills, or exceeds its budget.
    """
    options = parse_arguments(arguments)
    if options.others:
        return check_others()
    found = list(reports(options.arch, getattr(torch, options.dtype)))
    with_budgets = options.dtype == "bfloat16"
    failed = {
        row: words for row in found if (words := over_budget(row, options.arch, with_budgets))
    }
    if options.json:
        print(as_json(found, options, len(failed)))
    else:
        versions = f"Triton {triton.__version__}, torch {torch.__version__}"
        print(f"{versions}, sm_{options.arch}, {options.dtype}, D 32, G {GROUPS}")
        print(table(found))
    for row, words in failed.items():
        print(f"{row.kernel} on {row.shape}: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
