"""A module as a graph of PyTorch's operators, by `torch.export`: a `.pt2` file, and the first step towards ONNX.

Batch, height and width stay free. DG-Attention appears as this package's operators `dgt::group_queries`,
`dgt::select_keys` and `dgt::attend`: a process that loads the file imports dgt first.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from dgt.inference.source import Source
from dgt.utils.errors import UserError

EXAMPLE = (2, 3, 96, 160)  # sides that differ, and leave more than one token at stride 32

Runner = Callable[[Tensor], list[Tensor]]


def trace(source: Source) -> ExportedProgram:
    """Record a module as a graph.

    Args:
        source: the module; its images may have any batch, height and width unless it is built for one size.

    Returns:
        The program; its input is called `images`.

    Raises:
        ValueError: the module is not float32, or depends on sizes in a way that a graph cannot follow.
    """
    kinds = {p.dtype for p in source.module.parameters() if p.is_floating_point()}
    if kinds != {torch.float32}:
        raise UserError(f"the model must be float32, got {', '.join(sorted(map(str, kinds))) or 'no parameters'}")
    free: dict[int, Any] = {0: Dim("batch", min=1)}
    sides = EXAMPLE[2:] if source.size is None else (source.size, source.size)
    if source.size is None:
        free |= {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}  # of at least what leaves the last map more than one token
    try:
        with torch.no_grad():
            return torch.export.export(source.module, (torch.zeros(*EXAMPLE[:2], *sides),), dynamic_shapes=(free,))
    except Exception as error:  # of many kinds: whatever in the module cannot be traced
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"a {type(source.module).__name__} cannot be exported for free batch, height and width: {reason}"
        ) from error


def encode_program(source: Source) -> bytes:
    """Return the `.pt2` file of a module.

    Raises:
        ValueError: as :func:`trace` does.
    """
    program = trace(source)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=source.about)
    return buffer.getvalue()


def open_program(content: bytes) -> Runner:
    """Return a function that runs a `.pt2` file."""
    module = torch.export.load(io.BytesIO(content)).module()

    def run(images: Tensor) -> list[Tensor]:
        result = module(images)
        return [result] if isinstance(result, Tensor) else list(result)

    return run
