"""Whether what `dgt.accelerate` chooses is ever slower than PyTorch's attention: sampled shapes, and
models for batches of one, four, and eight.

    python benchmarks/accelerate_never_slower.py --part shapes --json accelerate_never_slower.json
    python benchmarks/accelerate_never_slower.py --part models --json accelerate_never_slower.json \
        --weights dinov2_small.safetensors --images PHOTOGRAPHS

`shapes`: a hundred single attentions, sampled by seed: batch, heads, tokens, channels, queries and
keys as smooth over the tokens as those of images or random ones, and a target error. Each is
passed to `dgt.accelerate`, two inputs of batch one, as a user would; what it chooses is then timed
at the sampled batch against `F.scaled_dot_product_attention`, in turns. Where it chooses nothing,
the call is PyTorch's own, and the ratio is 1 without being measured.

`models`: DINOv2-S with trained weights, those of `accelerate_dinov2.py`, and DeiT-S with random
ones, accelerated one image at a time, then timed against themselves. Where nothing is chosen, the
same code is timed twice, which shows the noise.

Nothing else should run meanwhile. Rows are written as they are done and are not measured again. No
row is started after `--seconds`: run it once more to continue.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from accelerate_dinov2 import find_photographs, open_model, read_photograph
from torch import Tensor, nn

import dgt
from dgt.bench.measures import machine, medians, milliseconds
from dgt.utils.atomic_write import write_json

MOST_PRODUCTS = 6e9  # of a batch, in multiply-adds
LEAST_MS = 4.0  # of a turn: shorter calls are repeated
COARSE = 12  # tokens between the points of a smooth field
NOISE = 0.3
ERRORS = (0.0, 0.05, 0.2, 0.9)
MODEL_ERRORS = (0.0, 0.1)
BATCHES = (1, 4, 8)


class Shape(NamedTuple):
    """One attention."""

    number: int
    batch: int
    heads: int
    tokens: int
    channels: int
    is_smooth: bool
    error: float


def sample(count: int) -> Iterator[Shape]:
    """Shapes with few enough products to be timed often; the number of tokens is log-uniform."""
    draws = random.Random(31)
    number = 0
    while number < count:
        shape = Shape(
            number=number,
            batch=draws.choice((1, 2, 4, 8)),
            heads=draws.choice((2, 3, 4, 6, 8, 12, 16)),
            tokens=round(math.exp(draws.uniform(math.log(128), math.log(6000)))),
            channels=draws.choice((32, 48, 64, 72, 96, 128)),
            is_smooth=draws.random() < 0.5,
            error=draws.choice(ERRORS),
        )
        products = 2 * shape.batch * shape.heads * shape.tokens**2 * shape.channels
        if products <= MOST_PRODUCTS:
            yield shape
            number += 1


class OneAttention(nn.Module):
    """One attention, whose queries, keys and values are its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.channels = shape.channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, 3 H D) to (B, H, L, D)."""
        parts = x.unflatten(-1, (3, self.heads, self.channels)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts)


def tokens_of(shape: Shape, count: int, generator: torch.Generator) -> Tensor:
    """(count, L, 3 H D): queries, keys and values of sequences."""
    width = 3 * shape.heads * shape.channels
    if not shape.is_smooth:
        return torch.randn(count, shape.tokens, width, generator=generator)
    coarse = torch.randn(count, width, max(2, shape.tokens // COARSE), generator=generator)
    fine = F.interpolate(coarse, shape.tokens, mode="linear").mT.contiguous()
    return 1.3 * (fine + NOISE * torch.randn(fine.shape, generator=generator))


@torch.no_grad()
def measure_shape(shape: Shape, rounds: int) -> dict[str, Any]:
    """A row: what is chosen for a shape, and its time at the sampled batch beside PyTorch's."""
    generator = torch.Generator().manual_seed(shape.number)
    model = OneAttention(shape).eval()
    layer = dgt.accelerate(model, tokens_of(shape, 2, generator), shape.error).layers[0]
    row = {
        **shape._asdict(),
        "choice": layer.choice,
        "groups": layer.groups,
        "keys": layer.keys,
        "residual_keys": layer.residual_keys,
        "most_batch": layer.most_batch,
        "ratio": 1.0,
    }
    is_own = layer.choice == "dense" or (layer.most_batch or shape.batch) < shape.batch
    if is_own:
        return row
    x = tokens_of(shape, shape.batch, generator)
    calls = max(1, round(LEAST_MS / milliseconds(partial(model, x))))
    times = medians(
        rounds,
        {is_exact: partial(time_calls, model, x, calls, is_exact) for is_exact in (True, False)},
    )
    return row | {
        "sdpa_ms": times[True],
        "ms": times[False],
        "ratio": times[False] / times[True],
    }


