"""Choose the fastest settings within an error, using one price of squared error for all call sites.

Errors of layers add up like independent ones, so the fastest model of a given error has one price
of squared error: every call site takes what costs least, time and error together, its own attention
among the choices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from dgt.acceleration.capture import Site
from dgt.acceleration.measure import GAIN, Kind, Measured
from dgt.acceleration.settings import LayerReport

BISECTIONS = 40  # of the price, over PRICES
PRICES = (-4.0, 18.0)  # powers of ten, milliseconds for a squared error of one
BATCH_GAIN = 0.97  # a setting slower than this for a batch is not used for larger batches
EXACT_GAIN = 0.97  # what exact attention must take less than: it costs no error
NOT_FASTER = "no faster setting within the error"

Choice: TypeAlias = tuple[Kind | None, ...]
"""A setting for every call site; None for the model's own attention."""


def usable(site: Site) -> dict[Kind, Measured]:
    """The settings of a call site that are faster than its own attention."""
    found = {}
    for kind, measured in site.settings.items():
        if measured.ratio < (EXACT_GAIN if kind.choice == "exact" else GAIN):
            found[kind] = measured
    return found


def has_groups(site: Site) -> bool:
    """Whether some groups are faster than a call site's own attention."""
    return any(kind.choice == "groups" for kind in usable(site))


def error_of(site: Site, kind: Kind | None) -> float:
    """The error that a setting leaves in the model's output, as far as is known; none where
    attention is exact.
    """
    if kind is None or kind.choice == "exact":
        return 0.0
    return site.reach * site.settings[kind].error


def predicted_error(sites: Sequence[Site], choice: Choice) -> float:
    """The error of the model's output if errors of call sites add up like independent ones."""
    return math.sqrt(
        sum(error_of(site, kind) ** 2 for site, kind in zip(sites, choice, strict=True))
    )


def predicted_ms(sites: Sequence[Site], choice: Choice) -> float:
    """The time of all attention, in milliseconds for one input."""
    return sum(
        site.ms * (1.0 if kind is None else site.settings[kind].ratio)
        for site, kind in zip(sites, choice, strict=True)
    )


def cheapest(site: Site, price: float) -> Kind | None:
    """The cheapest setting at a price in milliseconds per squared error of one; None for dense attention."""
    best: Kind | None = None
    least = site.ms
    for kind, measured in usable(site).items():
        cost = site.ms * measured.ratio + price * error_of(site, kind) ** 2
        if cost < least:
            best = kind
            least = cost
    return best


def choose(sites: Sequence[Site], error: float) -> Choice:
    """The choice at the lowest price whose predicted error is within the limit."""
    low, high = PRICES
    best: Choice = tuple(cheapest_exact(site) for site in sites)
    if error <= 0:
        return best
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = tuple(cheapest(site, 10**middle) for site in sites)
        if predicted_error(sites, found) <= error:
            high = middle
            best = found
        else:
            low = middle
    return best


def cheapest_exact(site: Site) -> Kind | None:
    """Exact attention, if it is faster than the original."""
    exact = Kind("exact")
    return exact if exact in usable(site) else None


def rows_of(sites: Sequence[Site], choice: Choice) -> list[LayerReport]:
    """The rows of the report for a choice, with the times that were measured of single calls."""
    return [row_of(site, kind) for site, kind in zip(sites, choice, strict=True)]


def row_of(site: Site, kind: Kind | None) -> LayerReport:
    """A call site's row with the chosen setting."""
    if kind is None:
        return replace(site.row, reason=site.row.reason or NOT_FASTER, ms_after=site.ms)
    measured = site.settings[kind]
    is_slow_in_batches = measured.batch_ratio is not None and measured.batch_ratio > BATCH_GAIN
    return replace(
        measured.row,
        reason="",
        error=measured.error,
        call=site.row.call,
        calls=site.row.calls,
        breadth=site.row.breadth,
        ms_before=site.ms,
        ms_after=site.ms * measured.ratio,
        most_batch=measured.batch if is_slow_in_batches else None,
    )
