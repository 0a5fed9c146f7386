"""What 300 epochs of ImageNet need on 8, 64 and 512 GPUs, and where the first bottleneck comes.

    python benchmarks/scaling.py                                        # rates of a GPU derived from FLOPs
    python benchmarks/scaling.py --gpu-rate dgt_tiny=2500 --loader-rate 260   # measured rates instead

The time of a step is that of its slowest part, plus what cannot overlap. Every number that is not
computed from the model is an option, whose default `--help` shows. Parameters, FLOPs and the bytes
of centroid statistics are the models' own; the rate of the loader is that of
`benchmarks/results/loaders_cpu.json`. Prints the tables of docs/scaling.md.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import timm
import torch

import dgt
from dgt.layers.centroids import CentroidState
from dgt.utils.records import markdown_table, write_record

IMAGES, VAL_IMAGES, PIXELS = 1_281_167, 50_000, 3 * 224 * 224
MODELS = ("dgt_tiny", "dgt_small", "dgt_base")
# GPUs, images on each: batch 1024, 1024, 8192, 8192
SETUPS = ((8, 128), (64, 16), (64, 128), (512, 16))
LOADERS = Path(__file__).parent / "results" / "loaders_cpu.json"


@dataclass(frozen=True)
class Model:
    """What a training computes and moves.

    Attributes:
        macs: multiply-adds of a forward pass of one image.
        statistics: bytes of centroid statistics.
    """

    name: str
    macs: float
    parameters: int
    blocks: int
    statistics: int


def describe(name: str) -> Model:
    """The numbers of a model at 224 px."""
    cost = dgt.cost(name)
    with torch.device("meta"):
        network = timm.create_model(name)
    layers = [layer for layer in network.modules() if isinstance(layer, CentroidState)]
    statistics = sum(
        4 * (layer.observed.sums.numel() + layer.observed.counts.numel()) for layer in layers
    )
    blocks = sum(type(module).__name__ == "Block" for module in network.modules())
    return Model(name, cost.flops, cost.params, blocks, statistics)


class Assumption(NamedTuple):
    """A number that is assumed unless the command line gives another."""

    default: float
    help: str


ASSUMPTIONS = {
    "--peak": Assumption(989, "TFLOP/s of a GPU in bfloat16, dense (H100 SXM)"),
    "--utilization": Assumption(0.0212, "share of it that a training reaches, as DGT-T on an H200"),
    "--block-floor": Assumption(1.5, "the least ms of a step for each block"),
    "--inside": Assumption(200, "GB/s of a GPU's links inside a node"),
    "--between": Assumption(25, "GB/s of a GPU between nodes"),
    "--latency": Assumption(30, "microseconds of a hop of a small collective"),
    "--image-bytes": Assumption(110e3, "mean bytes of a file of ImageNet"),
    "--price": Assumption(2.5, "dollars for an hour of a GPU"),
}


def arguments() -> argparse.Namespace:
    """The options of the command line: every assumption is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, assumed in ASSUMPTIONS.items():
        text = f"{assumed.help} (assumed %(default)s)"
        parser.add_argument(name, type=float, default=assumed.default, help=text)
    parser.add_argument(
        "--gpu-rate",
        nargs="*",
        default=[],
        metavar="MODEL=N",
        help="measured training images/s of one GPU instead",
    )
    parser.add_argument(
        "--loader-rate",
        type=float,
        help="images/s of one core (default: measured, in results/loaders_cpu.json)",
    )
    parser.add_argument(
        "--cores", type=int, default=112, help="cores of a node of 8 GPUs (assumed %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file to write the tables to")
    return parser.parse_args()


def core_rate() -> float:
    """Images per second that one core prepares from folders, as measured with one worker per core."""
    stored = json.loads(LOADERS.read_text())
    rate = next(
        row["images_per_second"] for row in stored["rows"] if row["loader"] == "dgt, folders"
    )
    return float(rate) / stored["options"]["workers"]


@dataclass(frozen=True)
class Step:
    """Milliseconds of the parts of a step, and of all of it."""

    compute: float
    exchange: float
    exposed: float
    centroids: float
    loader: float

    @property
    def total(self) -> float:
        """Milliseconds of the step: the loader works in parallel to the rest."""
        return max(self.compute + self.exposed + self.centroids, self.loader)

    @property
    def bottleneck(self) -> str:
        """The part that must become faster first for a faster step."""
        parts = {"GPU": self.compute, "gradients": self.exposed, "centroids": self.centroids}
        return (
            "loader"
            if self.loader >= sum(parts.values())
            else max(parts, key=lambda part: parts[part])
        )


