"""Plans as JSON: the one place that knows the keys of their files, which differ from names in code."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from dgt.acceleration.prefix_tokens import FrameTokens, PrefixTokens
from dgt.acceleration.search import check_prefix_tokens
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement
from dgt.utils.errors import UserError

FORMAT = "dgt-plan-2"
KEYS = {"speedup_limit": "bound", "compared_output": "measured"}  # of a report's fields
CHOICES = ("dense", "exact", "groups")


def to_json(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report's fields as JSON values."""
    values = {KEYS.get(name, name): value for name, value in report.items()}
    return values | {"layers": [as_row(site) for site in report["layers"]]}


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a report. Raises as :func:`read_row`."""
    names = {key: name for name, key in KEYS.items()}
    report = {names.get(key, key): value for key, value in values.items()}
    return report | {"layers": read_rows(values["layers"])}


def as_row(site: AttentionSite) -> dict[str, Any]:
    """A call site as it stands in a plan."""
    prefix = site.prefix_tokens
    return {
        "name": site.name,
        "calls": site.calls,
        "heads": site.heads,
        "tokens": site.tokens,
        "key_tokens": site.key_tokens,
        "sizes_vary": site.sizes_vary,
        "channels": site.channels,
        "sequences": site.sequences,
        "prefix": site.num_prefix_tokens,
        "positions": list(prefix) if isinstance(prefix, Sequence) else None,
        "frame": [prefix.count, prefix.period] if isinstance(prefix, FrameTokens) else None,
        "choice": site.setting.choice,
        "groups": site.setting.groups,
        "keys": site.setting.keys,
        "residual_keys": site.setting.residual_keys,
        "first_order": site.setting.first_order,
        "least_tokens": site.setting.least_tokens,
        "most_batch": site.setting.most_batch,
        "where_faster": site.setting.where_faster,
        "allowed_error": site.setting.allowed_error,
        "error": site.measurement.error,
        "ms_before": site.measurement.dense_ms,
        "ms_after": site.measurement.setting_ms,
        "breadth": site.breadth,
        "reason": site.reason,
        "note": site.note,
    }


def read_rows(rows: Iterable[dict[str, Any]]) -> list[AttentionSite]:
    """The call sites of a plan, a module each.

    Plans of before have a row for each call of a module: the most careful one is for all of them,
    and a warning says so.
    """
    by_module: dict[str, list[AttentionSite]] = {}
    for row in rows:
        site = read_row(**row)
        by_module.setdefault(site.name, []).append(site)
    return [most_careful(of_module) for of_module in by_module.values()]


def most_careful(sites: Sequence[AttentionSite]) -> AttentionSite:
    """Of call sites of one module the one that leaves the least error: in its original attention, or
    else in exact, or else with the most keys; its guard allows what all of them allow.
    """
    if len(sites) == 1:
        return sites[0]
    careful = min(sites, key=lambda site: (CHOICES.index(site.setting.choice), -site.setting.keys))
    warnings.warn(
        f"the plan has settings for each of the {len(sites)} calls of {careful.name!r}, which now "
        f"share one: {careful.setting}",
        RuntimeWarning,
        stacklevel=2,
    )
    allowed = [site.setting.allowed_error for site in sites if site.setting.choice == "groups"]
    bounds = [error for error in allowed if error is not None]
    setting = replace(careful.setting, allowed_error=min(bounds, default=None))
    measurement = replace(careful.measurement, setting=setting)
    return replace(careful, calls=len(sites), measurement=measurement)


def read_row(
    name: str,
    choice: str,
    prefix: int = 0,
    positions: list[int] | None = None,
    frame: list[int] | None = None,
    error: float = 0.0,
    ms_before: float = 0.0,
    ms_after: float = 0.0,
    call: int = 0,
    **values: Any,
) -> AttentionSite:
    """A call site from a row of a plan. Raises ValueError for one that makes no sense."""
    if choice not in CHOICES:
        raise UserError(f"the choice of {name!r} is {choice!r}")
    of_setting = {field.name for field in fields(Setting)} & values.keys()
    setting = Setting(choice, **{key: values.pop(key) for key in of_setting})
    prefix_tokens: PrefixTokens = prefix if positions is None else positions
    site = AttentionSite(
        name,
        prefix_tokens=prefix_tokens if frame is None else FrameTokens(*frame),
        measurement=Measurement(
            setting,
            setting_ms=ms_after,
            dense_ms=ms_before,
            squared_error=error**2,
            squared_norm=1.0,
        ),
        **values,
    )
    least = 1 if choice == "groups" else 0
    counts = {
        **{key: (getattr(site, key), least) for key in ("heads", "tokens", "key_tokens")},
        **{key: (getattr(site, key), least) for key in ("channels", "calls")},
        **{key: (getattr(setting, key), least) for key in ("groups", "keys")},
        **{key: (getattr(setting, key), 0) for key in ("residual_keys", "least_tokens")},
        "call": (call, 0),
        "prefix": (prefix, 0),
    }
    if setting.most_batch is not None:
        counts["most_batch"] = (setting.most_batch, 1)
    check_prefix_tokens(site.prefix_tokens)
    allowed = setting.allowed_error
    if allowed is not None and not (isinstance(allowed, float) and 0 < allowed < math.inf):
        raise UserError(f"allowed_error of {name!r} is {allowed!r}")
    flags = {
        "where_faster": setting.where_faster,
        "sizes_vary": site.sizes_vary,
        "first_order": setting.first_order,
    }
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{key} of {name!r} is {flag!r}")
    for key, (count, smallest) in counts.items():
        if not is_count(count, smallest):
            raise UserError(f"{key} of {name!r} is {count!r}")
    return site


def is_count(value: Any, least: int) -> bool:
    """Whether a value is an integer of at least this size."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
