"""Clustered attention where dense attention is out of reach: one layer of a photograph of 24.5
megapixels, and one of a thousand frames.

    python benchmarks/clustered_large.py --part photograph --out clustered_large.json
    python benchmarks/clustered_large.py --part frames --out clustered_large.json

`photograph` is a layer of Qwen3-VL's tower: 95,319 tokens, 16 heads of 72 channels. `frames` is a
global layer of a model of many views: 1,000 frames of 1,041 tokens, of which 5 are special tokens,
16 heads of 64 channels. Queries, keys and values are smooth random fields over the image (and over
time) with noise, not those of a trained model. The heads of `photograph` are computed in one call,
those of `frames` one after the other, because of the memory of a small machine. Every call has a
row, and what is in the file is not measured again.

Dense attention, by the native kernel, is measured on evenly spaced queries (`--dense-queries`) with
all keys and **extrapolated** to all queries; the same queries give the error. `cpu_s` is the time of
all threads together, which does not include other processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.acceleration.settings import split_budget
from dgt.bench.measures import machine, memory_peak
from dgt.ops import flops
from dgt.swap.special_tokens import front_order
from dgt.utils.atomic_write import write_json

OCTAVES = (64, 32, 16, 8)  # tokens between the points of a field
NOISE = 0.3  # of the standard deviation of a field
SHARPNESS = 1.6  # standard deviation of scores


class Layer(NamedTuple):
    """The sizes of a layer, and the share of its pairs that is computed."""

    frames: int
    height: int
    width: int
    special: int
    """Special tokens at the start of every frame."""
    channels: int
    heads: int
    """Of the layer."""
    at_once: int
    """Heads in one call."""
    share: float

    @property
    def tokens(self) -> int:
        """The length of the whole sequence."""
        return self.frames * (self.special + self.height * self.width)


LAYERS = {
    "photograph": Layer(1, 267, 357, 0, 72, 16, 16, 0.025),
    "frames": Layer(1000, 28, 37, 5, 64, 16, 1, 0.0025),
}


def smooth_field(layer: Layer, generator: torch.Generator) -> Tensor:
    """The tokens of one head, (1, 1, L, D), in the order of the frames: each channel is a sum of
    fields of several scales, plus noise.
    """
    size = (layer.frames, layer.height, layer.width)
    total = torch.zeros(layer.channels, *size)
    for step in OCTAVES:
        coarse = [max(2, -(-length // step)) if length > 1 else 1 for length in size]
        points = torch.randn(1, layer.channels, *coarse, generator=generator)
        total += F.interpolate(points, size, mode="trilinear", align_corners=layer.frames > 1)[0]
    total /= total.std()
    total += NOISE * torch.randn(total.shape, generator=generator)
    tokens = total.flatten(2).permute(1, 2, 0)
    if layer.special:
        special = torch.randn(layer.frames, layer.special, layer.channels, generator=generator)
        tokens = torch.cat([special, tokens], dim=1)
    return tokens.reshape(1, 1, layer.tokens, layer.channels)


def make_head(layer: Layer, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a head, (1, 1, L, D) each, special tokens first."""
    generator = torch.Generator().manual_seed(head)
    query = smooth_field(layer, generator)
    key = 0.5 * query + 0.5 * smooth_field(layer, generator)
    value = smooth_field(layer, generator)
    scores = query[:, :, ::977] @ key[:, :, ::991].mT * layer.channels**-0.5
    query = query * (SHARPNESS / float(scores.std()))
    if not layer.special:
        return query, key, value
    period = layer.tokens // layer.frames
    places = dgt.FrameTokens(layer.special, period)
    order = front_order(places_of(places, layer.tokens), layer.tokens, query.device)
    return query[:, :, order], key[:, :, order], value[:, :, order]


def places_of(frames: dgt.FrameTokens, tokens: int) -> list[int]:
    """The places of the special tokens of all frames."""
    return [place for place in range(tokens) if place % frames.period < frames.count]


class Clock(NamedTuple):
    """How long something took."""

    seconds: float
    cpu_s: float
    """Of all threads."""


def clocked(work: Callable[[], Any]) -> tuple[Clock, Any]:
    """Return how long a function took, and what it returned."""
    start = time.perf_counter()
    start_cpu = time.process_time()
    output = work()
    return Clock(time.perf_counter() - start, time.process_time() - start_cpu), output


@torch.no_grad()
def measure_heads(layer: Layer, first: int, dense_queries: int) -> dict[str, Any]:
    """The row of the heads of one call: time and memory of clustered attention; dense attention's
    time and the error, on sampled queries.
    """
    heads = [make_head(layer, head) for head in range(first, first + layer.at_once)]
    query, key, value = (torch.cat(parts, dim=1) for parts in zip(*heads, strict=True))
    heads.clear()
    prefix = layer.frames * layer.special
    patches = layer.tokens - prefix
    split = split_budget(layer.share, patches, patches, has_residual=True)
    found: dict[str, Any] = {}

    def answer() -> None:
        found["output"] = dgt.clustered_attention(
            query,
            key,
            value,
            num_groups=split.groups,
            top_k=split.keys,
            residual_keys=split.residual_keys,
            num_prefix_tokens=prefix,
        )

    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what was freed before hides what is needed
    clock, extra_mib = clocked(lambda: memory_peak(answer))
    every = (layer.tokens - prefix) // dense_queries
    sample = query[:, :, prefix::every].contiguous()
    dense, exact = clocked(lambda: dgt.dense_attention(sample, key, value))
    times = layer.tokens / sample.shape[2]
    error = (found["output"][:, :, prefix::every] - exact).norm() / exact.norm()
    sizes = (query.shape, key.shape, value.shape)
    counted = flops.clustered_attention(
        *sizes, split.groups, split.keys, split.residual_keys, prefix
    )
    return {
        "first_head": first,
        "heads": layer.at_once,
        "tokens": layer.tokens,
        "channels": layer.channels,
        "special": prefix,
        "groups": split.groups,
        "keys": split.keys,
        "residual_keys": split.residual_keys,
        "seconds": clock.seconds,
        "cpu_s": clock.cpu_s,
        "extra_mib": extra_mib,
        "output_mib": query.nbytes / 2**20,
        "products": counted // 2,
        "dense_products": 2 * layer.tokens**2 * layer.channels * layer.at_once,
        "dense_sampled_queries": sample.shape[2],
        "dense_extrapolated_s": dense.seconds * times,
        "dense_extrapolated_cpu_s": dense.cpu_s * times,
        "error_of_sampled": float(error),
    }


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=tuple(LAYERS), required=True)
    parser.add_argument("--out", type=Path, default=Path("clustered_large.json"))
    parser.add_argument("--heads", type=int, default=16, help="number of heads to measure")
    parser.add_argument("--dense-queries", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shrink", type=int, default=1, help="to try it: divide the sides by this")
    return parser.parse_args()


def main() -> None:
    """Measure the heads that are not in the file yet."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    layer = LAYERS[options.part]
    layer = layer._replace(
        frames=max(1, layer.frames // options.shrink),
        height=layer.height // options.shrink,
        width=layer.width // options.shrink,
    )
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    done = {(row["part"], row["first_head"]) for row in rows}
    for first in range(0, min(options.heads, layer.heads), layer.at_once):
        if (options.part, first) not in done:
            row = {"part": options.part, **measure_heads(layer, first, options.dense_queries)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_json(options.out, {**machine(), "rows": rows})


if __name__ == "__main__":
    main()
