"""Recipes as files: where they are, what they take from each other, and which keys there are.

This module imports neither PyTorch nor the package `dgt`, so that the command can refuse a wrong
key at once; whether a value is right is checked by `dgt.runs.recipe`, which reads its files through
here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "dgt" / "recipes"
TABLES = RECIPES / "tables"
KEYS = RECIPES / "keys.json"
"""For each task all keys of its recipes with their defaults; `tools/recipe_keys.py` writes it."""
NOT_INHERITED = ("name", "out")  # a recipe's own, never those of its base


class RecipeFileError(ValueError):
    """What is wrong with the file of a recipe or a table, in one sentence."""


def shipped(folder: Path = RECIPES) -> list[str]:
    """Names of the recipes in the package, or of the YAML files of another folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find_file(
    what: str, name: str | Path, folder: Path = RECIPES, others: Sequence[str] = ()
) -> Path:
    """Find the file of a recipe or a table.

    Args:
        what: "recipe" or "table", for the message.
        name: name of one shipped in `folder`, or path of a YAML file.
        folder: where the shipped ones are.
        others: further names that a message may propose.

    Raises:
        FileNotFoundError: it is neither; the message proposes names.
    """
    path = Path(name)
    if path.is_file():
        return path
    if str(name) in shipped(folder):
        return folder / f"{name}.yaml"
    known = sorted([*shipped(folder), *others])
    hint = did_you_mean(str(name), known)
    expected = f"expected one of {', '.join(known)}, or the path of a YAML file"
    raise FileNotFoundError(f"there is no {what} {str(name)!r}: {hint}{expected}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The start of a hint with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def read_yaml(what: str, path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file.

    Raises:
        RecipeFileError: it is not YAML in UTF-8, or holds no mapping.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeFileError(f"{what} {str(path)!r} is not valid UTF-8 YAML: {reason}") from error
    if not isinstance(values, dict | None):
        raise RecipeFileError(
            f"{what} {str(path)!r} must be a mapping of keys, got {type(values).__name__}"
        )
    return values or {}


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """Read the nested values of a recipe with those of its bases.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.

    Raises:
        FileNotFoundError: as `find_file`, for the recipe or a base.
        RecipeFileError: as `read_yaml`; or the recipe is its own base.
    """
    path = find_file("recipe", recipe)
    values = read_yaml("recipe", path)
    seen = {path.resolve()}
    while "base" in values:
        base = str(values.pop("base"))
        beside = path.parent / base
        path = find_file("recipe", beside if base.endswith((".yaml", ".yml")) else base)
        if path.resolve() in seen:
            raise RecipeFileError(
                f"recipe {str(recipe)!r} has itself as a base, through {str(path)!r}"
            )
        seen.add(path.resolve())
        below = read_yaml("recipe", path)
        inherited = {key: value for key, value in below.items() if key not in NOT_INHERITED}
        values = _merged(inherited, values)
    return {"name": Path(recipe).stem, **values}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above` in place of its own, section by section.

    An empty one inherits nothing.
    """
    merged = {**below, **above}
    for key, value in above.items():
        inherited = below.get(key)
        if value and isinstance(value, Mapping) and isinstance(inherited, Mapping):
            merged[key] = _merged(inherited, value)
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by the keys of a command line.

    Example:
        >>> flatten({"a": {"b": 1}})
        {'a.b': 1}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def override_keys(words: Sequence[str]) -> set[str]:
    """The recipe keys that the words of a command line set.

    Example:
        >>> sorted(override_keys(["--a.b", "1", "--c=2"]))
        ['a.b', 'c']
    """
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


def known_keys(task: str | None) -> dict[str, Any] | None:
    """All keys of a task's recipes with their defaults.

    Args:
        task: None for those of all tasks.

    Returns:
        Defaults by flat key; None for an unknown task.
    """
    keys_of_tasks: dict[str, dict[str, Any]] = json.loads(KEYS.read_text(encoding="utf-8"))
    if task is not None:
        return keys_of_tasks.get(task)
    merged: dict[str, Any] = {}
    for keys in keys_of_tasks.values():
        merged |= keys
    return merged


def wrong_key(given: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """Find the first key that is not known, or has a value where a section belongs.

    Args:
        given: values by flat key, as `flatten` returns them; {} for a key whose value is not to be
            looked at.
        known: defaults by flat key; a key whose default is a mapping takes any keys below it.

    Returns:
        What is wrong, in a sentence; None if nothing is.
    """
    open_sections = tuple(
        f"{key}." for key, default in known.items() if isinstance(default, Mapping)
    )
    for key, value in given.items():
        is_section = any(name.startswith(f"{key}.") for name in known)
        if is_section and not isinstance(value, Mapping):
            return f"recipe key {key!r} must be a section of keys, got {value!r}"
        if not (is_section or key in known or key.startswith(open_sections)):
            return unknown_key(key, known)
    return None


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence on a key that does not exist, with the most similar ones."""
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.75)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else "`dgt train RECIPE --help` lists all keys"
    )
    return f"unknown recipe key {key!r}; {hint}"
