"""Numbers of the text, each behind its name in the mark of a page."""

from __future__ import annotations

import re
from typing import Any

from tables_shared import TABLES, number_of_text, read

from dgt.experiments.report import number


def cell(table: str, row: str, column: str, which: str = "") -> str:
    """A cell of a table, by its row's first cell and its column's head; `which`: the first number in it, second..."""
    heads, *rows = TABLES[table]()
    found = next((cells for cells in rows if _plain(cells[0]) == row), None)
    if found is None or column not in heads:
        raise KeyError(f"{table} has no row {row!r} or no column {column!r}")
    text = _plain(found[heads.index(column)])
    return re.findall(r"[-+]?\d[\d.,]*(?: ± [\d.]+)?", text)[int(which) - 1] if which else text


def value(file: str, path: str, places: str = "0", by: str = "1") -> str:
    """A number of a JSON: keys of objects, places in lists or KEY=VALUE&... of one of their rows, with / between."""
    found: Any = read(file)
    for step in path.split("/"):
        if isinstance(found, dict):
            found = found[step]
        elif step.isdigit():
            found = found[int(step)]
        else:
            wanted = dict(part.split("=", 1) for part in step.split("&"))
            rows = [row for row in found if all(str(row.get(key)) == text for key, text in wanted.items())]
            if len(rows) != 1:
                raise KeyError(f"{file}.json has {len(rows)} rows with {step}")
            found = rows[0]
    return number(found, int(places), float(by))


def _plain(text: str) -> str:
    return text.strip("*`")


@number_of_text
def faster(case: str, key: str = "ratio") -> str:
    """How many times faster the attention is than over all keys, by the case's beginning (`B1 H2 L3136`)."""
    (row,) = (row for row in read("attention_cpu")["rows"] if row["case"].startswith(case + " "))
    return number(row[key], 1)
