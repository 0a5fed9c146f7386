"""Benchmarks: the attention and the models against what users would pick instead, side by side in one run.

Candidates take turns, and medians are compared, so that a busy machine slows all of them alike; ratios hold for one
kind of processor, which :func:`machine` names. Whole models run in a process each, because memory that one leaves
behind would speed the next one up.
"""

import json
from argparse import Namespace
from typing import Any

from dgt.bench import attention, models
from dgt.bench.attention import bench_attention
from dgt.bench.measures import machine, table
from dgt.bench.models import MODELS, Candidate, bench_models, summary

__all__ = ["Candidate", "bench_attention", "bench_models", "machine", "report"]


def report(flags: Namespace) -> str:
    """Run the benchmark that the flags of ``dgt bench`` ask for: its table, or machine and rows as JSON."""
    task: dict[str, Any] = {"device": flags.device, "rounds": flags.rounds}
    if flags.what == "attention":
        columns, rows, notes = attention.COLUMNS, bench_attention(**task), []
    else:
        task |= {"names": tuple(flags.models or MODELS), "image_size": flags.size, "batch_size": flags.batch}
        task |= {"runtimes": tuple(flags.runtime), "training": flags.train, "memory": flags.memory}
        rows, refused = bench_models(**task)
        columns, notes = models.COLUMNS, [*summary(rows), *refused]
    if flags.json:
        return json.dumps({"machine": machine(), "rows": rows, "notes": notes}, indent=2)
    return "\n".join([table(rows, columns), *notes]).rstrip()
