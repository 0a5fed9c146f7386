"""Modules are set anew, whatever their memory holds: after ``to_empty``, or to train from the start again."""

from torch import nn


def reset_parts(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every module inside of one that has it."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None and part is not module:
            reset()
