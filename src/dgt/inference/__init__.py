"""Inference: models optimized for prediction, and files for other programs (:mod:`dgt.export`).

- ``form``: what `optimize_for_inference` makes.
- ``export``: what of a trained run, and the file that equals it; ``formats`` of files,
  ``onnx_operators`` in them.
"""

from dgt.inference.form import optimize_for_inference

__all__ = ["optimize_for_inference"]
