"""Exported files pass onnxruntime's quantization, and predict in int8 what they did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dgt.data.scenes import Scenes
from dgt.data.transforms import Normalize
from dgt.inference import encode_onnx
from dgt.inference.export import source_of_run
from dgt.runs import load_run

reason = "onnx, onnxscript and onnxruntime are not installed"
onnx = pytest.importorskip("onnx", reason=reason)
onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
quantization = pytest.importorskip("onnxruntime.quantization", reason=reason)
IMAGES = 40


class Images:
    """Scenes for calibration, one at a time."""

    def __init__(self, images: np.ndarray) -> None:
        self.images: Iterator[np.ndarray] = iter(np.split(images, len(images)))

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self.images, None)
        return None if image is None else {"images": image}


def scenes(split: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalized images, and their labels."""
    drawn = [Scenes(split, IMAGES, side)[index] for index in range(IMAGES)]
    pixels = torch.stack([torch.from_numpy(np.array(scene.to_pil())) for scene in drawn])
    normalize = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = normalize(pixels.permute(0, 3, 1, 2)).numpy()
    return images, np.array([scene.label for scene in drawn])


def test_static_quantization_keeps_the_classes(tmp_path: Path) -> None:
    run = load_run("dgt_nano.scenes")
    whole, prepared, small = (tmp_path / f"{name}.onnx" for name in ("whole", "prepared", "small"))
    whole.write_bytes(encode_onnx(replace(source_of_run(run), fixed=(1, 64, 64))))
    quantization.shape_inference.quant_pre_process(whole, prepared)
    images, _ = scenes("train", 64)
    quantization.quantize_static(
        prepared,
        small,
        Images(images),
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        per_channel=True,
    )
    kinds = {node.op_type for node in onnx.load(small).graph.node}
    assert "QuantizeLinear" in kinds
    assert small.stat().st_size < 0.5 * whole.stat().st_size
    images, labels = scenes("val", 64)
    accuracy = []
    for path in (whole, small):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        logits = [session.run(None, {"images": image})[0] for image in np.split(images, IMAGES)]
        accuracy.append((np.concatenate(logits).argmax(1) == labels).mean())
    assert accuracy[0] > 0.8
    assert accuracy[1] > accuracy[0] - 0.15
