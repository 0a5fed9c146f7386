"""Trains recipes one after another, as one of the processes that `test_parallel.py` starts.

Arguments: the folder with the recipes, then their names; each one's run goes to the folder NAME in it. Where the
environment is that of torchrun, all its processes train together.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from dgt.training import fit, load_recipe


def main() -> None:
    """Train every recipe named."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        fit(load_recipe(folder / f"{name}.yaml", [f"--out={folder / name}"]), resume=True)


if __name__ == "__main__":
    main()
