"""Names of classes compared: labels mean what their names say, whatever their numbers are."""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

from timm.data import ImageNetInfo

from dgt.utils.errors import UserError


def readable(name: str) -> str:
    """A class's name for people: a number of WordNet, as ImageNet's folders have it, with its noun; bytes
    of a folder's name that are no UTF-8 are escaped.

    Example:
        >>> readable("n02102040")
        'English springer (n02102040)'
    """
    if re.fullmatch(r"n\d{8}", name) is None or name not in _wordnet().label_names():
        return encodable(name)
    nouns = _wordnet().label_name_to_description(name, detailed=False)
    return f"{nouns.partition(',')[0]} ({name})"


def encodable(name: str) -> str:
    """A name as text that UTF-8 can hold: other bytes, which names of files may have, are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


@cache
def _wordnet() -> ImageNetInfo:
    return ImageNetInfo("imagenet22k")


def are_numbers(names: Sequence[str]) -> bool:
    """Whether names are only the classes' numbers: what a model or data set without names has."""
    return list(names) == [str(number) for number in range(len(names))]


def composed(name: str) -> str:
    """A name with its accents composed (NFC): file systems and programs write the same name either
    way.
    """
    return unicodedata.normalize("NFC", name)


def comparable(*lists: Sequence[str]) -> list[list[str]]:
    """Lists of names as they are compared: composed, and where all names of all lists are numbers,
    without leading zeros, unless two names of a list would become one.
    """
    written = [[composed(name) for name in names] for names in lists]
    if not all(is_number(name) for names in written for name in names):
        return written
    numbers = [[str(int(name)) for name in names] for names in written]
    is_unique = all(
        len(set(short)) == len(set(long)) for short, long in zip(numbers, written, strict=True)
    )
    return numbers if is_unique else written


def is_number(name: str) -> bool:
    """Whether a name is digits alone."""
    return name.isascii() and name.isdigit()


def some(names: Sequence[str], count: int = 5) -> str:
    """The first few of some names, for a message."""
    return ", ".join([*names[:count], *(["..."] if len(names) > count else [])]) or "none"


def note_on_alike(names: Sequence[str]) -> list[str]:
    """A sentence on classes whose names differ only in case, or in spaces around them, as one class has
    them after folders or files were joined; or nothing.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(composed(name).strip().casefold(), []).append(name)
    several = [" and ".join(map(repr, group)) for group in alike.values() if len(group) > 1]
    if not several:
        return []
    return [
        f"classes differ only in case or in spaces, and are classes of their own: {some(several)}"
    ]


def changes(before: Sequence[str], now: Sequence[str]) -> str:
    """What differs between two lists of names, in words; nothing where they are the same but for
    how they are composed.
    """
    before = [composed(name) for name in before]
    now = [composed(name) for name in now]
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

    Names are compared as `comparable` has them. Where none of the data's is one of the model's, and
    either has no names at all, only the numbers from 0 on, these are the labels.

    Raises:
        UserError: the data has classes that the model does not have, or has twice.
    """
    ours, theirs = comparable(data, model)
    known = set(theirs)
    in_order = list(range(len(data)))
    if ours == theirs:
        return in_order, ""
    unknown = [name for name, key in zip(data, ours, strict=True) if key not in known]
    if len(unknown) == len(data):  # no name says anything
        if are_numbers(model) and len(data) == len(model) and not all(map(is_number, data)):
            return in_order, (
                f"the model has no names for its {len(model)} classes: those of the data are taken "
                f"in their order, {some(data)}"
            )
        numbers = [int(name) for name in data if is_number(name)]
        has_only_numbers = sorted(numbers) == in_order and not any(map(is_number, model))
        if has_only_numbers and len(data) <= len(model):
            return numbers, (
                f"the data has no names for its classes, only numbers: they are taken as the model's, "
                f"{some(model[: len(data)])}"
            )
    twice = [name for name, key in zip(data, ours, strict=True) if theirs.count(key) > 1]
    if unknown or twice:
        in_data, in_model = f"{len(data)} ({some(data)})", f"{len(model)} ({some(model)})"
        problem = f"the model does not know {some(unknown)}"
        if not unknown:
            problem = f"the model has several classes called {some(twice)}"
        raise UserError(
            f"the classes of the data and of the model differ: {in_data} in the data, {in_model} in the "
            f"model; {problem}"
        )
    label_of = {key: label for label, key in enumerate(theirs)}
    return [label_of[key] for key in ours], (
        f"labels go by the model's names of classes: the data has {len(data)} of its {len(model)}"
    )
