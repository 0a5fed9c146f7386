"""Trained models for other programs: ONNX, `torch.export`, and timm's own format.

Made in :mod:`dgt.inference`.
"""

from dgt.inference.export import Export, Verification, export, verify
from dgt.inference.formats import Source, encode_onnx, encode_program, open_onnx, open_program

__all__ = [
    "Export",
    "Source",
    "Verification",
    "encode_onnx",
    "encode_program",
    "export",
    "open_onnx",
    "open_program",
    "verify",
]
