"""Choose the fastest settings within an error, using one price of squared error for all call sites.

Errors of layers add up like independent ones, so the fastest model of a given error has one price
of squared error: every call site takes what costs least, time and error together, its original
attention among the choices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from dgt.acceleration.exact import EXACT_GAIN
from dgt.acceleration.measure import GAIN
from dgt.acceleration.search import Search
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement, chosen

BISECTIONS = 40  # of the price, over PRICES
PRICES = (-4.0, 18.0)  # powers of ten, milliseconds for a squared error of one
BATCH_GAIN = 0.97  # a setting slower than this for a batch is not used for larger batches
NOT_FASTER = "no faster setting within the error"

Choice: TypeAlias = tuple[Setting | None, ...]
"""A setting for every call site; None for the original attention."""


def usable(site: AttentionSite) -> dict[Setting, Measurement]:
    """The settings of a call site that are faster than the original attention."""
    usable_settings = {}
    for setting, measurement in site.candidates.items():
        if measurement.ratio < (EXACT_GAIN if setting.choice == "exact" else GAIN):
            usable_settings[setting] = measurement
    return usable_settings


def has_groups(site: AttentionSite) -> bool:
    """Whether some groups are faster than a call site's original attention."""
    return any(setting.choice == "groups" for setting in usable(site))


def error_of(site: AttentionSite, setting: Setting | None) -> float:
    """The error that a setting leaves in the model's output, as far as is known; none where
    attention is exact.
    """
    if setting is None or setting.choice == "exact":
        return 0.0
    return site.sensitivity * site.error_scale * site.candidates[setting].error


def predicted_error(sites: Sequence[AttentionSite], choice: Choice) -> float:
    """The error of the model's output if errors of call sites add up like independent ones."""
    return math.sqrt(
        sum(error_of(site, setting) ** 2 for site, setting in zip(sites, choice, strict=True))
    )


def predicted_attention_ms(sites: Sequence[AttentionSite], choice: Choice) -> float:
    """The time of all attention, in milliseconds for one input."""
    return sum(
        site.dense_ms * (1.0 if setting is None else site.candidates[setting].ratio)
        for site, setting in zip(sites, choice, strict=True)
    )


def predicted_model_ms(search: Search, choice: Choice) -> float:
    """The predicted time of the model with a choice, in milliseconds for one input."""
    attention_ms = sum(site.dense_ms for site in search.sites)
    rest_ms = attention_ms / max(search.speedup_limit - 1, 1e-9)
    return rest_ms + predicted_attention_ms(search.sites, choice)


def cheapest(site: AttentionSite, price: float) -> Setting | None:
    """The cheapest setting at a price in milliseconds per squared error of one; None for dense attention."""
    best: Setting | None = None
    least = site.dense_ms
    for setting, measurement in usable(site).items():
        cost = site.dense_ms * measurement.ratio + price * error_of(site, setting) ** 2
        if cost < least:
            best = setting
            least = cost
    return best


def choose(sites: Sequence[AttentionSite], error: float) -> Choice:
    """The choice at the lowest price whose predicted error is within the limit."""
    low, high = PRICES
    best: Choice = tuple(cheapest_exact(site) for site in sites)
    if error <= 0:
        return best
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        choice = tuple(cheapest(site, 10**middle) for site in sites)
        if predicted_error(sites, choice) <= error:
            high = middle
            best = choice
        else:
            low = middle
    return best


def cheapest_exact(site: AttentionSite) -> Setting | None:
    """Exact attention, if it is faster than the original."""
    return next((setting for setting in usable(site) if setting.choice == "exact"), None)


def sites_of(sites: Sequence[AttentionSite], choice: Choice) -> list[AttentionSite]:
    """The call sites as they are reported for a choice, with times that were measured of single calls."""
    return [site_of(site, setting) for site, setting in zip(sites, choice, strict=True)]


def site_of(site: AttentionSite, setting: Setting | None) -> AttentionSite:
    """A call site with the chosen setting."""
    if setting is None:
        return chosen(site, site.measurement, site.reason or NOT_FASTER)
    measurement = site.candidates[setting]
    is_slow_in_batches = (
        measurement.batch_ratio is not None and measurement.batch_ratio > BATCH_GAIN
    )
    setting = replace(setting, most_batch=measurement.batch if is_slow_in_batches else None)
    setting_ms = site.dense_ms * measurement.ratio
    return chosen(
        site, replace(measurement, setting=setting, setting_ms=setting_ms, dense_ms=site.dense_ms)
    )


def exact_speedup(search: Search) -> float:
    """The predicted speedup of the model with exact attention alone, in the native kernel where it is faster."""
    exact = predicted_model_ms(search, choose(search.sites, 0.0))
    return predicted_model_ms(search, tuple(None for _ in search.sites)) / exact if exact else 1.0
