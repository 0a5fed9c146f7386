"""Compiling kernels for a GPU that need not be there, and what they take of it."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from dgt.ops.triton.launch import Launch

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
    torch.int16: "i16",
}
INTEGERS = {torch.int64: "i64", torch.int32: "i32"}
# of a multiprocessor of sm_90
REGISTERS = 65536
SHARED_BYTES = 228 << 10
MOST_WARPS = 64
MOST_PROGRAMS = 32


def body(operator: Any) -> Any:
    """The Python function inside a ``torch.library.custom_op``.

    Called on meta tensors, the operator itself would only compute shapes.
    """
    return getattr(operator, "_init_fn", operator)


def describe_argument(value: Any) -> tuple[str, bool]:
    """The type of an argument in a signature, and whether it is known to be divisible by 16."""
    if isinstance(value, Tensor):
        return "*" + (TYPES | INTEGERS)[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    if value is None or value == 1:
        return "constexpr", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, int]]:
    """Specialize a kernel for the arguments of a launch as Triton itself would.

    Returns:
        The source, and the options of the compiler.
    """
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


def tool(name: str, *options: str, cubin: bytes) -> str:
    """The output for a cubin of one of the CUDA tools that come with Triton."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of its stack, which in these kernels holds nothing but
    spilled registers.
    """
    found = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    registers = re.findall(r"REG:(\d+)", found)
    stack = re.findall(r"STACK:(\d+)", found)
    return max(map(int, registers)), max(map(int, stack))


def programs_that_fit(registers: int, shared: int, warps: int) -> int:
    """How many programs fit on a multiprocessor of sm_90 at once.

    Args:
        registers: per thread.
        shared: bytes of shared memory of a program.
        warps: of a program.
    """
    by_registers = 4 * (REGISTERS // 4 // (-(-registers // 8) * 256)) // warps
    by_shared = SHARED_BYTES // (shared + 1024)
    return min(by_registers, by_shared, MOST_WARPS // warps, MOST_PROGRAMS)
