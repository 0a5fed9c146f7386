"""Compile every kernel for a GPU that need not be there, and list what it takes of the chip.

    python benchmarks/compile_kernels.py [--arch 90] [--dtype bfloat16] [--json]
    python benchmarks/compile_kernels.py --others

The operator, its gradients and the forms of the appendix are walked on meta tensors with the shapes
of DGT-T's stages, and all that they would launch is compiled. Exits with 1 if a kernel does not
compile, spills registers, or, in bfloat16 for sm_90, exceeds its budget of registers, shared
memory, programs at once or instructions of a loop. ``--others`` compiles what a model launches for
other GPUs and types, two shapes each, checks that it fits their shared memory, and prints what spills.
"""

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from gpu_model.compiling import body, source_of, tool
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
# of a program, at most
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
CHANNELS = {"vision": 64, "wide": 128}
PREFIX = 5
GROUPS = 48
# The most registers per thread, bytes of shared memory, and instructions in an innermost loop, and
# the fewest programs that run at once on a multiprocessor of sm_90. Raise a budget only for a kernel
# that the cycle model finds faster, or for what the last block needs to be right.
BUDGETS = {
    "score_tokens": (240, 49152, 1000, 2), "bound_and_place": (96, 8192, 480, 4),
    "mark_candidates": (128, 49152, 400, 3),
    "pick_best": (128, 8192, 720, 4), "pick_all": (64, 4096, 120, 32), "attend_tiles": (128, 28672, 365, 4),
    "query_gradient": (128, 32768, 360, 4), "key_gradients": (224, 32768, 640, 2),
    "attend_densely": (96, 16384, 220, 5),
    "query_gradient_densely": (128, 32768, 320, 4), "key_gradients_densely": (168, 16384, 500, 6),
    "add_runs": (64, 8192, 80, 8),
    "gather_partials": (96, 8192, 200, 4), "mark_keys": (48, 8192, 0, 8), "fill_entries": (64, 8192, 140, 8),
    "sum_up_rest": (152, 49152, 704, 3), "sum_run": (128, 16384, 400, 4),
}  # fmt: skip
WIDE = {  # what differs for D 64 and D 128
    "vision": {
        "score_tokens": (240, 75776, 560, 2), "mark_candidates": (128, 81920, 460, 2),
        "attend_tiles": (168, 49152, 550, 2),
    },
    "wide": {
        "score_tokens": (240, 24576, 700, 2), "mark_candidates": (64, 32768, 220, 6),
        "attend_tiles": (176, 53248, 400, 2), "query_gradient": (168, 65536, 320, 2),
        "key_gradients": (176, 40960, 320, 2), "sum_run": (240, 32768, 720, 2),
        "add_runs": (96, 8192, 110, 6),
    },
}  # fmt: skip


class Report(NamedTuple):
    """What one kernel takes on one shape; -1 where it did not compile."""

    kernel: str
    shape: str
    warps: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    loop: int
    blocks: int
    error: str


def walk(
    name: str, channels: int = 32, dtype: torch.dtype = torch.bfloat16, plain: bool = False
) -> list[Launch]:
    """Record all launches of the operator, its gradients and the forms on the shape of a stage.

    A ``plain`` walk has no masks and no steps of their own: what a model launches.
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
    with recording() as launches:
        if name == "vision":
            body(operators.attention)(
                query[:, :, PREFIX:], key, value, centroids, top_k, 1.0, None, True
            )
            _, _, *ids = body(operators.attention)(
                query, key, value, centroids, top_k, 1.0, mask, True
            )
            bias = torch.empty(key.shape[:3], device="meta")
            body(operators.attend)(query, key, value, *ids[:2], 1.0, bias)
            return launches
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


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which in these kernels holds nothing but
    spilled registers.
    """
    found = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    registers, stack = re.findall(r"REG:(\d+)", found), re.findall(r"STACK:(\d+)", found)
    return max(map(int, registers)), max(map(int, stack))


