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
from dgt.bench.models import MODELS, Candidate, bench_models, draw_accuracy, profile_models
from dgt.utils.errors import UserError

__all__ = ["Candidate", "bench_attention", "bench_models", "draw_accuracy", "machine", "profile_models", "report"]

PACKED = "\n\n+inference has its weights packed for oneDNN: its like among other models is NAME+packed."


def report(flags: Namespace) -> str:
    """Run the benchmark that the flags of ``dgt bench`` ask for: its table, or machine and rows as JSON.

    Raises:
        TypeError, ValueError, RuntimeError: as the benchmarks do; UserError for a plot of anything but the inference
            of models.
    """
    if flags.plot and (flags.what == "attention" or flags.profile or flags.train):
        raise UserError("--plot draws models at inference: it goes with neither attention, --profile nor --train")
    turns: dict[str, Any] = {"device": flags.device, "rounds": flags.rounds}
    task = {**turns, "names": tuple(flags.models or MODELS), "image_size": flags.size, "batch_size": flags.batch}
    if flags.what == "attention":
        columns, rows = attention.COLUMNS, bench_attention(**turns)
    elif flags.profile:
        columns, rows = models.PROFILE, profile_models(**task)
    else:
        rows = bench_models(**task, compiled=flags.compile, training=flags.train, memory=flags.memory)
        columns = models.COLUMNS
    if flags.plot:
        draw_accuracy(rows, flags.plot)
    if flags.json:
        return json.dumps({"machine": machine(), "rows": rows}, indent=2)
    note = PACKED if columns is models.COLUMNS and any("+inference" in row["model"] for row in rows) else ""
    return table([row for row in rows if row.get("share", 1) >= 0.005], columns) + note
