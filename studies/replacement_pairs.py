"""Does another selection beat groups with residual keys in mIoU? Paired differences with intervals.

    OMP_NUM_THREADS=1 python -m studies.replacement_pairs --weights camvid_vit.pt --data.root CAMVID

The images, keys, and centroids are those of `python -m studies.replacement --images 24`. mIoU is
computed over all images together, so its interval is a jackknife: the differences with each image
left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgt.bench.measures import machine
from dgt.tasks.segment import segmentation_scores
from dgt.utils.atomic_write import write_json
from dgt.utils.errors import UserError
from dgt.utils.records import interval
from studies.fixed_weights import Subject
from studies.key_selectors import attend_by
from studies.replacement import open_subject

OURS = "groups, remainder"
RIVALS = ("groups", "best of each query", "blocks", "random, each query")


@torch.no_grad()
def confusions(subject: Subject) -> Tensor:
    """(images, classes, classes): the pixels of each image by true and predicted class."""
    found = []
    for images, targets in subject.data.val_dataloader():
        for image, target in zip(images, targets, strict=True):
            metrics: Any = subject.task.metrics(subject.data)
            metrics.update(subject.network, [image], [target])
            found.append(metrics.confusion.compute())
    return torch.stack(found)


def scores(counts: Tensor) -> Tensor:
    """(images + 1,): mIoU of all images, and with each of them left out."""
    total = counts.sum(0)
    confusion_matrices = [total, *(total - one for one in counts)]
    return torch.stack([segmentation_scores(matrix)["miou"] for matrix in confusion_matrices])


def pair(rival: Tensor, ours: Tensor) -> dict[str, float | None]:
    """How far a rival is ahead, and half of its 95 % interval."""
    ahead, *left_out = (rival - ours).tolist()
    _, half = interval(left_out)
    if half is not None:
        half *= len(left_out) - 1  # a jackknife's interval is (n - 1) times that of its values
    return {"ahead": ahead, "half": half}


def compare(options: argparse.Namespace) -> None:
    """Measure our method and its rivals, and write the differences."""
    subject = open_subject(options.weights, options.images, ["--data.root", options.root])
    found = {}
    for selector in (OURS, *RIVALS):
        with subject.swap(partial(attend_by, selector, options.top_k)):
            found[selector] = scores(confusions(subject))
        print(selector, float(found[selector][0]), flush=True)
    rows = {selector: pair(found[selector], found[OURS]) for selector in RIVALS}
    about = {
        **machine(),
        "images": options.images,
        "top_k": options.top_k,
        "score": float(found[OURS][0]),
    }
    write_json(options.out, {**about, "rows": rows})
    print(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.replacement_pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data.root", dest="root", required=True)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--top_k", type=int, default=675)
    parser.add_argument("--out", type=Path, default=Path("replacement_pairs.json"))
    try:
        compare(parser.parse_args(arguments))
    except (UserError, OSError) as error:
        print(f"replacement_pairs: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
