"""Inference: models optimized for prediction, and files for other programs.

- ``optimize``: what `optimize_for_inference` makes, of ``packed`` layers.
- ``export``: what of a trained run, and the file that equals it; ``formats`` of files,
  ``onnx_operators`` in them.
"""

from dgt.inference.export import Export, Verification, verify
from dgt.inference.formats import Source, encode_onnx, encode_program, open_onnx, open_program
from dgt.inference.openvino_extension import (
    add_openvino_extension,
    open_openvino,
    openvino_extension_path,
)
from dgt.inference.optimize import optimize_for_inference

__all__ = [
    "Export",
    "Source",
    "Verification",
    "add_openvino_extension",
    "encode_onnx",
    "encode_program",
    "open_onnx",
    "open_openvino",
    "open_program",
    "openvino_extension_path",
    "optimize_for_inference",
    "verify",
]
