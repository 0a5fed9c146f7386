"""Is another choice of keys ahead in mIoU of groups with the remainder? Differences on the same images, with intervals.

    OMP_NUM_THREADS=1 python benchmarks/replacement_pairs.py --weights camvid_vit.pt --data.root CAMVID

The images, keys and centroids are those of `dgt ablate replacement --images 24`. mIoU is of all images together, so its
interval is a jackknife: the differences with each image left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dgt.bench.measures import machine
from dgt.experiments import fixed_weights
from dgt.experiments.choices import attend_by
from dgt.experiments.fixed_weights import Subject
from dgt.experiments.report import interval
from dgt.tasks.segment import segmentation_scores
from dgt.utils.atomic_write import write_json

OURS, RIVALS = "groups, remainder", ("groups", "best of each query", "blocks", "random, each query")


@torch.no_grad()
def confusions(subject: Subject) -> Tensor:
    """(images, classes, classes): the pixels of each image by true and by predicted class."""
    found = []
    for images, targets in subject.data.val_dataloader():
        for image, target in zip(images, targets, strict=True):
            metrics: Any = subject.task.metrics(subject.data)
            metrics.update(subject.network, [image], [target])
            found.append(metrics.confusion.compute())
    return torch.stack(found)


def scores(counts: Tensor) -> Tensor:
    """(images + 1,): mIoU of all images, and with each of them left out."""
    wholes = [counts.sum(0), *(counts.sum(0) - one for one in counts)]
    return torch.stack([segmentation_scores(whole)["miou"] for whole in wholes])


def main() -> None:
    """Measure ours and the rivals, and write the differences."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data.root", dest="root", required=True)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--top_k", type=int, default=675)
    parser.add_argument("--out", type=Path, default=Path("replacement_pairs.json"))
    options = parser.parse_args()
    words: Sequence[str] = ("--weights", options.weights, "--data.root", options.root, "--images", str(options.images))
    subjects: list[Subject] = []
    with patch.object(fixed_weights, "study", lambda folder, settings, subject, *_: subjects.append(subject)):
        fixed_weights.replacement(words)
    found = {}
    for choice in (OURS, *RIVALS):
        with subjects[0].swap(partial(attend_by, choice, options.top_k)):
            found[choice] = scores(confusions(subjects[0]))
        print(choice, float(found[choice][0]), flush=True)
    rows = {}
    for choice in RIVALS:
        whole, *left_out = (found[choice] - found[OURS]).tolist()
        _, half = interval(left_out)  # a jackknife's is (n - 1) times that of its values
        rows[choice] = {"ahead": whole, "half": None if half is None else half * (len(left_out) - 1)}
    content = {**machine(), "images": options.images, "top_k": options.top_k, "score": float(found[OURS][0])}
    write_json(options.out, content | {"rows": rows})
    print(rows)


if __name__ == "__main__":
    main()
