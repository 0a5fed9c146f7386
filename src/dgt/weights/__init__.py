"""Trained weights with their story: folders that say what is in them, where they are found, how
they are checked.
"""

from dgt.weights.folder import (
    SHIPPED,
    check_sums,
    check_weights,
    default_models,
    find_weights,
    list_weights,
    weights_line,
)

__all__ = [
    "SHIPPED",
    "check_sums",
    "check_weights",
    "default_models",
    "find_weights",
    "list_weights",
    "weights_line",
]
