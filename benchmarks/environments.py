"""The size of an environment for each extra, alone.

    python benchmarks/environments.py FOLDER --out benchmarks/results/environments.json

Every environment is made in a subfolder of FOLDER by `python -m venv` and pip, from this checkout,
and measured: all its files, and how much of them is PyTorch with what it brings for GPUs.
Subfolders that are environments already are measured as they are, with others', such as of an
earlier commit, by their names. All of them together take about 70 GB.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from dgt.utils.records import command_line, write_record

ROOT = Path(__file__).resolve().parents[1]
CORE = "core"
EXTRAS = (
    "transformers",
    "train",
    "segment",
    "detect",
    "hub",
    "explore",
    "export",
    "openvino",
    "all",
)
OF_PYTORCH = ("torch", "torchgen", "functorch", "triton", "nvidia", "cuda")
"""First parts of the names of folders, in site-packages, of PyTorch and its GPU libraries."""


def make(folder: Path, extra: str) -> None:
    """Make an environment with the package and an extra."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    what = str(ROOT) if extra == CORE else f"{ROOT}[{extra}]"
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", what], check=True)


def measure(folder: Path) -> dict[str, Any]:
    """Megabytes of an environment, of PyTorch in it, and the number of packages."""
    (packages,) = folder.glob("lib/python*/site-packages")
    pytorch = [
        path for path in packages.iterdir() if path.name.partition("_")[0].startswith(OF_PYTORCH)
    ]
    pytorch = [
        path for path in pytorch if not path.name.startswith(("torchvision", "torchmetrics"))
    ]
    return {
        "megabytes": round(_bytes(folder) / 1e6),
        "of_pytorch": round(sum(_bytes(path) for path in pytorch) / 1e6),
        "packages": len([*packages.glob("*.dist-info")]),
    }


def _bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def main() -> None:
    """Make what is missing, measure all, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for extra in (CORE, *EXTRAS):
        if not (options.folder / extra).is_dir():
            make(options.folder / extra, extra)
    found = {
        path.parent.name: measure(path.parent)
        for path in sorted(options.folder.glob("*/pyvenv.cfg"))
    }
    write_record(
        options.out,
        {"python": sys.version.split()[0], "command": command_line(), "environments": found},
    )


if __name__ == "__main__":
    main()