def time_calls(model: nn.Module, x: Tensor, calls: int, is_exact: bool) -> float:
    """Milliseconds of one of several calls, by PyTorch's attention or as it is chosen."""
    with dgt.exact_attention(model) if is_exact else nullcontext():
        return milliseconds(lambda: [model(x) for _ in range(calls)]) / calls


def open_models(options: argparse.Namespace) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Models by name, and images for them."""
    deit_size, dino_size = options.sizes
    torch.manual_seed(0)
    deit = timm.create_model("deit_small_patch16_224", img_size=deit_size, num_classes=0).eval()
    yield f"DeiT-S, {deit_size} px, random weights", deit, torch.randn(8, 3, deit_size, deit_size)
    if options.weights is not None:
        paths = find_photographs(options.images, 8)
        images = torch.cat([read_photograph(path, dino_size) for path in paths])
        yield f"DINOv2-S, {dino_size} px", open_model(options.weights, dino_size), images


@torch.no_grad()
def measure_model(
    name: str, model: nn.Module, images: Tensor, error: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for every size of a batch: the model before and after, in turns."""
    report = dgt.accelerate(model, images[:6], error)
    print(report, flush=True)
    rows = []
    for batch in BATCHES:
        run = partial(model.forward_features, images[:batch].contiguous())  # type: ignore[operator]
        times = medians(
            rounds,
            {is_exact: partial(time_model, model, run, is_exact) for is_exact in (True, False)},
        )
        rows.append(
            {
                "model": name,
                "asked_error": error,
                "batch": batch,
                "choices": [layer.choice for layer in report.layers],
                "most_batch": [layer.most_batch for layer in report.layers],
                "ms_before": times[True],
                "ms_after": times[False],
                "ratio": times[False] / times[True],
            }
        )
    dgt.swap.uninstall_answers(model)
    return rows


def time_model(model: nn.Module, run: Any, is_exact: bool) -> float:
    """Milliseconds of a run, by PyTorch's attention or as it is accelerated."""
    with dgt.exact_attention(model) if is_exact else nullcontext():
        return milliseconds(run)


class Results:
    """The rows of a file, which are written as they come.

    Args:
        path: of the file.
        seconds: after which no row is started.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.end = time.monotonic() + seconds
        self.rows: dict[str, list[dict[str, Any]]] = {"shapes": [], "models": []}
        if path.exists():
            self.rows = json.loads(path.read_text(encoding="utf-8"))["rows"]

    def is_left(self) -> bool:
        """Whether there is time to start another row."""
        return time.monotonic() < self.end

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        """Keep rows."""
        self.rows[part] += rows
        for row in rows:
            print(json.dumps(row), flush=True)
        write_json(self.path, {**machine(), "rows": self.rows})


def measure_shapes(options: argparse.Namespace, results: Results) -> None:
    """Measure the shapes that are not in the file yet."""
    done = {row["number"] for row in results.rows["shapes"]}
    for shape in sample(options.shapes):
        if shape.number not in done and results.is_left():
            results.add("shapes", [measure_shape(shape, options.rounds or 7)])


def measure_models(options: argparse.Namespace, results: Results) -> None:
    """Measure the models and errors that are not in the file yet."""
    done = {(row["model"], row["asked_error"]) for row in results.rows["models"]}
    for name, model, images in open_models(options):
        for error in MODEL_ERRORS:
            if (name, error) not in done and results.is_left():
                results.add(
                    "models", measure_model(name, model, images, error, options.rounds or 3)
                )


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("shapes", "models"), required=True)
    parser.add_argument("--json", type=Path, default=Path("accelerate_never_slower.json"))
    parser.add_argument("--weights", type=Path, help="models: of DINOv2-S, else DeiT-S alone")
    parser.add_argument("--images", type=Path, help="models: folder of photographs")
    parser.add_argument("--sizes", type=int, nargs=2, default=(512, 392), help="of both, in pixels")
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=0, help="default: 7 of shapes, 3 of models")
    parser.add_argument("--seconds", type=float, default=220, help="no row is started later")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Measure what is not in the file yet."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    results = Results(options.json, options.seconds)
    if options.part == "shapes":
        measure_shapes(options, results)
    else:
        measure_models(options, results)
    ratios = [row["ratio"] for row in results.rows[options.part]]
    print(f"{len(ratios)} rows, worst {max(ratios, default=0.0):.3f} times PyTorch's time")


if __name__ == "__main__":
    main()
