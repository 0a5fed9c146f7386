"""The attention and whole models against what users would pick instead, side by side in one run.

    python benchmarks/bench.py attention
    python benchmarks/bench.py models --models dgt_tiny convnext_tiny --runtime eager compile

Candidates take turns, and medians are compared, so that background load slows all of them alike.
Whole models run in a process each, because memory that one leaves behind would speed the next one
up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import bench_attention
import bench_models

from dgt.bench.measures import machine, table
from dgt.utils.errors import Disagreement, LostProcess, UserError

FORMS = (
    "timm models, each NAME[@PIXELS][+inference|+global|+checkpointing] (default: DGT-T and peers)"
)
RUNTIMES = ("eager", "compile", "onnxruntime", "openvino", "openvino-extension")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("what", choices=("attention", "models"), help="what to time")
    found.add_argument("--json", action="store_true", help="print machine and rows as JSON")
    found.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    found.add_argument(
        "--rounds", type=at_least_1, default=7, help="turns of each candidate (default: 7)"
    )
    models = found.add_argument_group("models")
    models.add_argument(
        "--models", metavar="NAME", nargs="+", default=bench_models.MODELS, help=FORMS
    )
    models.add_argument(
        "--size",
        metavar="PIXELS",
        type=at_least_1,
        default=224,
        help="side of images (default: 224)",
    )
    models.add_argument("--batch", type=at_least_1, default=8, help="images per batch (default: 8)")
    models.add_argument(
        "--runtime", choices=RUNTIMES, nargs="+", default=["eager"], help="where (default: eager)"
    )
    models.add_argument("--train", action="store_true", help="time training steps, not inference")
    models.add_argument("--memory", action="store_true", help="also measure peaks of memory")
    return found


def at_least_1(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def report(options: argparse.Namespace) -> str:
    """Run the benchmark that was asked for; return its table, or machine and rows as JSON."""
    notes: list[str] = []
    rows: list[dict[str, Any]]
    if options.what == "attention":
        columns = bench_attention.COLUMNS
        rows = bench_attention.bench_attention(device=options.device, rounds=options.rounds)
    else:
        columns = bench_models.COLUMNS
        settings = bench_models.Settings(
            image_size=options.size,
            batch_size=options.batch,
            device=options.device,
            rounds=options.rounds,
            training=options.train,
            memory=options.memory,
        )
        rows, refused = bench_models.bench_models(
            tuple(options.models), tuple(options.runtime), settings
        )
        notes = [*bench_models.summary(rows), *refused]
    if options.json:
        return json.dumps({"machine": machine(), "rows": rows, "notes": notes}, indent=2)
    return "\n".join([table(rows, columns), *notes]).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 2 for bad input, 1 for a wrong result or a lost process.
    """
    options = parser().parse_args(arguments)
    try:
        print(report(options))
    except UserError as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    except (Disagreement, LostProcess) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
