"""What `dgt.accelerate` costs in accuracy: a ViT trained on CamVid, accelerated without training,
for several errors.

    python benchmarks/accelerate_camvid.py train --data DIR --weights camvid_vit.pt
    python benchmarks/accelerate_camvid.py measure --data DIR --weights camvid_vit.pt --out accelerate_camvid.json
    python benchmarks/accelerate_camvid.py predict --data DIR --weights camvid_vit.pt --out accelerate_prediction.json
    python benchmarks/accelerate_camvid.py heads --data DIR --weights camvid_vit.pt --out accelerate_heads.json

DIR holds `images/{train,val}` and `labels/{train,val}`. A whole image, 360 x 480, has 2,700 tokens
of 8 x 8 pixels. `measure` and `predict` choose settings with other validation images than those that
they measure on: from the same drive, seconds away. The model was trained on neither.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import dgt
from dgt.acceleration import Report
from dgt.acceleration.statistics import half_interval, relative_error
from dgt.bench.measures import machine
from dgt.ops import dynamic_group_attention, find_centroids, seed_centroids
from dgt.swap import Call, trace_sdpa
from dgt.utils.atomic_write import write_json

CLASSES, CROP = 11, 192
HEIGHT, WIDTH = 360, 480  # of an image
TOKENS = 2700  # of an image
ERRORS = (0.001, 0.003, 0.01, 0.03, 0.1)  # that are measured
PREDICTED_ERRORS = (0.05, 0.01, 0.001)
GROUPS = (24, 64, 160)
KEYS = (8, 32, 96, 256)


class Segmenter(nn.Module):
    """A plain ViT with global attention, and a linear classifier of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "img_size": (HEIGHT, WIDTH),
            "patch_size": 8,
            "embed_dim": 128,
            "depth": 4,
            "num_heads": 4,
        }
        options = {
            "class_token": False,
            "global_pool": "",
            "num_classes": 0,
            "dynamic_img_size": True,
        }
        self.trunk = timm.models.VisionTransformer(**sizes, **options)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to logits (B, 11, H, W)."""
        height, width = images.shape[-2] // 8, images.shape[-1] // 8
        logits = self.head(self.trunk(images)).transpose(1, 2).unflatten(2, (height, width))
        return F.interpolate(logits, size=images.shape[-2:], mode="bilinear")


def load(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images of a split, (N, 3, H, W), roughly normalized, and labels, (N, H, W), 255 for none."""
    files = sorted((root / "images" / split).iterdir())
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    labels = np.stack(
        [np.asarray(Image.open(root / "labels" / split / f"{file.stem}.png")) for file in files]
    )
    ids = torch.from_numpy(labels).long()
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.25
    return images, ids.masked_fill(ids >= CLASSES, 255)


class Phase(NamedTuple):
    """A part of the training; batches of several images are crops, single images are whole."""

    steps: int
    batch: int
    rate: float


