"""What `dgt.accelerate` costs in accuracy: a ViT trained on CamVid, accelerated without training, for several errors.

    python benchmarks/accelerate_camvid.py train --data DIR --weights camvid_vit.pt
    python benchmarks/accelerate_camvid.py measure --data DIR --weights camvid_vit.pt --out accelerate_camvid.json

DIR holds `images/{train,val}` and `labels/{train,val}`. Whole images, 360 x 480, are 2,700 tokens of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import dgt
from dgt.bench.measures import machine
from dgt.utils.atomic_write import write_json

CLASSES, CROP = 11, 192


class Segmenter(nn.Module):
    """A plain ViT with global attention, and a linear classifier of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"img_size": (360, 480), "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}
        options = {"class_token": False, "global_pool": "", "num_classes": 0, "dynamic_img_size": True}
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
    labels = np.stack([np.asarray(Image.open(root / "labels" / split / f"{file.stem}.png")) for file in files])
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
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
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
                print(f"step {step + 1} loss {loss.item():.3f} {time.process_time() - start:.0f} s", flush=True)
    torch.save(model.state_dict(), options.weights)


@torch.no_grad()
def measure(options: argparse.Namespace) -> None:
    """For every error asked for: the error found on the validation images, agreement, mIoU, speed."""
    images, labels = load(options.data, "val")
    images, labels = images[:: options.every], labels[:: options.every]
    calibration = load(options.data, "train")[0]
    calibration = calibration[torch.linspace(0, len(calibration) - 1, 2 * options.images).long()]
    original = open_model(options.weights)
    whole = torch.cat([original(image) for image in images.split(1)])
    rows = [{"error": 0.0, "miou": mean_iou(whole, labels)}]
    for error in (0.001, 0.003, 0.01, 0.03, 0.1):
        model = open_model(options.weights)
        report = dgt.accelerate(model, calibration, error)
        logits = torch.cat([model(image) for image in images.split(1)])
        row = {name: value for name, value in report.to_json().items() if name != "layers"}
        row |= {"error": error, "unseen_error": float((logits - whole).norm() / whole.norm())}
        row |= {"agreement": float((logits.argmax(1) == whole.argmax(1)).float().mean())}
        rows.append(row | {"miou": mean_iou(logits, labels), "layers": report.to_json()["layers"]})
        print({name: value for name, value in rows[-1].items() if name != "layers"}, report, sep="\n", flush=True)
    command = f"python benchmarks/accelerate_camvid.py measure --every {options.every} --images {options.images}"
    write_json(Path(options.out), {**machine(), "command": command, "images": len(images), "rows": rows})


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600, help="train: steps on crops; a quarter as many on images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=4, help="measure: every n-th validation image")
    parser.add_argument("--images", type=int, default=6, help="measure: images to choose by, and as many to check")
    parser.add_argument("--out", default="accelerate_camvid.json")
    options = parser.parse_args()
    train(options) if options.what == "train" else measure(options)


if __name__ == "__main__":
    main()
