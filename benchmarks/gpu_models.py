"""DGT-T beside timm's swin_tiny on a GPU: images per second, inference and training, at one size a
run.

    python benchmarks/gpu_models.py 224 --out benchmarks/results/gpu_models_224.json [--seconds 400]
        [--dry-run]

bfloat16 autocast, channels-last, as they are and by `torch.compile`. Candidates take turns, and
medians are compared; the seconds of the first steps, which compile, are told. DGT is seeded before
it is compiled: groups are those of queries, and training compiles once. A row is on disk as soon as
it is measured.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from gpu_common import Rows

import dgt  # noqa: F401  (registers its models)

MODELS: dict[str, tuple[str, ...]] = {"dgt_tiny": (), "swin_tiny_patch4_window7_224": ("img_size",)}
BATCHES = {224: (256, 128), 512: (64, 32)}  # inference, training
ROUNDS, STEPS = 5, 10
ROW_SECONDS = 330  # of compiling two models and timing them, at most
# Whether a row trains, and whether it is compiled: first what takes no compiling, and no luck.
ROWS = ((False, False), (False, True), (True, True), (True, False))


def main() -> None:
    """Measure both modes at one size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", type=int, choices=list(BATCHES), help="pixels")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--mode", help="of torch.compile, as reduce-overhead (CUDA graphs), for inference"
    )
    parser.add_argument(
        "--seconds", type=float, default=400, help="begin no row after so many (default: 400)"
    )
    parser.add_argument(
        "--again", action="store_true", help="a process of this call failed: go on behind that"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be measured")
    options = parser.parse_args()
    planned = []
    for training, compiled in ROWS:
        named = {"size": options.size, "training": training, "compiled": compiled}
        mode = None if training else options.mode
        planned.append((named, partial(compare, **named, mode=mode)))
    if options.dry_run:
        for named, _ in planned:
            print(" beside ".join(MODELS), *(f"{key} {value}" for key, value in named.items()))
        return
    torch.backends.cudnn.benchmark = True
    rows = Rows(options.out, f"models {options.size}", options.again)
    sys.exit(rows.measure(planned, options.seconds, ROW_SECONDS))


def compare(size: int, training: bool, compiled: bool, mode: str | None) -> dict[str, Any]:
    """Images per second of every model at one size, and the ratio of the first to the second."""
    batch = BATCHES[size][training]
    torch.compiler.reset()
    steps = {name: build(name, size, batch, training, compiled, mode) for name in MODELS}
    times: dict[str, list[float]] = {name: [] for name in MODELS}
    row: dict[str, Any] = {"batch": batch}
    for name, step in steps.items():
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        row[f"{name}_first_seconds"] = round(time.perf_counter() - start, 1)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(timed(step))
    rates = {name: batch / statistics.median(values) for name, values in times.items()}
    ours, theirs = rates.values()
    row |= {f"{name}_images_per_second": rate for name, rate in rates.items()}
    return row | {"ratio": ours / theirs, "seconds": times}


def build(
    name: str, size: int, batch: int, training: bool, compiled: bool, mode: str | None
) -> Callable[[], None]:
    """One step of a model."""
    extra = dict.fromkeys(MODELS[name], size)
    model = (
        timm.create_model(name, num_classes=1000, **extra)
        .cuda()
        .to(memory_format=torch.channels_last)
    )
    images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model.train()(images[:8])  # seeds the centroids, outside of the graph
    model.train(training)
    run = torch.compile(model, mode=mode) if compiled else model

    def infer() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            run(images)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train if training else infer


def timed(step: Callable[[], None]) -> float:
    """Seconds of one step, over some steps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / STEPS


if __name__ == "__main__":
    main()