def step(
    model: Model, gpus: int, batch: int, options: argparse.Namespace, rate_of_core: float
) -> Step:
    """The parts of one optimizer step under DDP.

    Forward and backward take 6 FLOPs for each multiply-add of the forward pass. Gradients (float32)
    are reduced on a ring, which overlaps with two thirds of the computation. Centroid statistics are
    reduced afterwards, in one collective that overlaps with nothing.
    """
    measured = {
        name: float(rate) for name, _, rate in (word.partition("=") for word in options.gpu_rate)
    }
    rate = measured.get(model.name, options.utilization * options.peak * 1e12 / (6 * model.macs))
    compute = max(1e3 * batch / rate, options.block_floor * model.blocks)
    speed = (options.inside if gpus <= 8 else options.between) * 1e6  # bytes in a millisecond
    ring = 2 * (gpus - 1) / gpus / speed
    exchange = 4 * model.parameters * ring
    hops = 2 * math.ceil(math.log2(gpus)) * options.latency / 1e3
    loader = 1e3 * batch * min(gpus, 8) / (options.cores * rate_of_core)
    return Step(
        compute,
        exchange,
        max(0.0, exchange - compute * 2 / 3),
        model.statistics * ring + hops,
        loader,
    )


def main() -> None:
    """Print the tables, and write them to a file if one is named."""
    options = arguments()
    rate_of_core = options.loader_rate or core_rate()
    models = [describe(name) for name in MODELS]
    heads = [
        "model",
        "training FLOPs an image",
        "images/s of a GPU",
        "gradients",
        "centroid statistics",
        "images",
    ]
    needs = [heads, *(need(model, options, rate_of_core) for model in models)]
    heads = [
        "model",
        "GPUs",
        "images on each",
        "GPU ms",
        "gradients ms (not hidden)",
        "centroids ms",
        "loader ms",
    ]
    heads += [
        "step ms",
        "bottleneck",
        "cores a node needs",
        "disk GB/s a node",
        "hours",
        "GPU hours",
        "dollars",
    ]
    steps = [
        heads,
        *(row(model, *setup, options, rate_of_core) for model in models for setup in SETUPS),
    ]
    print(
        f"one core prepares {rate_of_core:.0f} images/s",
        *(markdown_table(*_split(cells)) for cells in (needs, steps)),
    )
    if options.json:
        command = " ".join(["python benchmarks/scaling.py", *sys.argv[1:]])
        content = {
            "command": command,
            "images_per_second_of_a_core": rate_of_core,
            "needs": needs,
            "steps": steps,
        }
        write_record(options.json, content)


def _split(cells: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return cells[0], cells[1:]


def need(model: Model, options: argparse.Namespace, rate_of_core: float) -> list[str]:
    """One line of the first table."""
    alone = step(model, 8, 128, options, rate_of_core)
    moved = [
        f"{4 * model.parameters / 1e6:.0f} MB",
        f"{model.statistics / 1e6:.2f} MB",
        f"{PIXELS * 512 / 1e6:.0f} MB",
    ]
    return [model.name, f"{6 * model.macs / 1e9:.1f} G", f"{128e3 / alone.compute:.0f}", *moved]


def row(
    model: Model, gpus: int, batch: int, options: argparse.Namespace, rate_of_core: float
) -> list[str]:
    """One line of the second table."""
    parts = step(model, gpus, batch, options, rate_of_core)
    steps = 300 * (IMAGES // (gpus * batch))
    validation = 300 * VAL_IMAGES / (gpus * batch) / 3  # a forward is a third of a step
    hours = (steps + validation) * parts.total / 3.6e6
    # images/s that a node could train on
    demand = 8 * batch / (parts.compute + parts.exposed + parts.centroids) * 1e3
    return [
        model.name,
        f"{gpus}",
        f"{batch}",
        f"{parts.compute:.1f}",
        f"{parts.exchange:.1f} ({parts.exposed:.1f})",
        f"{parts.centroids:.2f}",
        f"{parts.loader:.1f}",
        f"{parts.total:.1f}",
        parts.bottleneck,
        f"{demand / rate_of_core:.0f}",
        f"{demand * options.image_bytes / 1e9:.1f}",
        f"{hours:.1f}",
        f"{gpus * hours:.0f}",
        f"{gpus * hours * options.price:,.0f}",
    ]


if __name__ == "__main__":
    main()
