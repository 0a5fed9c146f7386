"""Timing on this machine: what every benchmark shares, and `dgt profile`, which tells what way of
attending pays.

Candidates take turns, and medians are compared, so that background load slows all of them alike;
ratios hold for one kind of processor, which :func:`machine` names.
"""

from dgt.bench.measures import machine

__all__ = ["machine"]
