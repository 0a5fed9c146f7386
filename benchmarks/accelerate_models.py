"""How much `dgt.accelerate` gains in large models, and whether it ever costs time: whole models, and
shapes of all kinds.

    python benchmarks/accelerate_models.py --part dinov3 --out accelerate_models.json
    python benchmarks/accelerate_models.py --part vit_l --out accelerate_models.json
    python benchmarks/accelerate_models.py --part shapes --out accelerate_models.json

`dinov3` is timm's DINOv3-S/16 on 2048 x 2048 pixels, `vit_l` ViT-L/16 on 1024 x 2048, both with
random weights, as whole models: all attention with groups and keys that trained models were given
(docs/results.md), beside the model's own in the same run, and the bound, attention that takes no
time. `shapes`: a seeded sample of single attentions, each passed to `dgt.accelerate` with one
setting, as a user would; what it decides is then timed again beside PyTorch's.

Rows are written as they are done and are not measured again. No row is started after `--seconds`:
run it once more to continue.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import timer

import dgt
from dgt.acceleration import LayerReport, exact_attention, inspect_model, measure
from dgt.acceleration.confirm import Timed, time_run
from dgt.acceleration.grouped import install_rows
from dgt.bench.measures import machine, medians, milliseconds
from dgt.swap import uninstall_answers
from dgt.utils.atomic_write import write_json

MODELS = {
    "dinov3": ("vit_small_patch16_dinov3", (2048, 2048)),
    "vit_l": ("vit_large_patch16_224", (1024, 2048)),
}
SETTINGS = ((24, 96), (8, 32), (64, 256))  # groups and keys
HEADS = 2  # of the single attentions


@torch.no_grad()
def whole_model(options: argparse.Namespace, results: Results) -> None:
    """Save a row for each setting: the model's milliseconds per image, with its own attention and
    with groups, in turns.
    """
    name, whole_size = MODELS[options.part]
    size = [side // options.shrink for side in whole_size]
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=size, depth=options.depth or None, num_classes=0
    ).eval()
    image = torch.randn(1, 3, *size)
    layers = layers_of(name, size, options.depth)
    for groups, keys in SETTINGS:
        key = {"part": options.part, "groups": groups, "keys": keys, "size": size}
        if not results.todo(key):
            continue
        rows = [replace(layer, groups=groups, keys=keys, residual_keys=1) for layer in layers]
        uninstall_answers(model)
        install_rows(model, rows)
        before, after = fastest(model, image, rows, options.rounds)
        row = {
            **key,
            "model": name,
            "tokens": layers[0].tokens,
            "depth": len(layers),
            "rounds": options.rounds,
            "before_ms": before.ms,
            "after_ms": after.ms,
            "speedup": before.ms / after.ms,
            "bound": before.ms / (before.ms - before.attention_ms),
        }
        results.save(row)


def layers_of(name: str, size: list[int], depth: int) -> list[LayerReport]:
    """The attention layers of a model, all of which can be grouped."""
    with torch.device("meta"):  # where a forward pass costs nothing
        model = timm.create_model(name, img_size=size, depth=depth or None, num_classes=0)
        layers = inspect_model(model, torch.empty(1, 3, *size), least_tokens=1)
    refused = [layer for layer in layers if layer.choice != "groups"]
    if refused:
        raise RuntimeError(f"attention of {name} that cannot be grouped: {refused}")
    return layers


def fastest(
    model: nn.Module, image: Tensor, rows: list[LayerReport], rounds: int
) -> tuple[Timed, Timed]:
    """The fastest of several runs with the model's own attention, and of as many accelerated ones."""
    before = []
    after = []
    for _ in range(rounds):
        before.append(time_run(model, partial(model, image), rows, is_exact=True))
        after.append(time_run(model, partial(model, image), rows, is_exact=False))
    return min(before, key=lambda run: run.ms), min(after, key=lambda run: run.ms)


