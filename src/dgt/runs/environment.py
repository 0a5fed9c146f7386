"""The hardware and software of a run, as recorded by `results.json` and studies."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dgt import __version__
from dgt.utils.records import command_line, processor


def environment() -> dict[str, Any]:
    """Versions, device, and the command that started this process, as one would type it again."""
    versions = {"python": platform.python_version(), "dynamic-group-transformer": __version__}
    for name in ("torch", "torchvision", "timm", "lightning-fabric"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # which only training needs
            continue
    threads = "" if torch.cuda.is_available() else f", {torch.get_num_threads()} threads"
    return {"versions": versions, "device": processor() + threads, "command": command_line()}