def train(options: argparse.Namespace) -> None:
    """Train on crops first, six at a time, then on whole images, and write the weights."""
    torch.manual_seed(options.seed)
    images, labels = load(options.data, "train")
    model = Segmenter().train()
    start = time.process_time()
    for phase in (Phase(options.steps, 6, 1.5e-3), Phase(options.steps // 4, 1, 3e-4)):
        train_phase(model, images, labels, phase, start)
    torch.save(model.state_dict(), options.weights)


def train_phase(
    model: Segmenter, images: Tensor, labels: Tensor, phase: Phase, start: float
) -> None:
    """Train through one phase, with an optimizer and a schedule of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), phase.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, phase.rate, total_steps=phase.steps, pct_start=0.1
    )
    for step in range(1, phase.steps + 1):
        pixels, ids = draw_batch(images, labels, phase.batch)
        loss = F.cross_entropy(model(pixels), ids, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            seconds = time.process_time() - start
            print(f"step {step} loss {loss.item():.3f} {seconds:.0f} s", flush=True)


def draw_batch(images: Tensor, labels: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Random images and their labels, cropped if there are several, and flipped at random."""
    chosen = torch.randint(len(images), (batch,))
    pixels, ids = images[chosen], labels[chosen]
    if batch > 1:
        top = int(torch.randint(HEIGHT - CROP, ()))
        left = int(torch.randint(WIDTH - CROP, ()))
        place = (..., slice(top, top + CROP), slice(left, left + CROP))
        pixels, ids = pixels[place], ids[place]
    if torch.rand(()) < 0.5:
        pixels, ids = pixels.flip(-1), ids.flip(-1)
    return pixels, ids


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """The logits of images, (N, 11, H, W), computed one image at a time."""
    return torch.cat([model(image) for image in images.split(1)])


def without_layers(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its layers, short enough to be printed."""
    return {name: value for name, value in row.items() if name != "layers"}


@torch.no_grad()
def measure(options: argparse.Namespace) -> None:
    """Write a row for each target error: the error on validation images, agreement, mIoU, speed."""
    images, labels = load(options.data, "val")
    others = other_images(images, options.every)
    calibration = others[torch.linspace(0, len(others) - 1, options.images).long()]
    images, labels = images[:: options.every], labels[:: options.every]
    whole = outputs(open_model(options.weights), images)
    rows: list[dict[str, Any]] = [{"error": 0.0, "miou": mean_iou(whole, labels)}]
    for error in ERRORS:
        model = open_model(options.weights)
        report = dgt.accelerate(model, calibration, error)
        logits = outputs(model, images)
        content = report.to_json()
        row = {
            **without_layers(content),
            "error": error,
            **unseen(logits, whole),
            "agreement": float((logits.argmax(1) == whole.argmax(1)).float().mean()),
            "miou": mean_iou(logits, labels),
            "layers": content["layers"],
        }
        rows.append(row)
        print(without_layers(row), report, sep="\n", flush=True)
    counts = {"calibration_images": options.images, "images": len(images)}
    write_json(Path(options.out), {**machine(), **counts, "rows": rows})


@torch.no_grad()
def predict(options: argparse.Namespace) -> None:
    """Write the errors that reports predict beside those on validation images, for several draws of
    the images that choose.

    Rows are written as soon as they are measured, and are not measured again.
    """
    images = load(options.data, "val")[0]
    others, images = other_images(images, options.every), images[:: options.every]
    whole = outputs(open_model(options.weights), images)
    out = Path(options.out)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    done = {(row["draw"], row["asked_error"]) for row in rows}
    counts = {"images": options.images, "unseen_images": len(images)}
    for draw, error in itertools.product(range(options.draws), PREDICTED_ERRORS):
        if (draw, error) in done:
            continue
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(draw))
        model = open_model(options.weights)
        report = dgt.accelerate(model, others[order[: options.images]], error)
        rows.append({**errors_of(report), "draw": draw, **errors_found(model, images, whole)})
        rows[-1]["layers"] = [[layer.groups, layer.keys] for layer in report.layers]
        print(rows[-1], flush=True)
        write_json(out, {**machine(), **counts, "rows": rows})


def errors_of(report: Report) -> dict[str, Any]:
    """The errors in a report, and halves of their intervals."""
    values = report.to_json().items()
    return {name: value for name, value in values if name.endswith(("error", "half"))}


def errors_found(model: Segmenter, images: Tensor, whole: Tensor) -> dict[str, Any]:
    """The error of an accelerated model on images, all together and each by itself."""
    logits = outputs(model, images)
    each = (logits - whole).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)
    return {**unseen(logits, whole), "each": each.tolist()}


@torch.no_grad()
def heads(options: argparse.Namespace) -> None:
    """Write the error of every head at the same settings, and what a setting for each head could gain
    over one for each layer.

    Centroids are found with the first half of the images, errors with the second. A head's time is
    its share of the layer's.
    """
    images = load(options.data, "train")[0]
    images = images[torch.linspace(0, len(images) - 1, 2 * options.images).long()]
    model, calls = open_model(options.weights), dict[str, Call]()
    with trace_sdpa(model, lambda name, call: calls.setdefault(name, call) and None):
        model(torch.cat([images[0::2], images[1::2]]))
    rows = []
    for name, call in calls.items():
        for row in errors_of_heads(call, options.images):
            rows.append({"layer": name, **row})
            print(name, row["groups"], row["keys"], row["errors"], flush=True)
    gains = {str(error): gain_of_free_heads(rows, error) for error in (0.05, 0.1, 0.2)}
    print(gains)
    write_json(
        Path(options.out), {**machine(), "images": len(images), "gains": gains, "rows": rows}
    )


def errors_of_heads(call: Call, images: int) -> Iterator[dict[str, Any]]:
    """A row for each setting: the errors of the heads of a call, and the cost.

    Args:
        call: an attention over twice as many images.
        images: how many of them, the first, centroids are found with.
    """
    query, key, value = (part[images:] for part in (call.query, call.key, call.value))
    whole = F.scaled_dot_product_attention(query, key, value, scale=call.scale)
    tokens = call.query[:images].transpose(0, 1).flatten(1, 2)
    for groups, keys in itertools.product(GROUPS, KEYS):
        places = torch.arange(32 * groups) * tokens.shape[1] // (32 * groups)
        centroids = find_centroids(query, seed_centroids(tokens[:, places], groups), 1)
        found = dynamic_group_attention(
            query, key, value, centroids, keys, call.scale, residual_keys=1
        ).output
        squares = (found - whole).square().sum((0, 2, 3))
        errors = (squares / whole.square().sum((0, 2, 3))).sqrt()
        yield {
            "groups": groups,
            "keys": keys,
            "squares": (squares / whole.square().sum()).tolist(),
            "errors": errors.tolist(),
            "cost": 1.5 * groups + keys,
        }


class Settings(NamedTuple):
    """What a layer can choose from, dense attention first.

    Attributes:
        cost: of each setting, (N,), in products for every query: k + 1.5 G.
        squares: squared errors of the heads by setting, (N, heads).
    """

    cost: Tensor
    squares: Tensor

    @classmethod
    def of_rows(cls, rows: list[dict[str, Any]]) -> Settings:
        """The settings that the rows of a layer describe."""
        exact = [0.0] * len(rows[0]["squares"])
        cost = torch.tensor([float(TOKENS), *(row["cost"] for row in rows)])
        return cls(cost, torch.tensor([exact, *(row["squares"] for row in rows)]))

    def together(self) -> Settings:
        """The same settings for a layer whose heads share one."""
        return Settings(self.cost, self.squares.sum(1, keepdim=True))

    def choose(self, price: Tensor) -> tuple[float, float]:
        """The cost and squared error of the best choice at a price of squared errors."""
        share = self.cost[:, None] / self.squares.shape[1]
        place = (share + price * self.squares).argmin(0)
        return float(share[place, 0].sum()), float(self.squares.gather(0, place[None]).sum())


def cheapest(layers: list[Settings], error: float) -> float:
    """The mean cost over layers of the cheapest choice within an error."""
    best = float(TOKENS)
    for power in torch.linspace(2, 10, 400):
        choices = [layer.choose(10**power) for layer in layers]
        costs, squares = zip(*choices, strict=True)
        if sum(squares) / len(layers) <= error**2:
            best = min(best, sum(costs) / len(layers))
    return best


def gain_of_free_heads(rows: list[dict[str, Any]], error: float) -> float:
    """How many times the cost of one setting for each head one for each layer has, at the same mean
    squared error.
    """
    by_layer: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_layer[row["layer"]].append(row)
    layers = [Settings.of_rows(own) for own in by_layer.values()]
    return cheapest([layer.together() for layer in layers], error) / cheapest(layers, error)


def other_images(images: Tensor, every: int) -> Tensor:
    """All images but every n-th, starting with the first."""
    return images[[place for place in range(len(images)) if place % every]]


def unseen(after: Tensor, before: Tensor) -> dict[str, float | None]:
    """The relative error of logits, and half of its 95 % interval over images."""
    squares = torch.stack(
        [(after - before).flatten(1).square().sum(1), before.flatten(1).square().sum(1)], dim=1
    )
    return {"unseen_error": relative_error(squares), "unseen_half": half_interval(squares)}


def open_model(weights: Path) -> Segmenter:
    """The trained model, in evaluation mode."""
    model = Segmenter().eval()
    model.load_state_dict(torch.load(weights))
    return model


def mean_iou(logits: Tensor, labels: Tensor) -> float:
    """The mean intersection over union of the classes, from 0 to 1."""
    known = labels < CLASSES
    pairs = labels[known] * CLASSES + logits.argmax(1)[known]
    table = pairs.bincount(minlength=CLASSES**2).view(CLASSES, CLASSES).double()
    hits = table.diag()
    return float((hits / (table.sum(0) + table.sum(1) - hits).clamp(min=1)).mean())


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "measure", "predict", "heads"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument(
        "--steps", type=int, default=600, help="train: steps on crops; a quarter as many on images"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--every", type=int, default=4, help="measure on every n-th validation image"
    )
    parser.add_argument(
        "--images", type=int, default=32, help="images to choose settings by; heads: half as many"
    )
    parser.add_argument("--draws", type=int, default=3, help="predict: draws of images")
    parser.add_argument("--out", default="accelerate_camvid.json")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"argument --steps: must be at least 4, got {options.steps}")
    return options


def main() -> None:
    """Do what the command line asks for."""
    options = parse_arguments()
    {"train": train, "measure": measure, "predict": predict, "heads": heads}[options.what](options)


if __name__ == "__main__":
    main()