class One(nn.Module):
    """One attention, whose queries, keys and values are its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, 3 H D) to (B, H, L, D)."""
        query, key, value = x.unflatten(-1, (3, HEADS, self.channels)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


def sample(count: int, most: int) -> list[tuple[int, int, float]]:
    """Shapes (L, D) and a budget, the share of the pairs; L and the budget are log-uniform."""
    draws = random.Random(0)

    def even(low: float, high: float) -> float:
        return math.exp(draws.uniform(math.log(low), math.log(high)))

    tokens = [round(even(64, most)) for _ in range(count)]
    return [(length, draws.choice((32, 64, 96, 128)), even(0.01, 0.5)) for length in tokens]


@torch.no_grad()
def shapes(options: argparse.Namespace, results: Results) -> None:
    """Save a row for each shape: what `dgt.accelerate` decides, and the time of groups beside
    PyTorch's, medians over turns.

    If it decides against groups, the call is PyTorch's own, and the ratio is 1 by definition.
    """
    for tokens, channels, share in sample(options.shapes, 16384 // options.shrink):
        key = {
            "part": "shapes",
            "tokens": tokens,
            "channels": channels,
            "share": share,
        }
        if not results.todo(key):
            continue
        torch.manual_seed(0)
        model, x = One(channels).eval(), torch.randn(2, tokens, 3 * HEADS * channels)
        with patch.object(measure, "SHARES", (share,)):
            (layer,) = dgt.accelerate(model, x, 0.999).layers
        found = {"choice": layer.choice, "reason": layer.reason, "ratio": 1.0}
        if layer.choice != "dense":
            times = medians(
                options.rounds,
                {exact: partial(once, model, x[:1], exact) for exact in (True, False)},
            )
            found |= {
                "sdpa_ms": times[True],
                "groups_ms": times[False],
                "ratio": times[False] / times[True],
            }
        results.save({**key, **found})


def once(model: nn.Module, x: Tensor, exact: bool) -> float:
    """Milliseconds of one call, the mean over enough calls to be measured."""
    calls = max(1, 10**7 // x.shape[1] ** 2)
    with exact_attention(model) if exact else nullcontext():
        return milliseconds(lambda: [model(x) for _ in range(calls)]) / calls


class Results:
    """The rows of a file, which are written as they come.

    Args:
        path: of the file; what it has is kept.
        seconds: after which no row is started.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.end = timer() + seconds
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = json.loads(path.read_text())["rows"]

    def has(self, key: dict[str, Any]) -> bool:
        """Whether there is a row with these values."""
        return any(key.items() <= row.items() for row in self.rows)

    def todo(self, key: dict[str, Any]) -> bool:
        """Whether the row with these values is missing, and there is time to measure it."""
        return not self.has(key) and timer() < self.end

    def save(self, row: dict[str, Any]) -> None:
        """Add a row, print it, and write the file."""
        self.rows.append(row)
        print(row, flush=True)
        write_json(self.path, {**machine(), "rows": self.rows})


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=(*MODELS, "shapes"), required=True)
    parser.add_argument("--out", type=Path, default=Path("accelerate_models.json"))
    parser.add_argument(
        "--seconds", type=float, default=120, help="no row is started later (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="turns of each row (default: 1 of models, 5 of shapes)",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", type=int, default=100, help="how many")
    parser.add_argument(
        "--shrink", type=int, default=1, help="to try it: divide sides and the most tokens by this"
    )
    parser.add_argument("--depth", type=int, default=0, help="to try it: blocks of the model")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.part == "shapes" else 1)
    return options


def main() -> None:
    """Measure the rows of a part that are not in the file yet."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    results = Results(options.out, options.seconds)
    if options.part != "shapes":
        whole_model(options, results)
        return
    shapes(options, results)
    found = [row for row in results.rows if row["part"] == "shapes"]
    grouped = sum(row["choice"] == "groups" for row in found)
    worst = max((row["ratio"] for row in found), default=0.0)
    print(f"{len(found)} of {options.shapes} shapes, {grouped} in groups")
    print(f"worst: {worst:.3f} times SDPA's time")


if __name__ == "__main__":
    main()
