"""Vision transformers on a GPU with their attention by groups: DINOv3-L accelerated, and a ViT
trained.

    python benchmarks/gpu_transformers.py accelerate|train --out FILE.json [--seconds 400] [--dry-run]

`accelerate`: timm's DINOv3-L/16 at 2048 and 4096 px (16,384 and 65,536 tokens), forward in
bfloat16, its attention as it is (SDPA) and in groups with one residual key and with many, by
numbers that `dgt.accelerate` gave trained models. **The weights are random**: times are those of
trained ones, outputs mean nothing.
`train`: a ViT-S/16 of 1024 px (4,096 tokens, no class token) for one step, forward and backward,
with SDPA and with DG-Attention in every block. A row is on disk as soon as it is measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from gpu_common import Rows, attempt, times
from torch import Tensor, nn

import dgt
from dgt.acceleration import exact_attention, inspect_model
from dgt.acceleration.grouped import install_rows

DINO = "vit_large_patch16_dinov3"
SIZES = (2048, 4096)
# groups, keys and residual keys
ACCELERATED = ((48, 98, 1), (64, 256, 1), (128, 256, 128))
TRAINED = ((48, 98, 0), (64, 256, 0))
ROW_SECONDS = 240  # at most
VIT, VIT_SIZE, VIT_BATCH = "vit_small_patch16_224", 1024, 8


class Plan(argparse.Namespace):
    """What one row measures."""

    part: str
    size: int
    groups: int
    keys: int
    residual_keys: int


def plans(part: str) -> Iterator[Plan]:
    """The rows of a part, smallest first."""
    sizes, settings = (SIZES, ACCELERATED) if part == "accelerate" else ((VIT_SIZE,), TRAINED)
    for size in sizes:
        for groups, keys, residual_keys in settings:
            yield Plan(part=part, size=size, groups=groups, keys=keys, residual_keys=residual_keys)


def with_ratio(row: dict[str, Any]) -> dict[str, Any]:
    """Add how many times as fast groups are."""
    if "sdpa_ms" in row and "groups_ms" in row:
        row["times_as_fast"] = row["sdpa_ms"] / row["groups_ms"]
    return row


@torch.no_grad()
def accelerate(plan: Plan) -> dict[str, Any]:
    """Milliseconds of DINOv3-L for one image, with its own attention and by groups."""
    torch.manual_seed(0)
    model = timm.create_model(DINO, img_size=plan.size, num_classes=0).cuda().bfloat16().eval()
    image = torch.randn(1, 3, plan.size, plan.size, device="cuda", dtype=torch.bfloat16)
    with torch.device("meta"):  # whose forward is free
        twin = timm.create_model(DINO, img_size=plan.size, num_classes=0)
        layers = inspect_model(twin, torch.empty(1, 3, plan.size, plan.size), least_tokens=1)
    setting = {"groups": plan.groups, "keys": plan.keys, "residual_keys": plan.residual_keys}
    rows = [replace(layer, **setting) for layer in layers]
    install_rows(model, rows)
    row: dict[str, Any] = {
        "model": DINO,
        "weights": "random",
        "tokens": layers[0].tokens,
        "layers": len(layers),
    }
    with exact_attention(model):
        row |= attempt("sdpa", partial(times, "sdpa", lambda: model(image), graph=False))
    row |= attempt("groups", partial(times, "groups", lambda: model(image), graph=False))
    return with_ratio(row)


class Grouped(nn.Module):
    """DG-Attention in the place of a block's attention, called with whatever that is called with."""

    def __init__(self, dim: int, heads: int, plan: Plan) -> None:
        super().__init__()
        self.attention = dgt.DGAttention(dim, heads, num_groups=plan.groups, top_k=plan.keys)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """(B, L, C) to the same shape."""
        return self.attention(x)


def train(plan: Plan) -> dict[str, Any]:
    """Milliseconds of one step of a ViT, with SDPA and with DG-Attention, and the peak of memory."""
    row: dict[str, Any] = {"model": VIT, "batch": VIT_BATCH, "tokens": (plan.size // 16) ** 2}
    for name in ("sdpa", "groups"):
        row |= attempt(name, partial(train_one, name, plan))
        torch.cuda.empty_cache()
    return with_ratio(row)


def train_one(name: str, plan: Plan) -> dict[str, Any]:
    """The same for one of the two."""
    torch.manual_seed(0)
    model = timm.create_model(
        VIT, img_size=plan.size, class_token=False, global_pool="avg", num_classes=100
    )
    if name == "groups":
        for block in model.blocks:
            block.attn = Grouped(block.attn.qkv.in_features, block.attn.num_heads, plan)
    step = training_step(model.cuda().train(), plan.size)
    step()
    torch.cuda.reset_peak_memory_stats()
    row = times(name, step, graph=False)
    return row | {f"{name}_peak_bytes": torch.cuda.max_memory_allocated()}


def training_step(model: nn.Module, size: int) -> Callable[[], None]:
    """Forward, backward and the optimizer's step, in bfloat16 autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(VIT_BATCH, 3, size, size, device="cuda")
    labels = torch.randint(100, (VIT_BATCH,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure one part; 1 if anything failed, 3 where time ran out: call again to go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["accelerate", "train"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=400, help="begin no row after so many (default: 400)"
    )
    parser.add_argument(
        "--again", action="store_true", help="a process of this call failed: go on behind that"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be measured")
    options = parser.parse_args()
    if options.dry_run:
        for plan in plans(options.part):
            print(*(f"{key} {value}" for key, value in vars(plan).items()))
        return
    rows = Rows(options.out, options.part, options.again)
    measure = {"accelerate": accelerate, "train": train}[options.part]
    names = ("size", "groups", "keys", "residual_keys")
    steps = (
        ({name: getattr(plan, name) for name in names}, partial(measure, plan))
        for plan in plans(options.part)
    )
    sys.exit(rows.measure(steps, options.seconds, ROW_SECONDS))


if __name__ == "__main__":
    main()
