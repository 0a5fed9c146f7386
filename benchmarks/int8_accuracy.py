"""Accuracy on Imagenette in float32 and in int8, in onnxruntime, OpenVINO and PyTorch.

    pip install '.[all]' nncf torchao
    python benchmarks/int8_accuracy.py IMAGENETTE --out benchmarks/results/int8.json

IMAGENETTE is a folder with train/CLASS/ and val/CLASS/, of images of 128 px. A way that does not
work is a row with the first sentence of its error. Nothing is timed.
"""

import argparse
import io
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import dgt
from dgt.inference import encode_onnx, open_onnx
from dgt.inference.export import source_of_run
from dgt.runs import LoadedRun, load_run
from dgt.runs.recipe import build_data
from dgt.utils.records import command_line, processor, write_record

Images = NDArray[np.float32]
Runner = Callable[[Images], Any]
"""Images (B, 3, S, S), normalized -> logits (B, classes)."""

MODEL = "dgt_nano.imagenette"
SIDE = 128  # pixels
BATCH = 25  # of 3,925 images none is left
CALIBRATION = 300  # images of the training split
KINDS = ["Conv", "MatMul", "Gemm"]  # what onnxruntime quantizes
PACKAGES = ("torch", "onnxruntime", "openvino", "nncf", "torchao")


def images_of(
    root: Path, split: str, count: int | None
) -> tuple[LoadedRun, list[tuple[Images, NDArray[np.int64]]]]:
    """The model, and batches of images of a split as it takes them with their labels there."""
    size = [] if count is None else ["--data.val_size", str(count)]
    changes = ["--data.root", str(root), "--data.image_size", str(SIDE), "--data.val_split", split]
    batch = ["--data.batch_size", str(BATCH), "--data.num_workers", "0"]
    unmixed = ["--data.augmentation.mixup", "0", "--data.augmentation.cutmix", "0"]
    run = load_run(MODEL, [*changes, *batch, *unmixed, *size])
    data = build_data(run.recipe)
    data.setup("validate", run.class_names)
    return run, [(images.numpy(), np.asarray(labels)) for images, labels in data.val_dataloader()]


class OneByOne:
    """Batches of calibration, as onnxruntime asks for them."""

    def __init__(self, batches: list[Images]) -> None:
        self.batches: Iterator[Images] = iter(batches)

    def get_next(self) -> dict[str, Images] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"images": batch}


def write_whole(run: LoadedRun, folder: Path) -> Path:
    """The exported file, of one size, in float32."""
    path = folder / "whole.onnx"
    if not path.is_file():
        path.write_bytes(encode_onnx(replace(source_of_run(run), fixed=(BATCH, SIDE, SIDE))))
    return path


def in_pytorch(network: nn.Module) -> tuple[Runner, int]:
    """A network, and the bytes of its weights."""
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)

    def run(images: Images) -> Any:
        with torch.no_grad():
            return network(torch.from_numpy(images)).numpy()

    return run, buffer.tell()


def float32(run: LoadedRun, folder: Path, batches: list[Images]) -> tuple[Runner, int]:
    """The model as it is."""
    return in_pytorch(run.network.eval())


def in_onnxruntime(path: Path) -> tuple[Runner, int]:
    """An ONNX file, and its bytes."""
    runner = open_onnx(path.read_bytes())
    return lambda images: runner(torch.from_numpy(images))[0].numpy(), path.stat().st_size


def onnx_float32(run: LoadedRun, folder: Path, batches: list[Images]) -> tuple[Runner, int]:
    """The exported file."""
    return in_onnxruntime(write_whole(run, folder))


def onnx_int8(run: LoadedRun, folder: Path, batches: list[Images]) -> tuple[Runner, int]:
    """The exported file, prepared and quantized by onnxruntime."""
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared, small = folder / "prepared.onnx", folder / "int8.onnx"
    quant_pre_process(str(write_whole(run, folder)), str(prepared))
    quantize_static(
        str(prepared),
        str(small),
        OneByOne(batches),
        op_types_to_quantize=KINDS,
        per_channel=True,
    )
    return in_onnxruntime(small)


def openvino_int8(run: LoadedRun, folder: Path, batches: list[Images]) -> tuple[Runner, int]:
    """The exported file, quantized after training by OpenVINO's NNCF."""
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(write_whole(run, folder))
    small = nncf.quantize(model, nncf.Dataset(batches), subset_size=len(batches))
    openvino.save_model(small, folder / "int8.xml")
    compiled = openvino.Core().compile_model(folder / "int8.xml", "CPU")
    size = sum((folder / f"int8.{end}").stat().st_size for end in ("xml", "bin"))
    return lambda images: compiled([images])[0], size


def torchao_int8(run: LoadedRun, folder: Path, batches: list[Images]) -> tuple[Runner, int]:
    """The model with int8 weights in its linear layers, by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    network = run.network.eval()
    quantize_(network, Int8WeightOnlyConfig())
    return in_pytorch(network)


def snapshot_onnx(run: LoadedRun, folder: Path, batches: list[Images]) -> tuple[Runner, int]:
    """The frozen snapshot as an ONNX file."""
    snapshot = dgt.optimize_for_inference(run.network.eval())
    source = replace(source_of_run(run), module=snapshot, fixed=(BATCH, SIDE, SIDE))
    path = folder / "snapshot.onnx"
    path.write_bytes(encode_onnx(source))
    return in_onnxruntime(path)


WAYS = {
    "PyTorch, float32": float32,
    "onnxruntime, float32": onnx_float32,
    "onnxruntime, int8, static": onnx_int8,
    "OpenVINO, int8 by NNCF": openvino_int8,
    "PyTorch, int8 weights of linears by torchao": torchao_int8,
    "onnxruntime, of the frozen snapshot": snapshot_onnx,
}


def measure(runner: Runner, batches: list[tuple[Images, NDArray[np.int64]]]) -> list[int]:
    """The class of every image."""
    return [int(label) for images, _ in batches for label in runner(images).argmax(1)]


def main() -> None:
    """Go each way, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, help="Imagenette's folder")
    parser.add_argument("--images", type=int, help="of the validation; default all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    calibration = [images for images, _ in images_of(options.root, "train", CALIBRATION)[1]]
    _, batches = images_of(options.root, "val", options.images)
    labels = [int(label) for _, of_batch in batches for label in of_batch]
    rows: dict[str, Any] = {}
    whole: list[int] = []
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                runner, size = way(load_run(MODEL), Path(folder), calibration)
                found = measure(runner, batches)
            except Exception as error:  # of any library: what it says is the result
                rows[name] = {"problem": str(error).partition("\n")[0] or type(error).__name__}
                print(name, rows[name])
                continue
        whole = whole or found
        pairs = list(zip(found, labels, whole, strict=True))
        rows[name] = {
            "top1": sum(label == true for label, true, _ in pairs) / len(pairs),
            "as_float32": sum(label == other for label, _, other in pairs) / len(pairs),
            "bytes": size,
        }
        print(name, rows[name])
    content = {
        "command": command_line(),
        "processor": processor(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "images": len(labels),
        "calibration": sum(map(len, calibration)),
        "rows": rows,
    }
    write_record(options.out, content)


if __name__ == "__main__":
    main()
