"""Benchmarks: the attention and the models against what users would pick instead, side by side in one run.

Candidates take turns, and medians are compared, so that a busy machine slows all of them alike: ratios travel, times do
not. Whole models run in a process each, because memory that one leaves behind would speed the next one up.
"""

from dgt.bench.attention import ATTENTION_CASES, attention_table, bench_attention, peak_memory_mib
from dgt.bench.candidates import Candidate
from dgt.bench.measures import machine
from dgt.bench.models import MODELS, bench_models, models_table
from dgt.bench.plot import draw_accuracy
from dgt.bench.profile import profile_models, profile_table
from dgt.bench.report import report

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
