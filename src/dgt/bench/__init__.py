"""Benchmarks: the attention and the models against what users would pick instead, side by side in one run.

Candidates take turns, and medians are compared, so that a busy machine slows all of them alike; ratios hold for one
kind of processor, which :func:`machine` names. Whole models run in a process each, because memory that one leaves
behind would speed the next one up.
"""

import json
from typing import Any

from dgt.bench.attention import ATTENTION_CASES, attention_table, bench_attention, peak_memory_mib
from dgt.bench.measures import machine
from dgt.bench.models import MODELS, Candidate, bench_models, models_table
from dgt.bench.parts import profile_models, profile_table
from dgt.bench.plot import draw_accuracy
from dgt.ops.checks import check_count
from dgt.utils.errors import UserError

__all__ = [
    "ATTENTION_CASES",
    "MODELS",
    "Candidate",
    "attention_table",
    "bench_attention",
    "bench_models",
    "draw_accuracy",
    "machine",
    "models_table",
    "peak_memory_mib",
    "profile_models",
    "profile_table",
    "report",
]


def report(
    what: str,
    rounds: int = 7,
    device: str = "cpu",
    names: tuple[str, ...] | None = None,
    image_size: int = 224,
    batch_size: int = 8,
    profile: bool = False,
    plot: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> str:
    """Run the benchmark that the command line asks for and return its table, or machine and rows as JSON.

    Args:
        what: ``"attention"`` or ``"models"``.
        rounds, device: as in :func:`bench_attention` and :func:`bench_models`.
        names, image_size, batch_size: of models.
        profile: tell where the time of the models goes, instead of comparing them.
        plot: draw speed against accuracy into this file as well.
        as_json: return JSON.
        options: ``compiled``, ``training``, ``memory`` of :func:`bench_models`.

    Raises:
        TypeError, ValueError, RuntimeError: as the benchmarks do; UserError for a plot of anything but the inference
            of models.
    """
    check_count("--rounds", rounds)
    if plot is not None and (what == "attention" or profile or options.get("training")):
        raise UserError("--plot draws models at inference: it goes with neither attention, --profile nor --train")
    common: dict[str, Any] = {"device": device, "rounds": rounds}
    models: dict[str, Any] = {"names": names or MODELS, "image_size": image_size, "batch_size": batch_size, **common}
    if what == "attention":
        table, rows = attention_table, bench_attention(**common)
    elif profile:
        table, rows = profile_table, profile_models(**models)
    else:
        table, rows = models_table, bench_models(**models, **options)
    if plot is not None:
        draw_accuracy(rows, plot)
    return json.dumps({"machine": machine(), "rows": rows}, indent=2) if as_json else table(rows)
