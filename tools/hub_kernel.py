"""Write the Triton and PyTorch backends as a kernel package, which Hugging Face's `kernels` loads.

    python -m tools.hub_kernel --out build/kernel

The folder contains everything that is published: a card, the license, and for each device a folder
    of Python files that import nothing from this package. Its operators have their own names, so
    that it can be loaded alongside an installed `dgt`. `kernels.get_local_kernel(FOLDER)` loads it
    without a network;
`hf upload USER/dgt FOLDER` publishes it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dgt"
SUPPORT = ("utils/errors.py",)
DEVICES = ("cuda", "cpu")
# The C++ kernels are compiled for one machine; on CPUs the package runs PyTorch's operations.
# The Python files that call them are there, as operators are declared by them, and never run.
NATIVE_LOADER = '''"""Kernel packages hold no native CPU kernels: PyTorch's operations take every call."""

from torch import Tensor

TYPES = ()


def reason_against_native() -> str:
    """Say why the native kernels cannot run."""
    return "they are not part of the kernel package"


def can_run_native(tokens: Tensor) -> bool:
    """Tell that no tokens are taken."""
    return False


def check_native(tokens: Tensor) -> None:
    """Refuse the backend by name."""
    raise ValueError('backend="native" is not part of the kernel package; use backend="torch"')
'''
INIT = '''"""Dynamic Group Attention: attention over dynamic groups of queries, in Triton and PyTorch."""

from .ops import *  # noqa: F403
from .ops import __all__ as __all__

__version__ = "VERSION"
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
- attention
---

# Dynamic Group Attention

Every query attends to the `top_k` keys of its group, anywhere in the image; groups follow from the
queries. The kernels are written in Triton; on other devices PyTorch's own operations do the same.

```python
import torch
from kernels import get_kernel  # for a folder on disk: get_local_kernel(Path("FOLDER"))

dgt = get_kernel("USER/dgt", version=1, trust_remote_code=["USER/dgt"])
query, key, value = torch.randn(3, 1, 2, 3136, 32, device="cuda", dtype=torch.bfloat16)
centroids = torch.nn.functional.normalize(torch.randn(2, 48, 32, device="cuda"), dim=-1)
output = dgt.dynamic_group_attention(query, key, value, centroids, top_k=98).output
```

- `kernels` asks for your trust: this is code, which runs on your machine. Without `trust_remote_code` it loads packages
  of publishers alone that the Hub has checked. Read the files first, they are few, or name a `revision` that you read.
- `query`, `key`, `value`: (images, heads, tokens, channels), float32, float16 or bfloat16. `centroids`: a unit vector
  for each head and group; `dgt.find_centroids` finds them in an image.
- The result has `output` as PyTorch's attention returns it, `group_ids` and `key_ids`. Gradients flow to query, key
  and value. `help(dgt.dynamic_group_attention)` tells the rest: padding, prefix tokens, residual keys.
- `dgt.clustered_attention(query, key, value, num_groups=48, top_k=98)` is an approximation of the attention of a
  trained model, and needs no centroids.
- The Triton kernels need compute capability 8.0 and at most 128 channels a head; all else is PyTorch's operations,
  which `backend="torch"` asks for by name.

The paper is "Dynamic Group Transformer: A General Vision Transformer Backbone with Dynamic Group
Attention" (IJCAI 2022).
"""


def sources() -> dict[str, str]:
    """Read the files of the package, by their path in the package.

    Returns:
        Contents by path, without what would load the native kernels.
    """
    found = {"utils/__init__.py": ""}
    for path in sorted((SOURCE / "ops").rglob("*.py")):
        found[path.relative_to(SOURCE).as_posix()] = path.read_text(encoding="utf-8")
    for name in SUPPORT:
        found[name] = (SOURCE / name).read_text(encoding="utf-8")
    found["ops/native_loader.py"] = NATIVE_LOADER
    return found


def independent(text: str, depth: int, name: str) -> str:
    """Rewrite a file so that it imports from the package it is in.

    Args:
        text: contents of the file.
        depth: number of folders of the package that contain it.
        name: namespace of the package's operators.

    Returns:
        The file with relative imports and operators in that namespace.
    """
    root = "." * (depth + 1)
    text = re.sub(r"(?m)^(\s*)from dgt\.", rf"\1from {root}", text)
    text = re.sub(
        r'import_module\("dgt\.([\w.]+)"\)', rf'import_module("{root}\1", __package__)', text
    )
    text = text.replace('NAMESPACE = "dgt"', f'NAMESPACE = "{name}"')
    return text.replace("torch.ops.dgt.", f"torch.ops.{name}.")


def write_package(out: Path, version: int = 1) -> list[Path]:
    """Write the package.

    Args:
        out: a folder that is empty or does not exist.
        version: version of the kernel's interface, as counted by the hub.

    Returns:
        The folders, one per device.

    Raises:
        FileExistsError: If `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} must be an empty folder or not there, choose another --out")
    texts = sources()
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:12]
    release = re.search(
        r'__version__ = "(.*?)"', (SOURCE / "__init__.py").read_text(encoding="utf-8")
    )
    folders = []
    for device in DEVICES:
        name = f"dgt_{device}_{digest}"
        folder = out / "build" / f"torch-{device}"
        about = {
            "name": "dgt",
            "id": name,
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": device},
        }
        contents = {path: independent(text, path.count("/"), name) for path, text in texts.items()}
        contents["__init__.py"] = INIT.replace("VERSION", release[1] if release else "")
        contents["metadata.json"] = json.dumps(about, indent=2) + "\n"
        for path, text in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        folders.append(folder)
    (out / "README.md").write_text(CARD, encoding="utf-8")
    (out / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    return folders


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--version", type=click.IntRange(min=1), default=1, help="Of the kernel's interface.")
def main(out: Path, version: int) -> None:
    """Write the package and print its path."""
    try:
        folders = write_package(out, version)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    for folder in folders:
        print(folder)


if __name__ == "__main__":
    sys.exit(main())
