"""Compile every kernel for a GPU that need not be there, and list what it takes of the chip.

    python -m dgt.ops.triton.compile --arch 90 [--json]

The operator, its gradients and the forms of the appendix are walked on meta tensors with the shapes of DGT-T's stages
(bfloat16), and all that they would launch is compiled. Exits with 1 if a kernel does not compile or spills registers.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dgt.ops.triton import few_backward, few_tokens, grouping, many_backward, many_tokens, products, selection
from dgt.ops.triton.launch import Launch, interpreting, recording
from dgt.ops.triton.sorting import sort_queries

# Tokens at 224 px, heads and k of DGT-T's stages, and of dense prediction; D is 32 and G 48 everywhere.
STAGES = {"stage 1": (3136, 2, 98), "stage 2": (784, 4, 98), "stage 3": (196, 8, 98), "dense": (16384, 2, 512)}
BATCH, GROUPS = 8, 48
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1"}
INTEGERS = {torch.int64: "i64", torch.int32: "i32"}


class Report(NamedTuple):
    """What one kernel takes on one shape; -1 where it did not compile."""

    kernel: str
    shape: str
    warps: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    error: str


def walk(name: str, channels: int = 32, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """Record all launches of the operator, its gradients and the forms on the shape of a stage."""
    tokens, heads, top_k = STAGES[name]
    like: dict[str, Any] = {"device": "meta", "dtype": dtype}
    # Heads interleaved, as a layer's projection leaves them.
    query, key, value = torch.empty(BATCH, tokens, 3, heads, channels, **like).permute(2, 0, 3, 1, 4).unbind(0)
    centroids = torch.empty(heads, GROUPS, channels, device="meta")
    mask = torch.empty(BATCH, tokens, device="meta", dtype=torch.bool)
    with recording() as launches:
        group_ids = grouping.assign(query, centroids, None)[0]
        key_ids = selection.select(centroids, key, top_k, None)
        for key_mask in (None, mask):
            grouping.assign(query, centroids, key_mask, statistics=True)
            grouping.assign(query, centroids, key_mask)
            selection.select(centroids, key, top_k, key_mask)
            selection.select(centroids, key, tokens // 2, key_mask)  # streams where one chunk cannot hold all keys
            if few_tokens.fits_on_chip(query, GROUPS):
                few_tokens.attention(query, key, value, centroids, top_k, 1.0, key_mask)
        segments = sort_queries(group_ids, GROUPS)
        output, logsum = many_tokens.attend(query, key, value, segments, key_ids, 1.0)
        if few_tokens.fits(query, key, GROUPS):
            few_tokens.attend(query, key, value, group_ids, key_ids, 1.0)
            few_backward.backward(output, query, key, value, output, logsum, group_ids, key_ids, 1.0)
        many_backward.backward(output, query, key, value, output, logsum, segments, key_ids, 1.0)
        weights = products.rows_by_keys(query, key, segments, key_ids, 0.0)
        products.weights_by_rows(weights, value, segments, key_ids)
        products.weights_by_columns(weights, output, segments, key_ids, tokens)
    return launches


def describe_argument(value: Any) -> tuple[str, bool]:
    """Type of an argument in a signature, and whether it is known to be divisible by 16."""
    if isinstance(value, Tensor):
        return "*" + (TYPES | INTEGERS)[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    if value is None or value == 1:
        return "constexpr", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, int]]:
    """Specialise a kernel for the arguments of a launch as Triton itself would; source, and options of the compiler."""
    kernel = launch.kernel
    names = kernel.arg_names
    options = {name: value for name, value in launch.options.items() if name not in names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(names):
        if place < len(launch.arguments):
            signature[name], even = describe_argument(launch.arguments[place])
            if signature[name] == "constexpr":
                constants[(place,)] = launch.arguments[place]
            elif even:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(place,)] = "constexpr", launch.options[name]
    return ASTSource(kernel, signature, constants, attributes), options


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which in these kernels holds nothing but spilled registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+)", found), re.findall(r"STACK:(\d+)", found)
    return max(map(int, registers)), max(map(int, stack))


def compile_launch(launch: Launch, shape: str, arch: int) -> Report:
    """Compile one launch for one architecture."""
    source, options = source_of(launch)
    name, warps = launch.kernel.__name__, options["num_warps"]
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, spilled = resources(built.asm["cubin"])
        return Report(name, shape, warps, registers, built.metadata.shared, spilled, "")
    except Exception as error:  # whatever the compiler trips over is what this command is here to report
        return Report(name, shape, warps, -1, -1, -1, f"{type(error).__name__}: {error}".splitlines()[0])


def reports(arch: int) -> Iterator[Report]:
    """Compile every distinct launch of every stage."""
    seen = set()
    for shape in STAGES:
        for launch in walk(shape):
            source, options = source_of(launch)
            mark = (source.hash(), tuple(sorted(options.items())))
            if mark not in seen:
                seen.add(mark)
                yield compile_launch(launch, shape, arch)


def table(rows: list[Report]) -> str:
    """Reports as aligned text."""
    lines = [f"{'kernel':22}{'shape':10}{'warps':>6}{'registers':>11}{'shared':>9}{'spilled':>9}"]
    for row in rows:
        numbers = f"{row.warps:6}{row.registers:11}{row.shared_bytes:9}{row.spilled_bytes:9}"
        lines.append(f"{row.kernel:22}{row.shape:10}{row.error or numbers}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compile everything and print what it takes; 1 if a kernel spills or does not compile, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m dgt.ops.triton.compile", description="Compile every kernel.")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten: 80, 90, 100 (default: 90)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if interpreting():
        parser.error("TRITON_INTERPRET is set: nothing can be compiled; unset it")
    found = list(reports(options.arch))
    failed = [row for row in found if row.error or row.spilled_bytes]
    if options.json:
        kernels = [row._asdict() for row in found]
        print(json.dumps({"arch": options.arch, "failed": len(failed), "kernels": kernels}, indent=1))
    else:
        print(table(found))
    for row in failed:
        print(f"{row.kernel} on {row.shape}: {row.error or f'spills {row.spilled_bytes} bytes'}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
