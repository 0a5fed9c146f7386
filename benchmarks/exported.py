"""DGT exported to ONNX, in onnxruntime, beside eager PyTorch: outputs are compared, then both are
timed in turns on the same threads.

    python benchmarks/exported.py [--model dgt_tiny] [--threads 2] [--rounds 7] [--int8] [--json FILE]

With `--int8`, the file is also measured after onnxruntime's dynamic quantization, of matrix products
only and of convolutions too. Weights are random: speed does not depend on them, but the agreement of
int8 does (`--checkpoint RUN` takes a trained model).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import timm
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn

from dgt.bench import machine
from dgt.export import Source, encode_onnx, open_onnx, verify
from dgt.training import load_run

SIZES = (224, 320, 512)
BATCHES = (1, 8)
INT8 = {"int8 MatMul": ["MatMul", "Gemm"], "int8 MatMul, Conv": ["MatMul", "Gemm", "Conv"]}


def quantized(content: bytes, operators: list[str]) -> bytes:
    """The same graph with int8 weights of these operators; activations are quantized at run time."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        before.write_bytes(content)
        quantize_dynamic(before, after, op_types_to_quantize=operators, weight_type=QuantType.QInt8)
        return after.read_bytes()


@torch.inference_mode()
def time_in_turns(candidates: dict, images: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median milliseconds per image of each candidate; every round runs all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(images)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(times) / len(images) for name, times in seconds.items()}


class Exported(NamedTuple):
    """A model, and its files and their runners by name."""

    model: nn.Module
    files: dict[str, bytes]
    runners: dict[str, Any]


def open_model(options: argparse.Namespace) -> nn.Module:
    """The trained model of a run, or one with random weights of seed 0."""
    if options.checkpoint:
        return load_run(options.checkpoint).network
    torch.manual_seed(0)
    return timm.create_model(options.model)


def export(options: argparse.Namespace) -> Exported:
    """Encode the model, also in int8 if that is asked for."""
    model = open_model(options).eval()
    files = {"onnxruntime": encode_onnx(Source(model))}
    if options.int8:
        for name, operators in INT8.items():
            files[name] = quantized(files["onnxruntime"], operators)
    runners = {name: open_onnx(content, options.threads) for name, content in files.items()}
    return Exported(model, files, runners)


def measure(exported: Exported, side: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch of images of one size, after the outputs have been compared."""
    agreement = {
        name: str(verify(exported.model, run, [(side, side)], least=0.0))
        for name, run in exported.runners.items()
    }
    print(side, agreement)
    rows = []
    for batch in options.batches:
        images = torch.randn(batch, 3, side, side)
        candidates = {"eager": exported.model, **exported.runners}
        found = time_in_turns(candidates, images, options.rounds)
        rows.append({"side": side, "batch": batch, "ms_per_image": found, "agreement": agreement})
        times = (f"{name} {ms:.1f} ms ({ms / found['eager']:.2f})" for name, ms in found.items())
        print(f"{side} px, batch {batch}: {'  '.join(times)}", flush=True)
    return rows


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dgt_tiny")
    parser.add_argument("--checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="sides of square images"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    """Export, compare, and print one row for each size and batch."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    exported = export(options)
    sizes = {name: len(content) for name, content in exported.files.items()}
    print({name: f"{size / 2**20:.1f} MiB" for name, size in sizes.items()})
    rows = []
    for side in options.sizes:
        rows += measure(exported, side, options)
    if options.json:
        about = {**machine(), "onnxruntime": onnxruntime.__version__, "threads": options.threads}
        record = {"machine": about, "model": options.model, "bytes": sizes, "rows": rows}
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
