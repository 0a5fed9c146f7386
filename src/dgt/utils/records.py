"""What goes into the record of a measurement: processor, versions, command, and numbers laid out as
a table; and the file it is written to.
"""

import json
import math
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dgt.utils.atomic_write import atomic_write, json_text

LONGEST_NUMBERS = 60  # characters: a cell with more is text, and its column is aligned left
DIGITS = 7  # of the numbers in a file; with six, some cells of our tables would be rounded twice
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Half of a 95 % interval in standard errors, by degrees of freedom, from 1 on."""


def processor() -> str:
    """Name the GPU, or else the processor, with the family and model by which generations of one
    name differ.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)", text, re.M))
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


def command_line() -> str:
    """The command that started this process, as one would type it again."""
    program = sys.argv[0]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    if module and module != "dgt":
        start = ["python", "-m", module]
    elif module or not program.endswith(".py"):
        start = ["dgt"]
    else:
        start = ["python", program]
    return shlex.join([*start, *sys.argv[1:]])


def write_record(path: str | Path, content: dict[str, Any] | list[Any]) -> None:
    """Write the record of a measurement as `record_text` lays it out, whole or not at all.

    Raises OSError, naming `path`, where it cannot be written.
    """
    atomic_write(path, record_text(content))


def write_row(path: Path, key: dict[str, Any], found: dict[str, Any]) -> None:
    """Add a row to the record of rows in a file, or replace that of the same key.

    Args:
        path: of the file, which may not be there yet.
        key: what tells rows apart, by name.
        found: the rest of the row.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    others = [row for row in rows if {name: row[name] for name in key} != key]
    write_record(path, {"rows": [*others, {**key, **found}]})


def record_text(content: dict[str, Any] | list[Any]) -> str:
    """A record as JSON for people and for `git diff`: a row a line, numbers with seven digits.

    Each member of the record has a line or, where it holds lists or objects, a line for each of
    these. null stands for NaN and infinities.
    """
    plain = json.loads(json_text(content), parse_float=_short)
    return _spread(plain, "", _rows) + "\n"


def _short(digits: str) -> float:
    return float(f"{float(digits):.{DIGITS}g}")


def _rows(member: Any) -> str:
    """A member of a record: on one line, unless it holds lists or objects."""
    inner = member.values() if isinstance(member, dict) else member
    if isinstance(member, dict | list) and any(isinstance(each, dict | list) for each in inner):
        return _spread(member, " ", json.dumps)
    return json.dumps(member)


def _spread(value: dict[str, Any] | list[Any], indent: str, text_of: Callable[[Any], str]) -> str:
    """An object or a list with a line for each member."""
    if isinstance(value, dict):
        members = [f"{json.dumps(name)}: {text_of(member)}" for name, member in value.items()]
    else:
        members = [text_of(member) for member in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(f"{indent} {member}" for member in members)
    return f"{start}\n{lines}\n{indent}{end}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out as a Markdown table: the first column and columns of text left, numbers right."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    texts = {
        place
        for cells in rows
        for place, cell in enumerate(cells)
        if len(cell) > LONGEST_NUMBERS or cell.lstrip("*`")[:1].isalpha()
    }
    rule = "| --- |" + "".join(
        " --- |" if place in texts else " ---: |" for place in range(1, len(heads))
    )
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def number(value: float | None, digits: int, factor: float = 1.0, half: float | None = None) -> str:
    """Format the cell of a table.

    Args:
        value: the number; None gives a dash.
        digits: digits after the point.
        factor: what the number, and `half`, are multiplied by.
        half: half of its interval, shown after a plus-minus sign; None for none.
    """
    text = "-" if value is None else f"{factor * value:.{digits}f}"
    return text if half is None else f"{text} ± {factor * half:.{digits}f}"


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half of its 95 % interval by Student's t; None for a single value."""
    free = len(values) - 1
    if free < 1:
        return values[0], None
    student = STUDENT[free - 1] if free <= len(STUDENT) else 1.96 + 2.37 / free + 2.8 / free**2
    return statistics.fmean(values), student * statistics.stdev(values) / len(values) ** 0.5


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share that was measured on `count` images."""
    z = 1.959964
    scale = 1 + z * z / count
    center = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)
