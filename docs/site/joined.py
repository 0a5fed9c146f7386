"""How the pages of the API read docstrings: `key, value: TEXT` names two parameters, roles of Sphinx are code, and a
section "Example", which the parser would take for a note, is code as well.
"""

import re
from typing import Any

import griffe

TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Joined(griffe.Extension):
    """Change docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a function or class."""
        if obj.docstring:
            text = EXAMPLE.sub(r"\1Examples:", TOGETHER.sub(apart, obj.docstring.value))
            obj.docstring.value = ROLE.sub(r"`\1`", text)


def apart(found: re.Match[str]) -> str:
    """`key, value: TEXT` as a line for each."""
    return "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", "))
