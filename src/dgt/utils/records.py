"""What stands in the record of a measurement: processor, command, a table in Markdown."""

import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def processor() -> str:
    """Name the GPU, or else the processor, with the family and model by which generations of one name differ."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)", text, re.M))
    name = found.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else name


def command_line() -> str:
    """The command that started this process, as one would type it again."""
    program = Path(sys.argv[0])
    script = program.suffix == ".py" and program.name != "__main__.py"
    return shlex.join([*(["python", str(program)] if script else ["dgt"]), *sys.argv[1:]])


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left, the others to the right."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(heads) - 1), *lines[1:]]) + "\n"
