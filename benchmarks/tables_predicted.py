"""Tables of docs/kernels.md: what a cycle model predicts for a GPU, and floors that follow from counting."""

from __future__ import annotations

from typing import Any

from tables_shared import Cells, number_of_text, read, table

from dgt.utils.records import number

COPIES = 4.3  # TB/s of an H200
PRODUCTS = 790  # TFLOP/s of an H200 in bfloat16
CHANNELS, GROUPS = 32, 48
NEWEST, TRITON_36 = "gpu_model", "gpu_model_triton36"  # raw files, by the version of Triton
BATCHES = {
    "L196 k98": (128, 8),
    "L784 k98": (128, 4),
    "L3136 k98": (128, 2),
    "L16384 k512": (32, 2),
    "L16384 k513": (32, 2),
    "L64000 k500": (8, 2),
}
"""Images and heads of the shapes of `gpu_model.json`."""
FLOORS = ("L3136 k98", "L16384 k512", "L64000 k500", "L196 k98")


@number_of_text
def predicted(shape: str, inputs: str, direction: str, step: str = "all") -> str:
    """Microseconds of a pass, or of one kernel in it, by the cycle model."""
    return number(_row(shape, inputs, direction, step)["us"], 0)


@number_of_text
def predicted_with_triton36(shape: str, inputs: str, direction: str, step: str = "all") -> str:
    """The same of the code of Triton 3.6."""
    return number(_row(shape, inputs, direction, step, TRITON_36)["us"], 0)


@number_of_text
def registers(shape: str, inputs: str, direction: str, step: str, file: str = NEWEST) -> str:
    """Registers per thread of a kernel, as compiled for the model."""
    return str(_row(shape, inputs, direction, step, file)["registers"])


@number_of_text
def candidates(shape: str, inputs: str) -> str:
    """How many keys reach the bound of a row in the mean: counted, not predicted."""
    (found,) = (
        row["candidates"]
        for row in read("gpu_inputs")["rows"]
        if (row["shape"], row["inputs"]) == (shape, inputs)
    )
    return number(found, 0)


@table
def predicted_forward() -> Cells:
    """Microseconds of a forward pass by the cycle model, on random scores and on photographs."""
    rows = []
    for shape, (images, heads) in BATCHES.items():
        times = [
            number(_row(shape, inputs, "forward", "all")["us"], 0)
            for inputs in ("random", "photographs")
        ]
        rows.append([f"B{images} H{heads} {shape}", *times])
    return [["forward, predicted microseconds", "random", "photographs"], *rows]


@table
def floors_of_an_h200() -> Cells:
    """What the formulas of the page give, with the rates above."""
    rows = []
    for shape in FLOORS:
        images, heads = BATCHES[shape]
        tokens, keys = (int(word[1:]) for word in shape.split())
        of_heads = images * heads
        operand = of_heads * tokens * CHANNELS * 2
        ids = 8 * of_heads * (tokens + GROUPS * keys)
        forward = 4 * operand + ids + 4 * of_heads * tokens
        operations = 4 * of_heads * tokens * CHANNELS * (GROUPS + keys)
        gradients = 10 * of_heads * tokens * keys * CHANNELS
        giga = operations / 1e9
        rows.append(
            [
                f"B{images} H{heads} {shape}",
                f"{operand / 1e6:.0f} MB",
                f"{forward / 1e6:.0f} MB",
                number(giga, 0 if giga >= 10 else 1),
                _floor(forward, operations),
                _floor(8 * operand + ids, gradients),
            ]
        )
    heads_of_table = ["R", "forward bytes", "forward GFLOP", "forward floor", "backward floor"]
    return [["bfloat16, D 32, G 48", *heads_of_table], *rows]


def _row(shape: str, inputs: str, direction: str, step: str, file: str = NEWEST) -> Any:
    (found,) = (
        row
        for row in read(file)["rows"]
        if (row["shape"], row["inputs"], row["pass"], row["step"])
        == (shape, inputs, direction, step)
    )
    return found


def _floor(moved: float, operations: float) -> str:
    memory, arithmetic = moved / COPIES / 1e6, operations / PRODUCTS / 1e6
    longest = max(memory, arithmetic)
    return f"{longest:.0f} us ({'memory' if memory == longest else 'arithmetic'})"
