"""What `dgt.accelerate` costs in accuracy: a ViT trained on CamVid, accelerated without training,
for several errors.

    python benchmarks/accelerate_camvid.py train --data DIR --weights camvid_vit.pt
    python benchmarks/accelerate_camvid.py measure --data DIR --weights camvid_vit.pt --out accelerate_camvid.json
    python benchmarks/accelerate_camvid.py predict --data DIR --weights camvid_vit.pt --out accelerate_prediction.json
    python benchmarks/accelerate_camvid.py heads --data DIR --weights camvid_vit.pt --out accelerate_heads.json

DIR holds `images/{train,val}` and `labels/{train,val}`. Whole images, 360 x 480, are 2,700 tokens
of 8 x 8 pixels. `measure` and `predict` choose settings by validation images other than those that
they measure on: of the same drive, seconds away; the model was trained on neither.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import dgt
from dgt.acceleration.statistics import half_interval, relative_error
from dgt.bench.measures import machine
from dgt.ops import dynamic_group_attention, find_centroids, seed_centroids
from dgt.swap import Call, trace_sdpa
from dgt.utils.atomic_write import write_json

CLASSES, CROP = 11, 192


class Segmenter(nn.Module):
    """A plain ViT with global attention, and a linear classifier of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "img_size": (360, 480),
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
    """Images (N, 3, H, W), about normal, and labels (N, H, W), 255 where there is none."""
    files = sorted((root / "images" / split).iterdir())
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    labels = np.stack(
        [np.asarray(Image.open(root / "labels" / split / f"{file.stem}.png")) for file in files]
    )
    ids = torch.from_numpy(labels).long()
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.25
    return images, ids.masked_fill(ids >= CLASSES, 255)


