"""DINOv2-S in OpenVINO's default precision and in PyTorch in bfloat16, unmodified and accelerated.

    OMP_NUM_THREADS=2 python benchmarks/dinov2_openvino.py --weights dinov2_small.safetensors \
        --image PHOTOGRAPH --size 1036 --out dinov2_openvino_zen4.json

The weights are those of `accelerate_dinov2.py`; the plans come with the package. OpenVINO takes
bfloat16 where the processor has units for it, else float32; there the accelerated model needs our
extension and has no guard. Arms take turns in one process, and errors are beside the tokens of the
unmodified model in float32. Every run adds a row to the file, or replaces that of the same size and
threads.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any

import openvino
import torch
from accelerate_dinov2 import NAME, Tokens, in_bfloat16, open_model, read_photograph
from timm.models import VisionTransformer
from torch import Tensor

import dgt
from dgt.acceleration.bound import relative_error, squares_between
from dgt.inference import Source, encode_onnx, open_openvino
from dgt.inference.formats import Runner
from dgt.utils.records import write_row
from dgt_command.measures import machine, medians, milliseconds

ERROR = "0.05"


def planned(model: VisionTransformer, size: int, guard: bool) -> VisionTransformer:
    """A copy of a model that is accelerated by the plan of the package."""
    accelerated = copy.deepcopy(model)
    dgt.apply_plan(accelerated, f"{NAME}.lvd142m@{size}-{ERROR}", guard=guard)
    return accelerated


def exactly(model: VisionTransformer) -> VisionTransformer:
    """A copy of a model with exact attention by the faster kernel."""
    accelerated = copy.deepcopy(model)
    dgt.accelerate(accelerated, error=0)
    return accelerated


def in_pytorch(model: VisionTransformer) -> Runner:
    """A model in eager PyTorch, its weights in bfloat16."""
    half = in_bfloat16(model)
    return lambda image: [half.forward_features(image.to(torch.bfloat16)).float()]


def in_openvino(model: VisionTransformer, size: int, extended: bool) -> Runner:
    """A model in OpenVINO, in the precision that it takes by itself."""
    source = Source(Tokens(model).eval(), ("tokens",), fixed=(1, size, size), extended=extended)
    return open_openvino(
        encode_onnx(source), torch.get_num_threads(), extended=extended, in_float32=False
    )


@torch.no_grad()
def measure(weights: Path, image: Tensor, rounds: int) -> dict[str, Any]:
    """The median milliseconds of every arm, and its error."""
    size = image.shape[-1]
    model = open_model(weights, size)
    unguarded = planned(model, size, guard=False)
    arms = {
        "pytorch": in_pytorch(model),
        "pytorch_exact": in_pytorch(exactly(model)),
        "pytorch_plan": in_pytorch(planned(model, size, guard=True)),
        "pytorch_plan_unguarded": in_pytorch(unguarded),
        "openvino": in_openvino(model, size, extended=False),
        "openvino_plan": in_openvino(unguarded, size, extended=True),
    }
    expected = model.forward_features(image)
    errors = {
        name: relative_error(squares_between(run(image), [expected])[None])
        for name, run in arms.items()
    }
    calls = {name: partial(milliseconds, partial(run, image)) for name, run in arms.items()}
    return {"ms": medians(rounds, calls), "errors": errors}


def main() -> None:
    """Measure, and add a row to the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="of DINOv2-S")
    parser.add_argument("--image", type=Path, required=True, help="a photograph")
    parser.add_argument("--size", type=int, required=True, help="pixels per side: 518 or 1036")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    key = {"size": options.size, "threads": torch.get_num_threads()}
    found = measure(options.weights, read_photograph(options.image, options.size), options.rounds)
    print(found)
    described = {**machine(), "openvino": openvino.__version__.partition("-")[0]}
    write_row(options.out, key, {"machine": described, **found})


if __name__ == "__main__":
    main()
