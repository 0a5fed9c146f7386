"""What the selection kernels have to deal with on random scores and on photographs: the numbers
that decide how often their loops run.

    python benchmarks/gpu_model/inputs.py --images FOLDER --out benchmarks/results/gpu_inputs.json [--count 10]

For every shape of the model, in the first DG-Attention layers with that many tokens: how many keys
of a row reach its bound, how many rows have more of them than fit, the steps of both searches, the
turns of unpacking bits, and how unequal groups are. Queries and keys are random, or those of
photographs in DGT-T with random weights and seeded centroids (``dgt_tiny``) and in the trained
model that ships (``dgt_nano.scenes``). The exit status is 1 if the keys of a row do not fit. The
kernels themselves are not run: blocks, room and bounds are computed as they compute them.
"""

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import dgt
from dgt.ops.triton.blocks import block_of_key, plan
from dgt.ops.triton.grouping import tile_size
from dgt.ops.triton.launch import power_of_two
from dgt.ops.triton.selection import room_for

GROUPS, GUESSES = 48, 8
MODELS = ("dgt_tiny", "dgt_nano.scenes")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Shape(NamedTuple):
    """The size of an image, the stage whose tokens count, and k. A token of stage 0 is 4 x 4 pixels."""

    rows: int
    columns: int
    stage: int
    top_k: int

    @property
    def tokens(self) -> int:
        """Tokens of the stage, whose maps halve from stage to stage."""
        return (self.rows // 4 >> self.stage) * (self.columns // 4 >> self.stage)


SHAPES = {
    "L196 k98": Shape(224, 224, 2, 98),
    "L784 k98": Shape(224, 224, 1, 98),
    "L3136 k98": Shape(224, 224, 0, 98),
    "L4032 k98": Shape(256, 252, 0, 98),
    "L4032 k500": Shape(256, 252, 0, 500),
    "L16384 k98": Shape(512, 512, 0, 98),
    "L16384 k500": Shape(512, 512, 0, 500),
    "L16384 k512": Shape(512, 512, 0, 512),
    "L16384 k513": Shape(512, 512, 0, 513),
    "L64000 k98": Shape(1000, 1024, 0, 98),
    "L64000 k500": Shape(1000, 1024, 0, 500),
}


class Found(NamedTuple):
    """Queries, keys (B, H, L, D) and centroids (H, G, D) of one layer."""

    query: Tensor
    key: Tensor
    centroids: Tensor


class EnoughError(Exception):
    """Raised to end a forward pass whose later layers nobody needs."""


def search_steps(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Steps of a search for the ``count`` largest scores of each row.

    Args:
        scores: (R, N), -inf for what does not count.
        count: how many are searched for.

    Returns:
        The number of steps by proportion and that of steps by halves, (R,) each.
    """
    real = scores > -torch.inf
    most = real.sum(1)
    low = scores.masked_fill(~real, torch.inf).amin(1)
    high = torch.nextafter(scores.amax(1), torch.tensor(torch.inf))
    least = torch.zeros_like(most)
    steps = torch.zeros(2, len(scores))
    for turn in range(60):
        if turn < GUESSES:
            share = (most - count).float() / (most - least).float()
            middle = low + (high - low) * share
            middle = torch.where((middle > low) & (middle < high), middle, low)
            active = most > count
        else:
            middle = mean_by_rank(low, high)
            active = (most > count) & (middle > low)
        if not active.any():
            if turn >= GUESSES:
                break
            continue
        steps[int(turn >= GUESSES)] += active
        reach = (scores >= middle[:, None]).sum(1)
        enough = reach >= count
        low, high = low.where(~(active & enough), middle), high.where(~(active & ~enough), middle)
        most, least = most.where(~(active & enough), reach), least.where(~(active & ~enough), reach)
    return steps[0], steps[1]


def mean_by_rank(low: Tensor, high: Tensor) -> Tensor:
    """The number in the middle of all float32 numbers from ``low`` to ``high``."""
    one, two = (rank(number.view(torch.int32)).long() for number in (low, high))
    return rank(((one + two) >> 1).to(torch.int32)).view(torch.float32)


def rank(bits: Tensor) -> Tensor:
    """Map bits of float32 to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def turns(flags: Tensor, words: int) -> Tensor:
    """The mean number of turns in which the flags of each row are unpacked, (R,).

    Of ``words`` words at a time, each of 32 flags, the one with the most set bits decides.
    """
    count = F.pad(flags, (0, -flags.shape[1] % 32)).unflatten(1, (-1, 32)).sum(2)
    count = F.pad(count, (0, -count.shape[1] % words)).unflatten(1, (-1, words))
    return count.amax(2).float().mean(1)


def statistics(found: Found, top_k: int) -> dict[str, Any]:
    """All statistics of one layer, each a list over rows, (B, H, G), or over heads of images."""
    tokens, groups = found.key.shape[2], found.centroids.shape[1]
    scores = torch.einsum("hgd,bhld->bhgl", found.centroids, found.key.float()).flatten(0, 2)
    members = torch.einsum("hgd,bhld->bhgl", found.centroids, found.query.float()).argmax(2)
    members = F.one_hot(members, groups).permute(0, 1, 3, 2).flatten(0, 2)
    sizes = members.sum(1).view(-1, groups)
    size = tile_size(tokens, groups)
    pitch = -(-tokens // 32)
    result: dict[str, Any] = {
        "largest_group_share": (sizes.amax(1) / tokens).tolist(),
        "tiles": (-(-sizes // size)).sum(1).tolist(),
        "group_sizes": sizes.tolist(),
        "member_turns": turns(members, min(power_of_two(pitch), 512)).tolist(),
    }
    like = torch.empty(1, 1, tokens, 32, dtype=torch.bfloat16, device="meta")
    blocks = plan(like, groups, top_k).blocks
    if tokens <= blocks:
        guesses, halvings = search_steps(scores, top_k)
        return result | {"guesses": guesses.tolist(), "halvings": halvings.tolist()}
    place = block_of_key(torch.arange(tokens), blocks).expand_as(scores)
    best = scores.new_full((len(scores), blocks), -torch.inf).scatter_reduce(
        1, place, scores, "amax"
    )
    guesses, halvings = search_steps(best, top_k)
    reaching = scores >= best.topk(top_k, dim=1).values[:, -1:]
    result |= {"bound_guesses": guesses.tolist(), "bound_halvings": halvings.tolist()}
    guesses, halvings = search_steps(scores.masked_fill(~reaching, -torch.inf), top_k)
    result |= {"guesses": guesses.tolist(), "halvings": halvings.tolist()}
    result["candidates"] = reaching.sum(1).tolist()
    result["candidate_turns"] = turns(reaching, min(power_of_two(pitch), 256)).tolist()
    return result


def random_layers(shape: Shape) -> Iterator[Found]:
    """Random queries, keys and centroids, as the benchmarks draw them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        query, key = (torch.randn(1, 2, shape.tokens, 32, generator=generator) for _ in range(2))
        centroids = F.normalize(torch.randn(2, GROUPS, 32, generator=generator), dim=-1)
        yield Found(query, key, centroids)


def photographed_layers(shape: Shape, paths: list[Path], name: str) -> Iterator[Found]:
    """The layers of a model that have the shape's tokens, photograph by photograph."""
    torch.manual_seed(0)
    is_trained = name != "dgt_tiny"
    model = timm.create_model(name, pretrained=is_trained).eval()
    recorder = Recorder(shape.tokens, seeds=not is_trained)
    for layer in model.modules():
        if isinstance(layer, dgt.DGAttention):
            layer.register_forward_pre_hook(recorder)
    for path in paths:
        recorder.found.clear()
        with torch.inference_mode(), contextlib.suppress(EnoughError):
            model(photograph(path, shape.rows, shape.columns))
        yield from recorder.found[:2]


class Recorder:
    """A hook that keeps what layers of so many tokens get, and ends the pass behind them.

    Args:
        tokens: of the layers.
        seeds: whether it also seeds the centroids of the layers that it meets.
    """

    def __init__(self, tokens: int, seeds: bool) -> None:
        self.tokens = tokens
        self.seeds = seeds
        self.found: list[Found] = []

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        query, key, _ = layer.split_heads(inputs[0])
        if self.found and query.shape[2] < self.tokens:
            raise EnoughError
        if self.seeds:
            layer.seed(query, None, True)
        if query.shape[2] == self.tokens:
            self.found.append(Found(query, key, layer.unit_centroids()))


def photograph(path: Path, rows: int, columns: int) -> Tensor:
    """An image of so many rows and columns, (1, 3, rows, columns), normalized as in training."""
    image = Image.open(path).convert("RGB").resize((columns, rows), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(image).copy()).float().permute(2, 0, 1) / 255
    mean = torch.tensor(MEAN)[:, None, None]
    deviation = torch.tensor(DEVIATION)[:, None, None]
    return ((pixels - mean) / deviation)[None]


def summarize(shape: Shape, layers: Iterator[Found]) -> dict[str, Any]:
    """One row of the results: means, quantiles, and how many rows have more candidates than fit.

    Returns:
        The values by name; none if there are no layers.
    """
    collected: defaultdict[str, list[Any]] = defaultdict(list)
    for layer in layers:
        for name, values in statistics(layer, shape.top_k).items():
            collected[name] += values
    if not collected:
        return {}
    sizes = torch.tensor(collected.pop("group_sizes")).float()
    row: dict[str, Any] = {"tokens": shape.tokens, "top_k": shape.top_k, "heads": len(sizes)}
    row["groups_by_size"] = sizes.sort(1, descending=True).values.mean(0).round(decimals=1).tolist()
    for name, values in collected.items():
        row[name] = round(float(np.mean(values)), 3)
    if "candidates" in collected:
        row |= quantiles(np.asarray(collected["candidates"]), shape)
    row["largest_group_share_most"] = round(float(np.max(collected["largest_group_share"])), 3)
    return row


def quantiles(counts: np.ndarray, shape: Shape) -> dict[str, int]:
    """How many candidates rows have, and how many rows have more than fit."""
    room = room_for(shape.top_k, shape.tokens)
    return {
        "rows": len(counts),
        "room": room.listed,
        "held": room.held,
        "median": int(np.median(counts)),
        "p99": int(np.quantile(counts, 0.99)),
        "most": int(counts.max()),
        "over_held": int((counts > room.held).sum()),
        "over_room": int((counts > room.listed).sum()),
    }


def parse_arguments() -> argparse.Namespace:
    """The options of the command line, with the photographs' paths and a list of shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=Path, required=True, help="folder of photographs, .jpg or .png"
    )
    parser.add_argument(
        "--count", type=int, default=10, help="photographs, evenly from the folder (default: 10)"
    )
    parser.add_argument(
        "--shapes", help=f"some of {', '.join(SHAPES)}, comma-separated (default: all)"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    paths = sorted([*options.images.rglob("*.jpg"), *options.images.rglob("*.png")])
    if not paths:
        parser.error(f"--images: no .jpg or .png in {options.images}")
    count = min(options.count, len(paths))
    options.paths = [paths[nth * len(paths) // options.count] for nth in range(count)]
    options.shapes = options.shapes.split(",") if options.shapes else list(SHAPES)
    return options


def rows_of(name: str, paths: list[Path]) -> Iterator[dict[str, Any]]:
    """A row for each source of inputs that has layers of a shape."""
    shape = SHAPES[name]
    sources = {"random": random_layers(shape)}
    sources |= {model: photographed_layers(shape, paths, model) for model in MODELS}
    for source, layers in sources.items():
        row = summarize(shape, layers)
        if row:
            yield {"shape": name, "inputs": source, **row}


def main() -> int:
    """Measure every shape on random scores and photographs.

    Returns:
        The exit status: 1 if a row has more candidates than fit.
    """
    options = parse_arguments()
    rows: list[dict[str, Any]] = []
    document = {"torch": torch.__version__, "photographs": len(options.paths), "rows": rows}
    for name in options.shapes:
        for row in rows_of(name, options.paths):
            rows.append(row)
            values = (f"{key}={value}" for key, value in row.items() if key != "groups_by_size")
            print(*values, flush=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    over = sum(row.get("over_room", 0) for row in rows)
    print(f"{over} rows have more candidates than room")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
