"""DGT-T beside timm's swin_tiny on a GPU: images per second, inference and training, at 224 and 512 px, in one run.

    python benchmarks/gpu_models.py --out benchmarks/results/gpu_models.json

bfloat16 autocast, channels-last, `torch.compile`. Candidates take turns, and medians are compared.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

import dgt  # noqa: F401  (registers its models)
from dgt.bench import machine

MODELS: dict[str, tuple[str, ...]] = {"dgt_tiny": (), "swin_tiny_patch4_window7_224": ("img_size",)}
BATCHES = {224: (256, 128), 512: (64, 32)}  # inference, training
ROUNDS, STEPS = 5, 10


def main() -> None:
    """Measure every size and mode, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512])
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for training in (False, True):
            rows.append(compare(size, training))
            document = {"device": torch.cuda.get_device_name(), "machine": machine(), "argv": sys.argv, "rows": rows}
            temporary = options.out.with_suffix(".tmp")
            temporary.write_text(json.dumps(document, indent=1))
            temporary.replace(options.out)
            print(json.dumps(rows[-1]), flush=True)


def compare(size: int, training: bool) -> dict[str, Any]:
    """Images per second of every model at one size, and the ratio of the first to the second."""
    batch = BATCHES[size][training]
    steps = {name: build(name, size, batch, training) for name in MODELS}
    times: dict[str, list[float]] = {name: [] for name in MODELS}
    for step in steps.values():
        for _ in range(5):
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(timed(step))
    rates = {name: batch / statistics.median(values) for name, values in times.items()}
    ours, theirs = rates.values()
    mode = "training" if training else "inference"
    return {"mode": mode, "size": size, "batch": batch, "images_per_second": rates, "ratio": ours / theirs}


def build(name: str, size: int, batch: int, training: bool) -> Callable[[], None]:
    """One step of a compiled model."""
    extra = dict.fromkeys(MODELS[name], size)
    model = timm.create_model(name, num_classes=1000, **extra).cuda().to(memory_format=torch.channels_last)
    model.train(training)
    compiled = torch.compile(model)
    images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

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
