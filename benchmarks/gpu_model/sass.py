"""The machine code of a kernel: its instructions with the compiler's own stall counts, its loops,
and what it needs.

It is read from a cubin by the tools that come with Triton. A loop is identified by the statement of
the source that it comes from.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from callers import callers_of
from compiling import programs_that_fit, registers_and_stack, tool

# Rows of the disassembly
SOURCE = re.compile(r"\s*//## File \"(.*?)\", line (\d+)(.*)")
INLINED = re.compile(r"inlined at \"(.*?)\", line (\d+)")
HEAD = re.compile(r"def (\w+)\(")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
TEXT = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")


class Instruction(NamedTuple):
    """One instruction with its control fields, and the lines of the source it comes from, the
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
    """The place that a branch goes to; -1 for anything else."""

    @property
    def is_conditional(self) -> bool:
        """Whether a predicate decides if it is executed."""
        return self.text.startswith("@")


class Loop(NamedTuple):
    """Instructions ``first`` to ``last``, the last of which jumps back, and the statements it comes
    from.
    """

    first: int
    last: int
    statements: tuple[str, ...]


class Code(NamedTuple):
    """A disassembled kernel; loops in the order in which they begin, outer ones first."""

    instructions: list[Instruction]
    loops: list[Loop]
    kernel: str = ""

    def knows_callers(self, instruction: Instruction) -> bool:
        """Whether the source of an instruction leads up to the kernel: not where several functions
        call the one that holds it and the compiler does not say which.
        """
        return f"def {self.kernel}(" in instruction.source


class Needs(NamedTuple):
    """What a program needs of a multiprocessor."""

    registers: int
    spilled: int
    shared: int
    warps: int

    @property
    def programs_at_once(self) -> int:
        """Programs that a multiprocessor of sm_90 holds: at least one, since the kernel runs."""
        return max(1, programs_that_fit(self.registers, self.shared, self.warps))


def needs_of(cubin: bytes, warps: int, shared: int) -> Needs:
    """The needs of a compiled kernel, given the warps and the shared bytes of a program."""
    registers, spilled = registers_and_stack(cubin)
    return Needs(registers, spilled, shared, warps)


@cache
def source_lines(path: str) -> list[str]:
    """The lines of a file; none if there is no such file."""
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else []


def statement(path: str, line: int) -> str:
    """The text of a line of the source, with the file that holds it: ``selection.py: for begin in
    ...``.
    """
    lines = source_lines(path)
    text = lines[line - 1].strip() if 0 < line <= len(lines) else str(line)
    return f"{Path(path).name}: {text}"


def functions_around(path: str, line: int, kernel: str) -> list[str]:
    """The function that holds a line of the source, and those around its calls in a kernel."""
    heads = (HEAD.match(text) for text in reversed(source_lines(path)[:line]))
    head = next(filter(None, heads), None)
    if head is None:
        return []
    return [f"def {name}(" for name in (head[1], *callers_of(head[1], kernel))]


def disassemble(cubin: bytes, kernel: str) -> Code:
    """Read the instructions and loops of a cubin, that of a kernel of this name."""
    rows = tool("nvdisasm", "--no-dataflow", "-hex", "-gi", "-c", cubin=cubin).splitlines()
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source: list[str] = []
    text, fresh = "", False
    for row in rows:
        if found := SOURCE.match(row):
            if not fresh:
                source, fresh = [], True
            source += statements_of(found, kernel)
        elif found := LABEL.match(row):
            labels[found[1]] = len(instructions)
        elif found := TEXT.match(row):
            text, fresh = found[1].strip(), False
        elif text and (found := CONTROL.match(row)):
            instructions.append(instruction_of(text, int(found[1], 16), tuple(source)))
            text = ""
    with_targets = [_with_target(each, labels) for each in instructions]
    return Code(with_targets, find_loops(with_targets), kernel)


def statements_of(row: re.Match[str], kernel: str) -> list[str]:
    """The statement that a row of the disassembly names, and those it is inlined into.

    Triton 3.6 does not write where code is inlined: there the functions around it are named.
    """
    inlined = list(INLINED.finditer(row[3]))
    found = [statement(each[1], int(each[2])) for each in (row, *inlined)]
    return found if inlined else found + functions_around(row[1], int(row[2]), kernel)


def instruction_of(text: str, encoding: int, source: tuple[str, ...]) -> Instruction:
    """An instruction without a target, from its text and the upper 64 bits of its encoding."""
    control = encoding >> 41
    return Instruction(
        name=re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0],
        text=text,
        stall=control & 15,
        writes=control >> 5 & 7,
        reads=control >> 8 & 7,
        waits=control >> 11 & 63,
        source=source,
        target=-1,
    )


def _with_target(instruction: Instruction, labels: dict[str, int]) -> Instruction:
    """Fill in where a branch goes; those that only diverged warps take go nowhere."""
    if instruction.name != "BRA" or "BRA.DIV" in instruction.text:
        return instruction
    found = re.search(r"`\((\.L_x_\d+)\)", instruction.text)
    return instruction._replace(target=labels.get(found[1], -1)) if found else instruction


def find_loops(instructions: list[Instruction]) -> list[Loop]:
    """The loops, each from the target of a jump back to that jump.

    Several jumps to one place are one loop, which ends with the last of them.
    """
    ends = {
        each.target: place for place, each in enumerate(instructions) if 0 <= each.target < place
    }
    ordered = sorted(ends.items())
    loops = []
    for first, last in ordered:
        # A jump into the middle of a loop comes from code that was moved out of line.
        if not any(other < first <= end < last for other, end in ordered):
            loops.append(Loop(first, last, instructions[last].source))
    return loops
