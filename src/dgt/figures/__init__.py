"""Figures of arrays and records: groups of queries and the keys they chose, label maps, detections,
a diagnosis.
"""

from dgt.figures.drawing import distinct_colours
from dgt.figures.groups import figure_contact_sheet, figure_group_map, figure_groups, figure_titled
from dgt.figures.io import png, raster, save_animation, save_figure
from dgt.figures.panel import GroupPanel, choose_groups, panels_of

__all__ = [
    "GroupPanel",
    "choose_groups",
    "distinct_colours",
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
