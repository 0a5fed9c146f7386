"""Tables of experiments as data: rows that change a recipe, with the numbers that the paper has
for them.

A table is a YAML file. `sizes` names the models it can be made with, the first by default, and the
recipe that trains them; every row has a name and, for each size, the recipe's keys that it changes:

```yaml
title: Blocks in the skeleton of DGT
paper: top-1 on ImageNet-1K, 300 epochs  # what the paper's numbers are
column: paper                            # whose they are: heads their column
diagnose: false                          # true: measure groups and selection after each training, too
sizes:
  nano: {recipe: cifar10_ablation, set: {model.args.stem_stride: 1}}
rows:
  - {name: DGT block, paper: 83.8, nano: {model.name: dgt_nano}}
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgt.runs.recipe import RECIPES, read_yaml, shipped_recipes
from dgt.runs.settings import plain_values
from dgt.utils.errors import UserError

TABLES = RECIPES / "tables"
KEYS = ("title", "paper", "column", "diagnose", "sizes", "rows")


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    name: str
    # keys of the recipe, with dots, and their values as the file has them
    changes: dict[str, Any] = field(default_factory=dict)
    paper: float | None = None  # the paper's number, as printed

    @property
    def slug(self) -> str:
        """The name as the name of a folder."""
        return "-".join(
            "".join(letter if letter.isalnum() else " " for letter in self.name.lower()).split()
        )


@dataclass(frozen=True)
class Table:
    """A table at one size of its models: what the file says, and for all rows the recipe and what
    they share of it.
    """

    name: str
    title: str
    size: str
    recipe: str
    rows: tuple[Row, ...]
    common: dict[str, Any]
    paper: str | None
    column: str
    diagnose: bool

    def changes(self, row: Row) -> dict[str, Any]:
        """The values of keys that one row has, its own before those of the whole size."""
        return {**self.common, **row.changes}


def tables_text() -> str:
    """The shipped tables with their titles, sizes and rows, human-readable."""
    lines = []
    for name in shipped_recipes(TABLES):
        values = read_yaml("table", name, TABLES)[1]
        rows = "; ".join(row["name"] for row in values["rows"])
        lines += [f"{name:<18}{values['title']} ({', '.join(values['sizes'])})", f"{'':<18}{rows}"]
    return "\n".join(lines)


def load_table(table: str | Path, size: str | None = None) -> Table:
    """Read a table at one of its sizes.

    Args:
        table: name of a shipped table, or path of a YAML file.
        size: which of the table's sizes; None for its first.

    Raises:
        FileNotFoundError: there is no such table.
        UserError: it is no YAML, something is missing or misplaced in it, or it does not have the
            size.
    """
    path, values = read_yaml("table", table, TABLES)
    name = path.stem
    unknown = sorted(set(values) - set(KEYS), key=str)
    if unknown:
        raise UserError(
            f"table {name!r} has an unknown key {unknown[0]!r}; known are {', '.join(KEYS)}"
        )
    sizes = _mapping(values.get("sizes"), f"sizes of table {name!r}")
    if size is None:
        size = next(iter(sizes))
    if size not in sizes:
        raise UserError(f"size must be one of {', '.join(sizes)} for table {name!r}, got {size!r}")
    chosen = _mapping(sizes[size], f"size {size!r} of table {name!r}")
    if not isinstance(chosen.get("recipe"), str):
        raise UserError(
            f"size {size!r} of table {name!r} must name a recipe, got {chosen.get('recipe')!r}"
        )
    return Table(
        name=name,
        title=str(values.get("title", name)),
        size=size,
        recipe=str(chosen["recipe"]),
        rows=_load_rows(name, values.get("rows"), size, list(sizes)),
        common=_mapping(chosen.get("set", {}), f"set of size {size!r} of {name!r}", least=0),
        paper=plain_values(values.get("paper")),
        column=str(values.get("column", "paper")),
        diagnose=bool(plain_values(values.get("diagnose", False))),
    )


def _load_rows(name: str, entries: Any, size: str, sizes: list[str]) -> tuple[Row, ...]:
    """The rows of the table `name` at a size; UserError unless it is a list of rows with different names."""
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f"rows of table {name!r} must be a list of at least one row, got {entries!r}"
        )
    keys = ("name", "paper", *sorted(sizes))
    rows = []
    for entry in entries:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or set(entry) - set(keys)
        ):
            raise UserError(
                f"a row of table {name!r} must be a mapping of {', '.join(keys)}, got {entry!r}"
            )
        paper = plain_values(entry.get("paper"))
        if not isinstance(paper, int | float | None):
            raise UserError(
                f"paper of row {entry['name']!r} of table {name!r} must be a number, got {paper!r}"
            )
        changes = _mapping(
            entry.get(size), f"size {size!r} of row {entry['name']!r} of table {name!r}", least=0
        )
        rows.append(Row(str(entry["name"]), changes, paper))
    if len({row.slug for row in rows}) < len(rows):
        raise UserError(
            f"rows of table {name!r} must have different names, got {[row.name for row in rows]}"
        )
    return tuple(rows)


def _mapping(value: Any, what: str, least: int = 1) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) < least:
        raise UserError(f"{what} must be a mapping of keys, got {value!r}")
    return value
