"""What `dgt.accelerate` costs a classifier: top-1 of a trained run with its own attention, and accelerated.

    tools/make_weights.sh DATA OUT vit
    python benchmarks/accelerate_imagenette.py --run OUT/runs/vit256 --data.root DATA/imagenette128 \
        --errors 0.05 0.1 0.2 --out benchmarks/results/accelerate_imagenette.json

Settings are chosen by training images, without training; top-1 is on validation images, the same for all rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgt
from dgt.bench.measures import machine
from dgt.training import load_run
from dgt.training.recipe import build_data, parse_recipe
from dgt.utils.atomic_write import write_json


@torch.inference_mode()
def classes(network: torch.nn.Module, loader: Any) -> tuple[Tensor, Tensor]:
    """The most probable class of every image, and its label."""
    loader.device = torch.device("cpu")
    found = [(network(images).argmax(1), labels) for images, labels in loader]
    answers, labels = zip(*found, strict=True)
    return torch.cat(answers), torch.cat(labels)


def share(hits: Tensor) -> float:
    """Hits of all."""
    return float(hits.float().mean())


def main() -> None:
    """Measure, and write the rows as they are done."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data.root", dest="root", required=True)
    parser.add_argument("--images", type=int, default=1000, help="validation images (default: 1000)")
    parser.add_argument("--count", type=int, default=32, help="training images to choose by (default: 32)")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.05])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = load_run(options.run)
    sizes = [f"--data.val_size={options.images}", f"--data.train_size={options.count}", "--data.batch_size=8"]
    data = build_data(parse_recipe(run.recipe.to_dict(), [f"--data.root={options.root}", *sizes]))
    data.setup()
    loader = data.train_dataloader()
    loader.device = torch.device("cpu")
    seen = torch.cat([images for images, _ in loader])
    own, labels = classes(run.network, data.val_dataloader())
    rows: list[dict[str, Any]] = []
    content = {**machine(), "images": options.images, "top1": share(own == labels), "rows": rows}
    for error in options.errors:
        report = dgt.accelerate(run.network, seen, error=error)
        answers, _ = classes(run.network, data.val_dataloader())
        rows.append(report.to_json() | {"top1": share(answers == labels), "agreement": share(answers == own)})
        write_json(options.out, content)
        print(report, f"top-1 {100 * content['top1']:.2f} % -> {100 * rows[-1]['top1']:.2f} %", sep="\n", flush=True)
        run = load_run(options.run)


if __name__ == "__main__":
    main()
