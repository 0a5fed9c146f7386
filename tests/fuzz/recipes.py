"""Recipes as people write them: a valid one with a key changed, added, dropped, misspelled, or its text corrupted."""

from __future__ import annotations

import random
import string
from typing import Any

import yaml

from dgt.runs.recipe import load_recipe, shipped_recipes

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    10**9,
    10**30,
    0.0,
    0.5,
    -0.1,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "auto",
    "none",
    "null",
    "0",
    "-1",
    "1e-3",
    "dgt_tiny",
    "dgt_nano",
    "../..",
    "\0",
    "ä\u202e",
    "x" * 3000,
    [],
    [1],
    [0.5, 0.5, 0.5],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {"a": {"b": [None]}},
)


def recipe_text(seed: int) -> tuple[bytes, str]:
    """A recipe file and what was done to it; the same for the same seed."""
    draw = random.Random(seed)
    values = load_recipe(
        draw.choice(shipped_recipes()), ["--data.root", "images"] if seed % 2 else []
    ).to_dict()
    del values["name"]
    told = []
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        told.append(_change(values, draw))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode(
        "utf-8", "surrogatepass"
    )
    if draw.random() < 0.25:
        told.append("corrupted text")
        text = _corrupt(text, draw)
    return text, "; ".join(told)


def _change(values: dict[str, Any], draw: random.Random) -> str:
    """Change one of the nested values in place; returns a description."""
    section, path = values, ""
    while True:
        key = draw.choice(list(section) or ["new"])
        path = f"{path}.{key}" if path else key
        if isinstance(section.get(key), dict) and section[key] and draw.random() < 0.8:
            section = section[key]
            continue
        break
    kind = draw.choice(["value", "value", "value", "value", "drop", "misspell", "add", "number"])
    if kind == "drop":
        section.pop(key, None)
    elif kind == "misspell":
        name = str(key)
        at = draw.randrange(len(name) + 1)
        section[name[:at] + draw.choice(string.ascii_lowercase) + name[at:]] = section.pop(key, 1)
    elif kind == "add":
        section[draw.choice(["more", "", "a.b", 3, None, "model"])] = draw.choice(VALUES)
    elif kind == "number" and isinstance(section.get(key), int | float):
        section[key] = section[key] * draw.choice([-1, 0, 0.5, 3, 1e6])
    else:
        section[key] = draw.choice(VALUES)
    return f"{kind} {path}"


def _corrupt(text: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(text))
    kind = draw.randrange(5)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + draw.randbytes(draw.choice([1, 4, 60])) + text[at:]
    if kind == 2:
        return (
            text[:at]
            + draw.choice(
                [b"\t", b": ", b"- ", b"{", b"[", b"&a ", b"*a", b"!!python/object:os.system "]
            )
            + text[at:]
        )
    if kind == 3:
        return draw.randbytes(200)
    return text.replace(b":", draw.choice([b"", b"=", b"::"]), draw.choice([1, 3]))