def train(options: argparse.Namespace) -> None:
    """Crops first, six at a time, then whole images."""
    torch.manual_seed(options.seed)
    images, labels = load(options.data, "train")
    model, start = Segmenter().train(), time.process_time()
    for steps, batch, rate in ((options.steps, 6, 1.5e-3), (options.steps // 4, 1, 3e-4)):
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=steps, pct_start=0.1
        )
        for step in range(steps):
            chosen = torch.randint(len(images), (batch,))
            pixels, ids = images[chosen], labels[chosen]
            if batch > 1:
                top, left = int(torch.randint(360 - CROP, ())), int(torch.randint(480 - CROP, ()))
                pixels, ids = (t[..., top : top + CROP, left : left + CROP] for t in (pixels, ids))
            if torch.rand(()) < 0.5:
                pixels, ids = pixels.flip(-1), ids.flip(-1)
            loss = F.cross_entropy(model(pixels), ids, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if (step + 1) % 50 == 0:
                print(
                    f"step {step + 1} loss {loss.item():.3f} {time.process_time() - start:.0f} s",
                    flush=True,
                )
    torch.save(model.state_dict(), options.weights)


@torch.no_grad()
def measure(options: argparse.Namespace) -> None:
    """For every error asked for: the error found on the validation images, agreement, mIoU, speed."""
    images, labels = load(options.data, "val")
    others = other_images(images, options.every)
    calibration = others[torch.linspace(0, len(others) - 1, options.images).long()]
    images, labels = images[:: options.every], labels[:: options.every]
    original = open_model(options.weights)
    whole = torch.cat([original(image) for image in images.split(1)])
    rows = [{"error": 0.0, "miou": mean_iou(whole, labels)}]
    for error in (0.001, 0.003, 0.01, 0.03, 0.1):
        model = open_model(options.weights)
        report = dgt.accelerate(model, calibration, error)
        logits = torch.cat([model(image) for image in images.split(1)])
        row = {name: value for name, value in report.to_json().items() if name != "layers"}
        row |= {"error": error, **unseen(logits, whole)}
        row |= {"agreement": float((logits.argmax(1) == whole.argmax(1)).float().mean())}
        rows.append(row | {"miou": mean_iou(logits, labels), "layers": report.to_json()["layers"]})
        print(
            {name: value for name, value in rows[-1].items() if name != "layers"},
            report,
            sep="\n",
            flush=True,
        )
    counts = {"calibration_images": options.images, "images": len(images)}
    write_json(Path(options.out), {**machine(), **counts, "rows": rows})


@torch.no_grad()
def predict(options: argparse.Namespace) -> None:
    """Errors that reports predict beside those of validation images, draw after draw of others of
    these.

    Rows are kept in the file as they are done, and not measured again.
    """
    images = load(options.data, "val")[0]
    others, images = other_images(images, options.every), images[:: options.every]
    original = open_model(options.weights)
    whole = torch.cat([original(image) for image in images.split(1)])
    out = Path(options.out)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    for draw in range(options.draws):
        chosen = torch.randperm(len(others), generator=torch.Generator().manual_seed(draw))[
            : options.images
        ]
        for error in (0.05, 0.01, 0.001):
            if any((row["draw"], row["asked_error"]) == (draw, error) for row in rows):
                continue
            model = open_model(options.weights)
            report = dgt.accelerate(model, others[chosen], error)
            logits = torch.cat([model(image) for image in images.split(1)])
            errors = (
                (logits - whole).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)
            ).tolist()
            row = {
                name: value
                for name, value in report.to_json().items()
                if name.endswith(("error", "half"))
            }
            row |= {"draw": draw, **unseen(logits, whole), "each": errors}
            row["layers"] = [[layer.groups, layer.keys] for layer in report.layers]
            rows.append(row)
            print(row, flush=True)
            counts = {"images": options.images, "unseen_images": len(images)}
            write_json(out, {**machine(), **counts, "rows": rows})


@torch.no_grad()
def heads(options: argparse.Namespace) -> None:
    """The error of every head at the same setting, and what a setting for each head could gain over
    one a layer.

    Centroids come of the first half of the images, errors of the second. A head's time is its share
    of the layer's.
    """
    images = load(options.data, "train")[0]
    images = images[torch.linspace(0, len(images) - 1, 2 * options.images).long()]
    model, calls = open_model(options.weights), dict[str, Call]()
    with trace_sdpa(model, lambda name, call: calls.setdefault(name, call) and None):
        model(torch.cat([images[0::2], images[1::2]]))
    settings, rows = [(groups, keys) for groups in (24, 64, 160) for keys in (8, 32, 96, 256)], []
    for name, call in calls.items():
        few, rest = (
            call._replace(**{part: getattr(call, part)[half] for part in ("query", "key", "value")})
            for half in (slice(options.images), slice(options.images, None))
        )
        whole = F.scaled_dot_product_attention(*rest[:3], scale=rest.scale)
        tokens = few.query.transpose(0, 1).flatten(1, 2)
        for groups, keys in settings:
            places = torch.arange(32 * groups) * tokens.shape[1] // (32 * groups)
            centroids = seed_centroids(tokens[:, places], groups)
            own = find_centroids(rest.query, centroids, 1)
            found = dynamic_group_attention(
                rest.query, rest.key, rest.value, own, keys, rest.scale, remainder=True
            ).output
            squares = (found - whole).square().sum((0, 2, 3)) / whole.square().sum()
            alone = (found - whole).square().sum((0, 2, 3)) / whole.square().sum((0, 2, 3))
            row = {"layer": name, "groups": groups, "keys": keys, "squares": squares.tolist()}
            rows.append(row | {"errors": alone.sqrt().tolist(), "cost": 1.5 * groups + keys})
            print(name, groups, keys, alone.sqrt(), flush=True)
    gains = {str(error): free_heads(rows, error) for error in (0.05, 0.1, 0.2)}
    print(gains)
    write_json(
        Path(options.out), {**machine(), "images": len(images), "gains": gains, "rows": rows}
    )


def free_heads(rows: list[dict], error: float) -> float:
    """Cost of one setting a layer by that of one a head, of the cheapest choices at the same mean
    squared error.

    The cost is that of the products, k + 1.5 G for every query. Dense attention is among the
    choices.
    """
    layers, dense = sorted({row["layer"] for row in rows}), 2700.0
    costs, squares = {}, {}
    for layer in layers:
        own = [row for row in rows if row["layer"] == layer]
        costs[layer] = torch.tensor([dense, *(row["cost"] for row in own)])
        squares[layer] = torch.tensor(
            [[0.0] * len(own[0]["squares"]), *(row["squares"] for row in own)]
        )

    def cheapest(by_head: bool) -> float:
        best = dense
        for power in torch.linspace(2, 10, 400):
            cost, error_found = 0.0, 0.0
            for layer in layers:
                square = squares[layer] if by_head else squares[layer].sum(1, keepdim=True)
                share = costs[layer][:, None] / square.shape[1]
                place = (share + 10**power * square).argmin(0)
                cost += float(share[place, 0].sum()) / len(layers)
                error_found += float(square.gather(0, place[None]).sum()) / len(layers)
            if error_found <= error**2:
                best = min(best, cost)
        return best

    return cheapest(False) / cheapest(True)


def other_images(images: Tensor, every: int) -> Tensor:
    """All images but every n-th."""
    return images[[place for place in range(len(images)) if place % every]]


def unseen(after: Tensor, before: Tensor) -> dict[str, float | None]:
    """The relative error of some images' logits, and half of its 95 % interval over images."""
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
    """Mean intersection over union of the classes, a share."""
    known = labels < CLASSES
    pairs = labels[known] * CLASSES + logits.argmax(1)[known]
    table = pairs.bincount(minlength=CLASSES**2).view(CLASSES, CLASSES).double()
    hits = table.diag()
    return float((hits / (table.sum(0) + table.sum(1) - hits).clamp(min=1)).mean())


def main() -> None:
    """Read the arguments."""
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
    {"train": train, "measure": measure, "predict": predict, "heads": heads}[options.what](options)


if __name__ == "__main__":
    main()
