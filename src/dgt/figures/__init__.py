"""Figures of arrays and records: groups of queries and the keys they chose, label maps, detections,
a diagnosis.

Names are loaded when they are used: what draws no figure needs no matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgt.figures.colors import distinct_colors, png
    from dgt.figures.groups import (
        figure_contact_sheet,
        figure_group_map,
        figure_groups,
        figure_titled,
    )
    from dgt.figures.io import raster, save_animation, save_figure
    from dgt.figures.panel import GroupPanel, choose_groups, panels_of

MODULES = {
    "GroupPanel": "panel",
    "choose_groups": "panel",
    "distinct_colors": "colors",
    "figure_contact_sheet": "groups",
    "figure_group_map": "groups",
    "figure_groups": "groups",
    "figure_titled": "groups",
    "panels_of": "panel",
    "png": "colors",
    "raster": "io",
    "save_animation": "io",
    "save_figure": "io",
}

__all__ = [
    "GroupPanel",
    "choose_groups",
    "distinct_colors",
    "figure_contact_sheet",
    "figure_group_map",
    "figure_groups",
    "figure_titled",
    "panels_of",
    "png",
    "raster",
    "save_animation",
    "save_figure",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
