"""A module as one ONNX file of standard operators, with batch, height and width left free."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from typing import Any

import torch
from torch import Tensor

from dgt.inference.program import Runner, trace
from dgt.inference.source import Source
from dgt.utils.errors import UserError

OPSET = 18
LARGEST = 2**31 - 2**24  # bytes of one file, by the format it is written in, less some room for the graph
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")


def check_libraries() -> None:
    """Raise ValueError unless everything is installed that ONNX needs."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"ONNX needs {', '.join(missing)}, not installed here: pip install 'dynamic-group-transformer[export]'"
        )


def encode_onnx(source: Source) -> bytes:
    """Return the ONNX file of a module: input `images`, outputs as the source names them.

    Raises:
        ValueError: as :func:`dgt.inference.program.trace` does; for operators that ONNX lacks, and for more than 2 GiB.
    """
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass

    from dgt.inference.onnx_operators import FUNCTIONS

    size = sum(tensor.nbytes for tensor in source.module.state_dict().values())
    if size > LARGEST:
        raise UserError(f"one ONNX file holds at most 2 GiB, the weights alone take {size / 2**30:.1f} GiB")
    model = _translate(source)
    for function in FUNCTIONS:
        body = onnx_ir.serde.from_proto(function.to_function_proto())
        model.functions[body.identifier()] = body
    InlinePass()(model)
    ClearMetadataAndDocStringPass()(model)  # among it paths of this machine
    model.opset_imports.pop("dgt", None)  # all functions are inlined
    model.metadata_props.update(source.about)
    file = onnx_ir.to_proto(model)
    weights = {tensor.name for tensor in file.graph.initializer}
    shapes = [value for value in file.graph.value_info if value.name not in weights]
    del file.graph.value_info[:]  # of weights they say nothing new, and confuse onnxruntime's quantisation
    file.graph.value_info.extend(shapes)
    content: bytes = file.SerializeToString()
    return content


def _translate(source: Source) -> Any:
    """Return the module as a model of onnx_ir, in which the functions that translations call have no bodies yet."""
    from dgt.inference.onnx_operators import TRANSLATIONS

    program = trace(source)
    names = {0: "batch"} if source.size is not None else {0: "batch", 2: "height", 3: "width"}
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names and versions inside the exporter: nothing a user could mend
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=TRANSLATIONS,
                dynamic_shapes=(names,),
                input_names=["images"],
                output_names=list(source.outputs),
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise UserError(f"a {type(source.module).__name__} cannot be written as ONNX: {_reason(error)}") from error
    finally:
        logger.setLevel(level)
    return exported.model  # type: ignore[union-attr]


def _reason(error: BaseException) -> str:
    """Return the first line of the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def open_onnx(content: bytes, threads: int | None = None) -> Runner:
    """Return a function that runs an ONNX file in onnxruntime, on the CPU.

    Args:
        content: the file.
        threads: threads inside an operator; None leaves the choice to onnxruntime.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {"images": images.numpy()})]

    return run
