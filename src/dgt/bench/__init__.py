"""Timing on this machine: what every benchmark shares, and `dgt profile`, which finds the fastest attention.

Candidates take turns, and medians are compared, so that background load slows all of them alike;
ratios hold for one kind of processor, which :func:`machine` names.
"""

from dgt.bench.measures import machine

__all__ = ["machine"]

MOVED = {
    "bench_attention": "benchmarks/bench_attention.py",
    "bench_models": "benchmarks/bench_models.py",
    "Candidate": "benchmarks/bench_models.py",
    "report": "benchmarks/bench.py",
}


def __getattr__(name: str) -> object:
    """Say for one version where a benchmark went."""
    if name in MOVED:
        raise AttributeError(
            f"dgt.bench.{name} was moved: in a checkout of the project it is in {MOVED[name]}"
        )
    raise AttributeError(f"module 'dgt.bench' has no attribute {name!r}")