def longest_loop(cubin: bytes) -> int:
    """Instructions of the longest loop that holds no other; 0 without loops."""
    labels: dict[str, int] = {}
    loops, count = [], 0
    for row in tool("nvdisasm", "-c", cubin=cubin).splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", row):
            labels[found[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", row):
            count += 1
            found = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", row)
            if found and labels.get(found[1], count) < count - 1:
                loops.append((labels[found[1]], count))
    inner = [
        b - a for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    return max(inner, default=0)


def blocks_of(registers: int, shared: int, warps: int) -> int:
    """Programs at once on a multiprocessor of sm_90: 64 K registers, 228 KB of shared memory, 64
    warps.
    """
    by_registers = 4 * (16384 // (-(-registers // 8) * 256)) // warps
    return min(by_registers, (228 << 10) // (shared + 1024), 64 // warps, 32)


def over_budget(row: Report, arch: int, budgets: bool = True) -> str:
    """What exceeds the budget of a kernel.

    Nothing where it has none, or on another architecture.
    """
    if row.error or row.spilled_bytes:
        return row.error or f"spills {row.spilled_bytes} bytes"
    limits = BUDGETS | WIDE.get(row.shape, {})
    if row.shared_bytes > SHARED_BYTES.get(arch, 227 << 10):
        return f"shared bytes {row.shared_bytes} ({SHARED_BYTES[arch]} there are)"
    if not budgets or arch != 90 or row.kernel not in limits:
        return ""
    registers, shared, loop, blocks = limits[row.kernel]
    found = [
        f"{name} {value} ({limit} allowed)"
        for name, value, limit in (
            ("registers", row.registers, registers), ("shared bytes", row.shared_bytes, shared),
            ("instructions in a loop", row.loop, loop),
        )
        if value > limit
    ]  # fmt: skip
    found += (
        [f"{row.blocks} programs on a multiprocessor ({blocks} needed)"]
        if row.blocks < blocks
        else []
    )
    return ", ".join(found)


def compile_launch(launch: Launch, shape: str, arch: int) -> Report:
    """Compile one launch for one architecture."""
    source, options = source_of(launch)
    name, warps = launch.kernel.__name__, options["num_warps"]
    common.compiled_for.append(arch)
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cubin, shared = built.asm["cubin"], built.metadata.shared
        registers, spilled = resources(cubin)
        loop, blocks = longest_loop(cubin), blocks_of(registers, shared, warps)
        return Report(name, shape, warps, registers, shared, spilled, loop, blocks, "")
    except Exception as error:
        # whatever the compiler trips over is what this command is here to report
        return Report(
            name,
            shape,
            warps,
            -1,
            -1,
            -1,
            -1,
            -1,
            f"{type(error).__name__}: {error}".splitlines()[0],
        )
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
                yield compile_launch(launch, shape, arch)


def others() -> Iterator[tuple[int, str, Report]]:
    """What a model launches, for other GPUs and types."""
    for arch, dtype in OTHER_TARGETS:
        for row in reports(arch, getattr(torch, dtype), OTHER_STAGES, plain=True):
            yield arch, dtype, row


def check_others() -> int:
    """Compile for the others and print one line each, and one for every kernel that spills registers.

    Spilling makes a kernel slower, not wrong: its sizes are chosen for sm_90 in bfloat16.

    Returns:
        1 if a kernel does not compile or does not fit, otherwise 0.
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
            spilling.append(f"{target} {row.kernel} on {row.shape} spills {row.spilled_bytes} bytes")
    for target, number in count.items():
        print(f"{target}: {number} kernels")
    print(*spilling, sep="\n")
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed))


def table(rows: list[Report]) -> str:
    """Reports as aligned text."""
    titles = f"{'warps':>6}{'registers':>11}{'shared':>9}{'spilled':>9}{'loop':>7}{'blocks':>8}"
    lines = [f"{'kernel':22}{'shape':10}{titles}"]
    for row in rows:
        numbers = f"{row.warps:6}{row.registers:11}{row.shared_bytes:9}{row.spilled_bytes:9}{row.loop:7}{row.blocks:8}"
        lines.append(f"{row.kernel:22}{row.shape:10}{row.error or numbers}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compile everything and print what it takes.

    1 if a kernel spills or does not compile, otherwise 0.
    """
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
    if options.others:
        return check_others()
    found = list(reports(options.arch, getattr(torch, options.dtype)))
    with_budgets = options.dtype == "bfloat16"
    failed = {
        row: words for row in found if (words := over_budget(row, options.arch, with_budgets))
    }
    if options.json:
        kernels = [row._asdict() for row in found]
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        print(
            json.dumps(
                {"arch": options.arch, **versions, "failed": len(failed), "kernels": kernels},
                indent=1,
            )
        )
    else:
        versions_told = f"Triton {triton.__version__}, torch {torch.__version__}"
        print(f"{versions_told}, sm_{options.arch}, {options.dtype}, D 32, G {GROUPS}")
        print(table(found))
    for row, words in failed.items():
        print(f"{row.kernel} on {row.shape}: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
