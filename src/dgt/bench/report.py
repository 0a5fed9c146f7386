"""What `dgt bench` prints."""

import json
from typing import Any

from dgt import bench
from dgt.bench.models import MODELS
from dgt.ops.checks import check_count


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
    """Run the benchmark that the command line asks for and return its table, or its rows as JSON.

    Args:
        what: ``"attention"`` or ``"models"``.
        rounds, device: as in :func:`bench_attention` and :func:`bench_models`.
        names, image_size, batch_size: of models.
        profile: tell where the time of the models goes, instead of comparing them.
        plot: draw speed against accuracy into this file as well.
        as_json: return the machine and the rows as JSON.
        options: ``compiled``, ``training``, ``memory`` of :func:`bench_models`.

    Raises:
        TypeError, ValueError, RuntimeError: as the benchmarks do; ValueError for ``rounds`` below 1, and for a plot of
            anything but the inference of models.
    """
    check_count("--rounds", rounds)
    if plot is not None and (what == "attention" or profile or options.get("training")):
        raise ValueError("--plot draws models at inference: it goes with neither attention, --profile nor --train")
    models: dict[str, Any] = {"names": names or MODELS, "image_size": image_size, "batch_size": batch_size}
    models |= {"device": device, "rounds": rounds}
    if what == "attention":
        rows = bench.bench_attention(device=device, rounds=rounds)
        table = bench.attention_table(rows)
    elif profile:
        rows = bench.profile_models(**models)
        table = bench.profile_table(rows)
    else:
        rows = bench.bench_models(**models, **options)
        table = bench.models_table(rows)
        if plot is not None:
            bench.draw_accuracy(rows, plot)
    return json.dumps({"machine": bench.machine(), "rows": rows}, indent=2) if as_json else table
