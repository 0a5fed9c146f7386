"""DGT-T beside timm's swin_tiny on a GPU: images per second, inference and training, at one size a
run.

    python benchmarks/gpu_models.py --size 224 --out benchmarks/results/gpu_models_224.json

bfloat16 autocast, channels-last, `torch.compile`. Candidates take turns, and medians are compared;
the seconds that compiling took are told. DGT is seeded before it is compiled: groups are those of
queries, and training compiles once.
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
from gpu_common import Rows, attempt

import dgt  # noqa: F401  (registers its models)

MODELS: dict[str, tuple[str, ...]] = {"dgt_tiny": (), "swin_tiny_patch4_window7_224": ("img_size",)}
BATCHES = {224: (256, 128), 512: (64, 32)}  # inference, training
ROUNDS, STEPS = 5, 10


def main() -> None:
    """Measure both modes at one size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, choices=list(BATCHES), required=True)
    parser.add_argument(
        "--mode", help="of torch.compile, as reduce-overhead (CUDA graphs), for inference"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be measured")
    options = parser.parse_args()
    if options.dry_run:
        for mode in ("inference", "training"):
            print(f"{' beside '.join(MODELS)}, {options.size} px, {mode}")
        return
    torch.backends.cudnn.benchmark = True
    rows = Rows(options.out, f"models {options.size}")
    failed = False
    for training in (False, True):
        if rows.has(size=options.size, training=training):
            continue
        row = attempt(
            "compare", partial(compare, options.size, training, None if training else options.mode)
        )
        failed |= "compare_error" in row
        rows.add({"size": options.size, "training": training, **row})
    sys.exit(int(failed))


def compare(size: int, training: bool, mode: str | None) -> dict[str, Any]:
    """Images per second of every model at one size, and the ratio of the first to the second."""
    batch = BATCHES[size][training]
    steps = {name: build(name, size, batch, training, mode) for name in MODELS}
    times: dict[str, list[float]] = {name: [] for name in MODELS}
    row: dict[str, Any] = {
        "mode": "training" if training else "inference",
        "size": size,
        "batch": batch,
    }
    for name, step in steps.items():
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        row[f"{name}_compile_seconds"] = round(time.perf_counter() - start, 1)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(timed(step))
    rates = {name: batch / statistics.median(values) for name, values in times.items()}
    ours, theirs = rates.values()
    row |= {f"{name}_images_per_second": rate for name, rate in rates.items()}
    return row | {"ratio": ours / theirs, "seconds": times}


def build(name: str, size: int, batch: int, training: bool, mode: str | None) -> Callable[[], None]:
    """One step of a compiled model."""
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
    compiled = torch.compile(model, mode=mode)

    def infer() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            compiled(images)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(compiled(images), labels)
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
