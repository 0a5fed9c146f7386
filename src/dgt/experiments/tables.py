"""Tables of experiments as data: rows that change a recipe, beside the numbers that the paper has for them.

A table is a YAML file. `sizes` names the models it can be made with, the first by default, and the recipe that trains
them; every row has a name and, for each size, the recipe's keys that it changes:

```yaml
title: Blocks in the skeleton of DGT
paper: top-1 on ImageNet-1K, 300 epochs  # what the numbers beside are
column: paper                            # whose they are: heads their column
diagnose: false                          # true: measure groups and selection after each training, too
sizes:
  nano: {recipe: cifar10_ablation, set: {model.args.stem_stride: 1}}
rows:
  - {name: DGT block, paper: 83.8, nano: {model.name: dgt_nano}}
```
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dgt.utils.errors import UserError

KEYS = ("title", "paper", "column", "diagnose", "sizes", "rows")


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        name: what it is called.
        changes: keys of the recipe, with dots, and the values the row gives them.
        paper: the paper's number, as printed; None where it has none.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    paper: float | None = None

    @property
    def slug(self) -> str:
        """The name as the name of a folder."""
        words = "".join(letter if letter.isalnum() else " " for letter in self.name.lower()).split()
        return "-".join(words)


@dataclass(frozen=True)
class Table:
    """A table at one size of its models.

    Args:
        name: file name without its ending.
        title: what is compared.
        size: name of the size.
        recipe: what trains every row: name of a shipped recipe, or path of a YAML file.
        rows: at least one; their names differ.
        common: changes of the recipe that all rows of this size share.
        paper: what the paper's numbers are; None where it has none.
        column: whose those numbers are: the head of their column.
        diagnose: whether groups and selection are measured after each training.
    """

    name: str
    title: str
    size: str
    recipe: str
    rows: tuple[Row, ...]
    common: dict[str, Any] = field(default_factory=dict)
    paper: str | None = None
    column: str = "paper"
    diagnose: bool = False

    def overrides(self, row: Row) -> list[str]:
        """The changes of one row, those of the whole size before its own, as words of a command line."""
        return [f"--{key}={_word(value)}" for key, value in {**self.common, **row.changes}.items()]


def shipped_tables() -> list[str]:
    """Names of the tables inside the package, sorted."""
    folder = resources.files("dgt.recipes") / "tables"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def tables_text() -> str:
    """The shipped tables with their titles, sizes and rows, for people."""
    lines = []
    for name in shipped_tables():
        values = yaml.safe_load(_read(name)[1])
        rows = "; ".join(row["name"] for row in values["rows"])
        lines += [f"{name:<18}{values['title']} ({', '.join(values['sizes'])})", f"{'':<18}{rows}"]
    return "\n".join(lines)


def load_table(table: str | Path, size: str | None = None) -> Table:
    """Read a table.

    Args:
        table: name of a shipped table, or path of a YAML file.
        size: name of one of its sizes; None for its first.

    Raises:
        FileNotFoundError: neither a shipped table nor a file.
        ValueError: not YAML, something missing or misplaced in it, or a size it does not have.
    """
    name, text = _read(table)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"table {str(table)!r} is not valid YAML: {' '.join(str(error).split())}") from error
    values = _mapping(values, f"table {name!r}")
    unknown = sorted(set(values) - set(KEYS))
    if unknown:
        raise UserError(f"table {name!r} has an unknown key {unknown[0]!r}; it takes {', '.join(KEYS)}")
    sizes = _mapping(values.get("sizes"), f"sizes of table {name!r}")
    size = next(iter(sizes)) if size is None else size
    if size not in sizes:
        raise UserError(f"size must be one of {', '.join(sizes)} for table {name!r}, got {size!r}")
    chosen = _mapping(sizes[size], f"size {size!r} of table {name!r}")
    if not isinstance(chosen.get("recipe"), str):
        raise UserError(f"size {size!r} of table {name!r} must name a recipe, got {chosen.get('recipe')!r}")
    return Table(
        name=name,
        title=str(values.get("title", name)),
        size=size,
        recipe=chosen["recipe"],
        rows=_rows(name, values.get("rows"), size, set(sizes)),
        common=dict(chosen.get("set") or {}),
        paper=values.get("paper"),
        column=str(values.get("column", "paper")),
        diagnose=bool(values.get("diagnose", False)),
    )


def _rows(table: str, entries: Any, size: str, sizes: set[str]) -> tuple[Row, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise UserError(f"rows of table {table!r} must be a list of at least one row, got {entries!r}")
    rows = []
    for entry in entries:
        values = _mapping(entry, f"every row of table {table!r}")
        name, paper = values.get("name"), values.get("paper")
        unknown = sorted(set(values) - {"name", "paper"} - sizes)
        if not isinstance(name, str) or unknown:
            keys = ", ".join(("name", "paper", *sorted(sizes)))
            raise UserError(f"a row of table {table!r} must be a mapping of {keys}, got {entry!r}")
        if paper is not None and not isinstance(paper, int | float):
            raise UserError(f"paper of row {name!r} of table {table!r} must be a number, got {paper!r}")
        changes = _mapping(values.get(size), f"size {size!r} of row {name!r} of table {table!r}", empty=True)
        rows.append(Row(name, changes, paper))
    if len({row.slug for row in rows}) < len(rows):
        raise UserError(f"rows of table {table!r} must have different names, got {[row.name for row in rows]}")
    return tuple(rows)


def _mapping(value: Any, what: str, empty: bool = False) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not (value or empty):
        raise UserError(f"{what} must be a mapping of keys, got {value!r}")
    return dict(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(table: str | Path) -> tuple[str, str]:
    path = Path(table)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no table file {str(table)!r}")
        try:
            return path.stem, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"table {str(table)!r} is not a text in UTF-8: {error}") from error
    shipped = shipped_tables()
    if str(table) not in shipped:
        near = difflib.get_close_matches(str(table), shipped, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise FileNotFoundError(
            f"there is no table {str(table)!r}: {hint}shipped are {', '.join(shipped)}; "
            "any other is the path of a YAML file"
        )
    return str(table), (resources.files("dgt.recipes") / "tables" / f"{table}.yaml").read_text(encoding="utf-8")
