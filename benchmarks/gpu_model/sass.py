"""Machine code of a kernel: its instructions with the compiler's own stall counts, its loops, and
what it takes.

Read from a cubin by the tools that Triton brings. A loop is known by the statement of the source
that it comes from.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from compiling import tool

# of a multiprocessor of sm_90
REGISTERS = 65536
SHARED_BYTES = 228 << 10
MOST_WARPS = 64
MOST_BLOCKS = 32


class Instruction(NamedTuple):
    """One instruction with its control fields, and the lines of the source it came from, the
    innermost first.
    """

    name: str
    text: str
    stall: int
    writes: int
    reads: int
    waits: int
    source: tuple[str, ...]
    target: int


class Loop(NamedTuple):
    """Instructions ``first`` to ``last``, the last of which jumps back, and the statements it comes
    from.
    """

    first: int
    last: int
    statements: tuple[str, ...]


class Code(NamedTuple):
    """A disassembled kernel; loops in the order in which they begin, outer before inner."""

    instructions: list[Instruction]
    loops: list[Loop]


class Needs(NamedTuple):
    """What a program takes of a multiprocessor."""

    registers: int
    spilled: int
    shared: int
    warps: int

    @property
    def programs_at_once(self) -> int:
        """Programs that a multiprocessor of sm_90 holds: at least one, since the kernel runs."""
        by_registers = 4 * (REGISTERS // 4 // (-(-self.registers // 8) * 256)) // self.warps
        by_shared = SHARED_BYTES // (self.shared + 1024)
        return max(1, min(by_registers, by_shared, MOST_WARPS // self.warps, MOST_BLOCKS))


def needs_of(cubin: bytes, warps: int, shared: int) -> Needs:
    """Registers, and bytes of the stack, which in these kernels holds nothing but spilled
    registers.
    """
    found = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    registers, stack = re.findall(r"REG:(\d+)", found), re.findall(r"STACK:(\d+)", found)
    return Needs(max(map(int, registers)), max(map(int, stack)), shared, warps)


@cache
def source_lines(path: str) -> list[str]:
    """The lines of a file; none where it is not there."""
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else []


def statement(path: str, line: int) -> str:
    """The text of a line of the source, with the file that holds it: ``selection.py: for begin in
    ...``.
    """
    lines = source_lines(path)
    text = lines[line - 1].strip() if 0 < line <= len(lines) else str(line)
    return f"{Path(path).name}: {text}"


def disassemble(cubin: bytes) -> Code:
    """Read the instructions and loops of a cubin."""
    rows = tool("nvdisasm", "-hex", "-gi", "-c", cubin=cubin).splitlines()
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source: list[str] = []
    text, fresh = "", False
    for row in rows:
        if found := re.match(r"\s*//## File \"(.*?)\", line (\d+)(.*)", row):
            if not fresh:
                source, fresh = [], True
            source.append(statement(found[1], int(found[2])))
            for inlined in re.finditer(r"inlined at \"(.*?)\", line (\d+)", found[3]):
                source.append(statement(inlined[1], int(inlined[2])))
        elif found := re.match(r"\s*(\.L_x_\d+):", row):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/", row):
            text, fresh = found[1].strip(), False
        elif text and (found := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", row)):
            control = int(found[1], 16) >> 41
            name = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]
            fields = (control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63)
            instructions.append(Instruction(name, text, *fields, tuple(source), -1))
            text = ""
    with_targets = [_with_target(each, labels) for each in instructions]
    return Code(with_targets, find_loops(with_targets))


def _with_target(instruction: Instruction, labels: dict[str, int]) -> Instruction:
    """Fill in where a branch goes; those that only diverged warps take go nowhere."""
    plain = instruction.name == "BRA" and "BRA.DIV" not in instruction.text
    found = re.search(r"`\((\.L_x_\d+)\)", instruction.text) if plain else None
    return (
        instruction._replace(target=labels[found[1]])
        if found and found[1] in labels
        else instruction
    )


def find_loops(instructions: list[Instruction]) -> list[Loop]:
    """Loops by the jumps back that end them.

    Several jumps to one place are one loop, up to the last.
    """
    ends: dict[int, int] = {}
    for place, each in enumerate(instructions):
        if 0 <= each.target < place:
            ends[each.target] = place
    ordered = sorted(ends.items(), key=lambda item: (item[0], -item[1]))
    loops = []
    for first, last in ordered:
        # A jump into the middle of a loop comes from code that was moved out of line.
        if not any(other < first <= end < last for other, end in ordered):
            loops.append(Loop(first, last, instructions[last].source))
    return loops
