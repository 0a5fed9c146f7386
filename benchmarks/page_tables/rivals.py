"""Residual keys beside other methods: from times and errors, the smallest error at equal time, case by case."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

BUDGETS = (0.5, 0.25, 0.15)
"""Allowed time relative to PyTorch's dense attention."""
ROUNDING = 0.001
"""An error in percent below which only rounding differs."""
OURS = "residual keys"
MODEL = "model"
NO_RIVALS = (OURS, "dense")


class Point(NamedTuple):
    """A setting of a method in one case: its time, also relative to dense attention's, and its error."""

    method: str
    setting: dict[str, Any]
    ms: float
    share: float
    error: float


class Cell(NamedTuple):
    """One comparison: the best of each method, or None, for a size, layer (or "model"), and budget,
    relative and in milliseconds.
    """

    size: int
    layer: int | str
    budget: float
    ms: float
    best: dict[str, Point | None]

    @property
    def ours(self) -> float:
        """The error of residual keys; infinite if no setting is within the budget."""
        return self._error(OURS)

    @property
    def rival(self) -> str:
        """The best other method."""
        others = [name for name in self.best if name not in NO_RIVALS]
        return min(others, key=self._error)

    @property
    def theirs(self) -> float:
        """Its error."""
        return self._error(self.rival)

    @property
    def won(self) -> bool:
        """Whether residual keys are equal or better."""
        return self.ours <= self.theirs and math.isfinite(self.ours)

    def _error(self, name: str) -> float:
        point = self.best.get(name)
        return math.inf if point is None else point.error


def plain(setting: dict[str, Any]) -> str:
    """A setting without its engine, as a key."""
    return json.dumps({name: value for name, value in setting.items() if name != "engine"})


def mean_error(rows: list[dict[str, Any]]) -> float:
    """Root of the mean squared error over photographs."""
    return math.sqrt(sum(row["error"] ** 2 for row in rows) / len(rows))


def times_of(content: dict[str, Any], size: int) -> dict[tuple[str, str], dict[int, float]]:
    """Milliseconds by method and setting, then by layer, with the fastest engine."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in content["times"]:
        if row["size"] == size:
            layers = found.setdefault((row["method"], plain(row["setting"])), {})
            layers[row["layer"]] = min(row["ms"], layers.get(row["layer"], math.inf))
    return found


def dense_ms(content: dict[str, Any], size: int) -> float:
    """PyTorch's dense attention, in milliseconds."""
    return min(
        row["ms"]
        for row in content["times"]
        if row["size"] == size and row["method"] == "dense" and row["setting"]["engine"] == "torch"
    )


def ms_in_layer(times: dict[int, float], layer: int | str) -> float:
    """The time in a layer; if it was not timed there, the mean over the timed layers."""
    own = times.get(layer) if isinstance(layer, int) else None
    return own or sum(times.values()) / len(times)


def points(content: dict[str, Any], size: int, layer: int | str) -> list[Point]:
    """All methods and settings in one case that have both a time and an error.

    A method whose time does not depend on values was timed in one layer. The time of the model's
    attention is the mean over the timed layers; with windows, a third of the layers are dense.
    """
    times, whole = times_of(content, size), dense_ms(content, size)
    part = "model" if layer == MODEL else "errors"
    errors: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in content[part]:
        if row["size"] == size and row.get("layer", MODEL) == layer:
            errors.setdefault((row["method"], plain(row["setting"])), []).append(row)
    found = []
    photographs = max((len(rows) for rows in errors.values()), default=0)
    for (method, setting), rows in errors.items():
        layers = times.get((method, setting))
        if not layers or len(rows) < photographs:  # the study was stopped
            continue
        ms = ms_in_layer(layers, layer)
        if method == "windows" and layer == MODEL:
            ms = (2 * ms + min(times[("dense", "{}")].values())) / 3
        found.append(Point(method, rows[0]["setting"], ms, ms / whole, mean_error(rows)))
    return found


def cells(content: dict[str, Any]) -> list[Cell]:
    """All comparisons that the content allows."""
    found = []
    layers = [*content["settings"]["layers"], MODEL]
    for size in content["settings"]["sizes"]:
        if not any(row["size"] == size for row in content["times"]):
            continue
        for layer in layers:
            here = points(content, size, layer)
            for budget in BUDGETS if here else ():
                ms = budget * dense_ms(content, size)
                found.append(Cell(size, layer, budget, ms, best_within(here, budget)))
    return found


def best_within(here: list[Point], budget: float) -> dict[str, Point | None]:
    """For every method, the setting with the smallest error within a budget."""
    found: dict[str, Point | None] = {}
    for name in dict.fromkeys(point.method for point in here):
        within = [point for point in here if point.method == name and point.share <= budget]
        found[name] = min(within, key=lambda point: point.error, default=None)
    return found


def shown(point: Point | None) -> str:
    """An error in percent, as a table cell."""
    if point is None:
        return "-"
    percent = 100 * point.error
    if percent < ROUNDING:
        return "0"
    return f"{percent:.0f}" if percent >= 100 else f"{percent:.2g}"


def rows_of_table(found: list[Cell]) -> list[list[str]]:
    """Table headers, and one row per comparison: errors in percent, the smallest in bold.

    Exact attention stands first: where a kernel for it is within the time, nothing can beat it.
    """
    names = list(found[0].best) if found else []
    table = [["px", "layer", "time allowed", *names]]
    for cell in found:
        texts = [shown(cell.best.get(name)) for name in names]
        errors = [
            math.inf if (point := cell.best.get(name)) is None else point.error for name in names
        ]
        if math.isfinite(min(errors)):
            least = errors.index(min(errors))
            texts[least] = f"**{texts[least]}**"
        allowed = f"{100 * cell.budget:.0f} %, {cell.ms:.3g} ms"
        table.append([str(cell.size), str(cell.layer), allowed, *texts])
    return table
