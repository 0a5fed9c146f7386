"""Trained models for other programs: ONNX, `torch.export`, and timm's own format."""

from dgt.export.files import Export, export
from dgt.export.onnx_file import encode_onnx, open_onnx
from dgt.export.program import encode_program, open_program
from dgt.export.source import Source
from dgt.export.verify import Verification, verify

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
