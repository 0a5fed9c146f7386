"""DGT exported to ONNX, in onnxruntime, beside eager PyTorch: equal outputs, then time, in turns,
on the same threads.

    python benchmarks/exported.py [--model dgt_tiny] [--threads 2] [--rounds 7] [--int8] [--json FILE]

With `--int8` also the file after onnxruntime's dynamic quantization: of matrix products alone, and
of convolutions too. Weights are random: speed does not depend on them, agreement of int8 does
(`--checkpoint RUN` takes a trained model).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import onnxruntime
import timm
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from dgt.bench import machine
from dgt.export import Source, encode_onnx, open_onnx, verify
from dgt.training import load_run

SIZES = (224, 320, 512)
BATCHES = (1, 8)
INT8 = {"int8 MatMul": ["MatMul", "Gemm"], "int8 MatMul, Conv": ["MatMul", "Gemm", "Conv"]}


def quantised(content: bytes, operators: list[str]) -> bytes:
    """The same graph with int8 weights of these operators, and activations quantized as they come."""
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


def main() -> None:
    """Export, check, and print one row for each size and batch."""
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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = (
        load_run(options.checkpoint).network
        if options.checkpoint
        else timm.create_model(options.model)
    )
    files = {"onnxruntime": encode_onnx(Source(model.eval()))}
    if options.int8:
        files |= {
            name: quantised(files["onnxruntime"], operators) for name, operators in INT8.items()
        }
    runners = {name: open_onnx(content, options.threads) for name, content in files.items()}
    print({name: f"{len(content) / 2**20:.1f} MiB" for name, content in files.items()})
    rows = []
    for side in options.sizes:
        agreement = {
            name: str(verify(model, run, [(side, side)], least=0.0))
            for name, run in runners.items()
        }
        print(side, agreement)
        for batch in options.batches:
            images = torch.randn(batch, 3, side, side)
            found = time_in_turns({"eager": model, **runners}, images, options.rounds)
            rows.append(
                {"side": side, "batch": batch, "ms_per_image": found, "agreement": agreement}
            )
            shown = "  ".join(
                f"{name} {ms:.1f} ms ({ms / found['eager']:.2f})" for name, ms in found.items()
            )
            print(f"{side} px, batch {batch}: {shown}", flush=True)
    if options.json:
        about = {**machine(), "onnxruntime": onnxruntime.__version__, "threads": options.threads}
        sizes_of_files = {name: len(content) for name, content in files.items()}
        record = {"machine": about, "model": options.model, "bytes": sizes_of_files, "rows": rows}
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
