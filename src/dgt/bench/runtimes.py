"""Runtimes beside PyTorch that run the ONNX files of `dgt export`, on the CPU."""

import io
from collections.abc import Callable

import torch
from torch import Tensor

from dgt.inference.formats import Runner, check_libraries, check_size, open_onnx
from dgt.utils.errors import UserError


def open_openvino(content: bytes, threads: int | None = None) -> Runner:
    """Return a function that runs an ONNX file in OpenVINO, on the CPU, in float32."""
    check_runtime("openvino")
    import openvino

    core = openvino.Core()
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads or 0}
    compiled = core.compile_model(core.read_model(io.BytesIO(content)), "CPU", options)
    request, shape = compiled.create_infer_request(), compiled.input(0).partial_shape
    sizes = [side.get_length() if side.is_static else None for side in shape]

    def run(images: Tensor) -> list[Tensor]:
        check_size(images, sizes)
        found = request.infer([images.numpy()], share_inputs=True)
        return [torch.from_numpy(found[output].copy()) for output in compiled.outputs]

    return run


OPENERS: dict[str, Callable[[bytes, int | None], Runner]] = {"onnxruntime": open_onnx, "openvino": open_openvino}
"""What runs ONNX files here, by name."""


def check_runtime(name: str, training: bool = False, device: str = "cpu") -> None:
    """Raise UserError, with the remedy, unless a runtime does this, and all is installed that it needs."""
    if training or device != "cpu":
        raise UserError(f"{name} runs inference on a CPU: leave out --train and --device, or {name}")
    check_libraries()
    if name == "openvino":
        check_libraries("OpenVINO", ("openvino",), "openvino")
