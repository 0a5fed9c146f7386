"""Accelerated models as files: a plan of :func:`dgt.accelerate` for what is exported, and what the
file takes beside dense attention.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dgt.acceleration.intercept import exact_attention
from dgt.acceleration.plan import find_plan, read_plan
from dgt.inference.formats import Runner, Source, as_list, encode_onnx
from dgt.inference.openvino_extension import open_openvino
from dgt.utils.errors import UserError

TURNS = 3


@dataclass(frozen=True)
class Speed:
    """How long an exported file of an accelerated model takes, and one with dense attention.

    Attributes:
        runtime: what both ran in.
        ms: milliseconds for a batch, the least of some turns.
        dense_ms: the same with dense attention.
    """

    runtime: str
    ms: float
    dense_ms: float

    def __str__(self) -> str:
        ratio = self.dense_ms / self.ms
        return (
            f"{self.runtime} takes {self.ms:.0f} ms a batch, {self.dense_ms:.0f} ms with dense "
            f"attention: {ratio:.2f} times as fast"
        )


def check_plan(plan: str | Path, out: Path, is_fixed: bool, is_extended: bool) -> None:
    """Refuse a plan that the file cannot follow, before a model is opened.

    Raises:
        FileNotFoundError: there is no such plan.
        UserError: If it is not a plan, has no layer with groups, or the file is of another kind.
    """
    if not out.suffix:
        raise UserError(
            "--plan goes with a file, .onnx or .pt2: a folder for timm holds weights alone, "
            "so keep the plan beside it"
        )
    if not is_fixed:
        raise UserError("--plan needs --size H W: groups are for images of one size")
    if out.suffix == ".onnx" and not is_extended:
        raise UserError(
            "--plan with an ONNX file needs --openvino-extension: clustered attention cannot be "
            "expressed in standard ONNX operators"
        )
    if not any(row.setting.choice == "groups" for row in read_plan(find_plan(plan)).layers):
        raise UserError(f"{str(plan)!r} has no grouped layer: export the model without --plan")


@torch.inference_mode()
def time_beside_dense(source: Source, opened: Runner) -> Speed:
    """Time a file of an accelerated model against one of the same model with dense attention, in
    turns, on random images.

    Args:
        source: of the file, whose module is accelerated.
        opened: runs the file.
    """
    if source.fixed is None:
        raise UserError("source must have fixed sizes, got none")
    batch, height, width = source.fixed
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, height, width, generator=generator, device="cpu")
    if not source.extended:

        def run_dense(images: Tensor) -> list[Tensor]:
            with exact_attention(source.module):
                return as_list(source.module(images))

        times = least_times({"file": opened, "dense": run_dense}, images)
        return Speed("PyTorch", times["file"], times["dense"])
    with exact_attention(source.module):
        dense = open_openvino(encode_onnx(replace(source, extended=False)))
    times = least_times({"file": opened, "dense": dense}, images)
    return Speed("OpenVINO", times["file"], times["dense"])


def least_times(runners: Mapping[str, Runner], images: Tensor) -> dict[str, float]:
    """The least milliseconds of each of several runners, which take turns."""
    least = dict.fromkeys(runners, float("inf"))
    for _ in range(TURNS):
        for name, run in runners.items():
            start = time.perf_counter()
            run(images)
            least[name] = min(least[name], 1000 * (time.perf_counter() - start))
    return least
