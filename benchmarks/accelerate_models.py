"""What `dgt.accelerate` is worth in large models, and that it never costs: whole models, and shapes
of all kinds.

    python benchmarks/accelerate_models.py --part dinov3 --out accelerate_models.json
    python benchmarks/accelerate_models.py --part vit_l --out accelerate_models.json
    python benchmarks/accelerate_models.py --part shapes --out accelerate_models.json

`dinov3` is timm's DINOv3-S/16 on 2048 x 2048 pixels, `vit_l` ViT-L/16 on 1024 x 2048, both with
random weights, as whole models: all attention by groups and keys that trained models were given
(docs/results.md), beside the model's own in the same run, and the bound, attention that takes no
time. `shapes`: a seeded sample of single attentions, each handed to `dgt.accelerate` with one
setting, as a user would; what it decides is then timed again beside PyTorch's.

Rows are in the file as they are done and not measured again; no row is begun after `--seconds`: run
it once more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
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
def whole_model(
    part: str, options: argparse.Namespace, todo: Callable[[dict[str, Any]], bool], save: Any
) -> None:
    """A row for each setting: the model's milliseconds for an image, its own attention and groups
    in turns.
    """
    name, size = MODELS[part]
    size = tuple(side // options.shrink for side in size)
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=size, depth=options.depth or None, num_classes=0
    ).eval()
    image = torch.randn(1, 3, *size)
    with torch.device("meta"):  # whose forward is free
        twin = timm.create_model(name, img_size=size, depth=options.depth or None, num_classes=0)
        layers = inspect_model(twin, torch.empty(1, 3, *size), least_tokens=1)
    assert all(layer.choice == "groups" for layer in layers), layers

    for groups, keys in SETTINGS:
        key = {"part": part, "groups": groups, "keys": keys, "size": list(size)}
        if not todo(key):
            continue
        rows = [replace(layer, groups=groups, keys=keys, residual_keys=1) for layer in layers]
        uninstall_answers(model)
        install_rows(model, rows)
        before, after = fastest(model, image, rows, options.rounds)
        own, grouped = before.ms, after.ms
        bound = own / (own - before.attention_ms)
        tokens = {
            "model": name,
            "tokens": layers[0].tokens,
            "depth": len(layers),
            "rounds": options.rounds,
        }
        save(
            {
                **key,
                **tokens,
                "before_ms": own,
                "after_ms": grouped,
                "speedup": own / grouped,
                "bound": bound,
            }
        )


def fastest(
    model: nn.Module, image: Tensor, rows: list[LayerReport], rounds: int
) -> tuple[Timed, Timed]:
    """The fastest runs of some with the model's own attention and as it is accelerated, in turns."""
    before = []
    after = []
    for _ in range(rounds):
        before.append(time_run(model, partial(model, image), rows, is_exact=True))
        after.append(time_run(model, partial(model, image), rows, is_exact=False))
    return min(before, key=lambda run: run.ms), min(after, key=lambda run: run.ms)


class One(nn.Module):
    """One attention, of what it is given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, 3 H D) to (B, H, L, D)."""
        query, key, value = x.unflatten(-1, (3, HEADS, self.channels)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


def sample(count: int, most: int) -> list[tuple[int, int, float]]:
    """Shapes (L, D) and a budget, a share of the pairs; all but D evenly in their logarithms."""
    draws = random.Random(0)

    def even(low: float, high: float) -> float:
        return math.exp(draws.uniform(math.log(low), math.log(high)))

    tokens = [round(even(64, most)) for _ in range(count)]
    return [(length, draws.choice((32, 64, 96, 128)), even(0.01, 0.5)) for length in tokens]


@torch.no_grad()
def shapes(options: argparse.Namespace, todo: Callable[[dict[str, Any]], bool], save: Any) -> None:
    """A row for each shape: what `dgt.accelerate` decides; of groups the time beside PyTorch's,
    medians of turns.

    Where it decides against groups, the call is PyTorch's own: the ratio is 1 without being
    measured.
    """
    for tokens, channels, share in sample(options.shapes, 16384 // options.shrink):
        key = {
            "part": "shapes",
            "tokens": tokens,
            "channels": channels,
            "share": share,
        }
        if not todo(key):
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
        save({**key, **found})


def once(model: nn.Module, x: Tensor, exact: bool) -> float:
    """Milliseconds of enough calls to be told, by number of calls."""
    calls = max(1, 10**7 // x.shape[1] ** 2)
    with exact_attention(model) if exact else nullcontext():
        return milliseconds(lambda: [model(x) for _ in range(calls)]) / calls


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=(*MODELS, "shapes"), required=True)
    parser.add_argument("--out", type=Path, default=Path("accelerate_models.json"))
    parser.add_argument(
        "--seconds", type=float, default=120, help="no row is begun later (default: %(default)s)"
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
    torch.set_num_threads(options.threads)
    start, content = (
        timer(),
        json.loads(options.out.read_text()) if options.out.exists() else {"rows": []},
    )
    rows = content["rows"]

    def todo(key: dict[str, Any]) -> bool:
        done = any(all(row.get(name) == value for name, value in key.items()) for row in rows)
        return not done and timer() - start < options.seconds

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        write_json(options.out, {**machine(), "rows": rows})

    if options.part == "shapes":
        shapes(options, todo, save)
        found = [row for row in rows if row["part"] == "shapes"]
        worst = max((row["ratio"] for row in found), default=0.0)
        print(
            f"{len(found)} of {options.shapes} shapes, {sum(row['choice'] == 'groups' for row in found)} in groups"
        )
        print(f"worst: {worst:.3f} times SDPA's time")
    else:
        whole_model(options.part, options, todo, save)


if __name__ == "__main__":
    main()
