"""Names of classes compared: labels mean what their names say, whatever their numbers are."""

import re
from collections.abc import Sequence
from functools import cache

from timm.data import ImageNetInfo

from dgt.utils.errors import UserError


def readable(name: str) -> str:
    """A class's name for people: a number of WordNet, as ImageNet's folders have it, with its noun.

    Example:
        >>> readable("n02102040")
        'English springer (n02102040)'
    """
    if re.fullmatch(r"n\d{8}", name) is None or name not in _wordnet().label_names():
        return name
    nouns = _wordnet().label_name_to_description(name, detailed=False)
    return f"{nouns.partition(',')[0]} ({name})"


@cache
def _wordnet() -> ImageNetInfo:
    return ImageNetInfo("imagenet22k")


def are_numbers(names: Sequence[str]) -> bool:
    """Whether names are only the classes' numbers: what a model or data set without names has."""
    return list(names) == [str(number) for number in range(len(names))]


def some(names: Sequence[str], count: int = 5) -> str:
    """The first few of some names, for a message."""
    return ", ".join([*names[:count], *(["..."] if len(names) > count else [])]) or "none"


def changes(before: Sequence[str], now: Sequence[str]) -> str:
    """What differs between two lists of names, in words."""
    gone = [name for name in before if name not in set(now)]
    new = [name for name in now if name not in set(before)]
    parts = [f"{some(gone)} gone"] if gone else []
    parts += [f"{some(new)} new"] if new else []
    kept = [name for name in now if name in set(before)]
    if kept != [name for name in before if name in set(now)]:
        parts.append("others in another order" if parts else "the same in another order")
    return "; ".join(parts)


def labels_by_name(data: Sequence[str], model: Sequence[str]) -> tuple[list[int], str]:
    """The model's label of each class of a data set, and a sentence on how they were found; empty
    where the names are the same.

    Where one of the two has only numbers for names, the order of the classes is taken.

    Raises:
        UserError: the data has classes that the model does not have, or has twice.
    """
    in_order = list(range(len(data)))
    if list(data) == list(model):
        return in_order, ""
    if are_numbers(model) and len(data) == len(model):
        return in_order, (
            f"the model has no names for its {len(model)} classes: those of the data are taken in "
            f"their order, {some(data)}"
        )
    if are_numbers(data) and not are_numbers(model) and len(data) <= len(model):
        return in_order, (
            f"the data has no names for its classes, only numbers: they are taken as the model's, "
            f"{some(model[: len(data)])}"
        )
    unknown = [name for name in data if name not in set(model)]
    twice = [name for name in data if list(model).count(name) > 1]
    if unknown or twice:
        theirs, ours = f"{len(data)} ({some(data)})", f"{len(model)} ({some(model)})"
        problem = f"the model does not know {some(unknown)}"
        if not unknown:
            problem = f"the model has several classes called {some(twice)}"
        raise UserError(
            f"the classes of the data and of the model differ: {theirs} in the data, {ours} in the "
            f"model; {problem}"
        )
    numbers = {name: label for label, name in enumerate(model)}
    return [numbers[name] for name in data], (
        f"labels go by the model's names of classes: the data has {len(data)} of its {len(model)}"
    )
