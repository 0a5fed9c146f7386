"""Errors that say to the user what is wrong, as classes, and the package's logger.

The `dgt` command prints an error of these classes as one sentence; any other is a bug and shows its
traceback. Files that are missing, in the way or unwritable are Python's own `OSError`s, which it
prints in the same way.
"""

import logging

LOGGER = logging.getLogger("dgt")


class UserError(ValueError):
    """Something that the user gave, in a sentence: which argument, what was expected, what came."""


class NonFiniteInput(UserError):
    """NaN where numbers are needed.

    In a training it comes of diverging weights, not of the caller.
    """


class LostProcess(RuntimeError):
    """Another process that this one needs is gone."""


class Disagreement(RuntimeError):
    """A result that differs from what it is checked against: it is neither written nor timed."""


def check_range(
    low: float, high: float | None = None, *, section: str | None = None, **values: float | None
) -> None:
    """Raise UserError for a value below `low` or above `high`.

    Args:
        low: smallest allowed value.
        high: largest allowed value; None for no limit.
        section: the recipe's section that the values come from, such as "data": the error then
            names the key as it is written in a recipe, such as "data.batch_size".
        values: by argument name; None is always allowed.
    """
    for argument, value in values.items():
        name = f"{section}.{argument}" if section else argument
        if value is not None and not (low <= value and (high is None or value <= high)):
            expected = f"be at least {low}" if high is None else f"lie in [{low}, {high}]"
            raise UserError(f"{name} must {expected}, got {value}")
