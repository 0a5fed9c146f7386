"""The paper's figures: which queries form a group, and which keys that group chose, drawn over the image.

`dgt.figures.visualize` (`dgt visualize`) is not imported here: it needs the training library.
"""

from dgt.figures.drawing import distinct_colours
from dgt.figures.files import save_animation, save_figure
from dgt.figures.groups import figure_contact_sheet, figure_group_map, figure_groups
from dgt.figures.panel import GroupPanel, choose_groups, denormalize

__all__ = [
    "GroupPanel",
    "choose_groups",
    "denormalize",
    "distinct_colours",
    "figure_contact_sheet",
    "figure_group_map",
    "figure_groups",
    "save_animation",
    "save_figure",
]
