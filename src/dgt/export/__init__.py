"""Trained models for other programs: ONNX, `torch.export`, and timm's own format.

Made in :mod:`dgt.inference`.
"""

from dgt.inference.export import Export, Verification, export, verify
from dgt.inference.formats import Source, encode_onnx, encode_program, open_onnx, open_program
from dgt.inference.openvino_extension import (
    add_openvino_extension,
    open_openvino,
    openvino_extension_path,
)

__all__ = [
    "Export",
    "Source",
    "Verification",
    "add_openvino_extension",
    "encode_onnx",
    "encode_program",
    "export",
    "open_onnx",
    "open_openvino",
    "open_program",
    "openvino_extension_path",
    "verify",
]
