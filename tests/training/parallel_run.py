"""Trains recipes one after another, as one of the processes that `test_parallel.py` starts.

Arguments: the folder with the recipes, then their names; each one's run goes to the folder NAME in it. Where the
environment is that of torchrun, all its processes train together. At the end they join their reports of broken images.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from dgt.data.image_io import BrokenImage, BrokenImages
from dgt.training import fit, load_recipe
from dgt.training.parallel import join_broken_images
from dgt.utils.distributed import rank


def main() -> None:
    """Train every recipe named."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        fit(load_recipe(folder / f"{name}.yaml", [f"--out={folder / name}"]), resume=True)
    number = rank()
    report = BrokenImages("train", 10, 1.0)
    report.record([BrokenImage(f"met by {number}", "why")])
    join_broken_images({"train": report})
    (folder / f"broken-{number}.txt").write_text(", ".join(sorted(report.broken)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
