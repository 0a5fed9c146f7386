"""Peak memory and time of one training step of Mask R-CNN on one image, in this process, which does
nothing else.

    python benchmarks/detection_step.py [--model dgt_tiny] [--size 800 1280] [--checkpointing]

On a CPU. The memory is the peak resident memory, which includes that of Python and its libraries,
printed as `before_gib`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch

import dgt
from dgt.models.heads.mask_rcnn import build_mask_rcnn


def peak_gib() -> float:
    """The largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def objects(count: int, height: int, width: int) -> dict[str, torch.Tensor]:
    """Targets of random boxes with random labels, each filled by its mask."""
    corners = torch.rand(count, 2, 2) * torch.tensor([width - 8.0, height - 8.0])
    boxes = torch.cat([corners.amin(1), corners.amax(1) + 8], dim=1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.round().int().tolist(), strict=True):
        mask[y0:y1, x0:x1] = 1
    return {"boxes": boxes, "labels": torch.randint(1, 81, (count,)), "masks": masks}


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dgt_tiny")
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1280))
    parser.add_argument("--objects", type=int, default=8)
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute activations of blocks backward"
    )
    return parser.parse_args()


def main() -> None:
    """Run one step of AdamW, and print its time and memory."""
    options = parse_arguments()
    torch.manual_seed(0)
    before = peak_gib()
    network = build_mask_rcnn(options.model, 81, drop_path_rate=0.2).train()
    network.backbone.model.set_grad_checkpointing(options.checkpointing)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
    start = time.perf_counter()
    losses = network([torch.rand(3, *options.size)], [objects(options.objects, *options.size)])
    torch.stack(list(losses.values())).sum().backward()
    optimizer.step()
    row = {
        "model": options.model,
        "size": list(options.size),
        "objects": options.objects,
        "version": dgt.__version__,
        "checkpointing": options.checkpointing,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "before_gib": round(before, 2),
        "peak_gib": round(peak_gib(), 2),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
