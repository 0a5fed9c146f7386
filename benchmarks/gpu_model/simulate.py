"""A rough cycle model of one multiprocessor of an H100 or H200 that runs the machine code of a
kernel.

It issues the real instructions with the compiler's own stall counts and scoreboards, knows the
widths of the pipes of compute capability 9.0 and the barriers of a program, and assumes the
latencies below. It knows no bandwidth of the L2 cache or of memory. Trust it to 40 %, and ratios
more than times.
"""

import re
from dataclasses import dataclass, field
from functools import cache

from sass import Code, Instruction, Needs

CLOCK, PROCESSORS = 1.85e9, 132
QUARTERS, START = 4, 300  # parts of a multiprocessor; cycles until a program's successor starts

# The pipe of an instruction, and for how many cycles it takes one of a quarter's; anything else is
# dispatched in one.
PIPES = {
    "alu": (2, "ISETP SEL LOP3 IADD3 VIADD VIMNMX LEA SHF PRMT FSETP FSEL FMNMX P2R R2P PLOP3 LOP IABS FLO SGXT BMSK "
               "IMNMX FCHK F2FP PSETP VOTE VOTEU"),
    "fma": (1, "FADD FMUL FFMA"),
    "imad": (2, "IMAD"),
    "special": (8, "MUFU POPC F2F I2F F2I BREV I2FP F2IP"),
    "memory": (2, "LDS STS SHFL LDSM STSM LDG STG LDGSTS ATOM ATOMG ATOMS RED LDL STL REDUX"),
    "tensor": (8, "HMMA HGMMA"),
}  # fmt: skip
PIPE_OF = {
    name: (pipe, cycles) for pipe, (cycles, names) in PIPES.items() for name in names.split()
}
LATENCIES = {
    "LDS": 26, "STS": 20, "SHFL": 24, "LDSM": 30, "LDG": 450, "STG": 20, "LDGSTS": 450, "ATOM": 600, "ATOMG": 600,
    "ATOMS": 40, "RED": 20, "MUFU": 22, "POPC": 22, "F2F": 22, "I2F": 22, "REDUX": 26, "HMMA": 33, "S2R": 40,
    "S2UR": 40, "R2UR": 12, "LDC": 60, "ULDC": 30, "CS2R": 20, "LDL": 40, "STL": 20, "VOTE": 12, "BAR": 22,
}  # fmt: skip
WIDE = ("LDS", "STS", "LDSM", "LDGSTS")
CYCLES_OF_WIDTHS = {".128": 4, ".4": 4, ".64": 2, ".2": 2}  # of the shared memory unit
BOARDS = 6  # scoreboards of a warp
READ_CYCLES = 12  # until the operands of an instruction have been read
FIRST_PRODUCT_CYCLES = 30  # more for a product that follows no other
COPIES_KEPT = 4  # groups of copies that a warp remembers
NEVER = 1 << 60


@dataclass(frozen=True)
class Cost:
    """What an instruction takes: cycles of a pipe, cycles until its result is there, and cycles of
    the shared memory unit.
    """

    pipe: str
    cycles: int
    latency: int
    memory_cycles: int
    waits_for_products: bool
    copies_left: int  # groups of copies that a wait leaves in flight, -1 for no such wait


@cache
def cost_of(instruction: Instruction) -> Cost:
    """The cost of an instruction, by its name and text."""
    name, text = instruction.name, instruction.text
    pipe, cycles = PIPE_OF.get(name, ("dispatch", 1))
    if name == "HGMMA":
        cycles = product_cycles(text)
    return Cost(
        pipe=pipe,
        cycles=cycles,
        latency=LATENCIES.get(name, 20),
        memory_cycles=memory_cycles(name, text),
        waits_for_products=name == "WARPGROUP" and "DEPBAR" in text,
        copies_left=copies_left(name, text),
    )


def product_cycles(text: str) -> int:
    """How long a matrix product occupies the tensor cores, by its number of columns."""
    found = re.search(r"64x(\d+)x\d+", text)
    columns = int(found[1]) if found else 64
    return max(8, columns // 2)


def memory_cycles(name: str, text: str) -> int:
    """How long an instruction occupies the shared memory unit."""
    if name == "ATOMS":
        return 4  # lanes that hit random banks
    if name not in WIDE:
        return 1
    return next((cycles for width, cycles in CYCLES_OF_WIDTHS.items() if width in text), 1)


def copies_left(name: str, text: str) -> int:
    """How many groups of copies a wait leaves in flight; -1 for any other instruction."""
    found = re.search(r"SB0, 0x([0-9a-f]+)", text) if name == "DEPBAR" else None
    return int(found[1], 16) if found else -1


@dataclass
class Warp:
    """Where a warp is, and when the results it waits for are there."""

    block: int
    place: int = 0
    ready: int = 0
    boards: list[int] = field(default_factory=lambda: [0] * BOARDS)
    product: int = 0
    copy: int = 0
    copies: list[int] = field(default_factory=list)
    blocked: bool = False

    def restart(self, now: int) -> None:
        """Begin the next program."""
        self.place, self.ready, self.boards = 0, now + START, [0] * BOARDS
        self.product, self.copy, self.copies = 0, 0, []

    def boards_clear(self, waits: int) -> int:
        """The cycle in which all scoreboards of a bit mask are clear."""
        when = 0
        for number, board in enumerate(self.boards):
            if waits >> number & 1:
                when = max(when, board)
        return when

    def copies_done(self, left: int) -> int:
        """The cycle in which no more than ``left`` groups of copies are in flight."""
        groups = self.copies[: max(0, len(self.copies) - left)]
        return max(groups, default=0)

    def start(self, step: Instruction, cost: Cost, now: int) -> int:
        """Start an instruction, and keep track of copies and products in flight.

        Returns:
            The cycle in which its result is there.
        """
        done = now + cost.latency
        if step.name == "LDGSTS":
            self.copy = max(self.copy, done)
        elif step.name == "LDGDEPBAR":
            self.copies = [*self.copies, max(self.copy, now)][-COPIES_KEPT:]
        elif step.name == "HGMMA":
            filling = FIRST_PRODUCT_CYCLES if self.product <= now else 0
            self.product = max(self.product, now) + cost.cycles + filling
            done += self.product - now
        return done

    def set_boards(self, step: Instruction, now: int, done: int) -> None:
        """Set the scoreboards of an instruction: of its operands, and of its result."""
        if step.writes < BOARDS:
            self.boards[step.writes] = max(self.boards[step.writes], done)
        if step.reads < BOARDS:
            self.boards[step.reads] = max(self.boards[step.reads], now + READ_CYCLES)


class Multiprocessor:
    """Programs that run side by side, each ``turns`` times in a row."""

    def __init__(
        self, code: Code, path: list[int], warps: int, blocks: int, turns: int = 2
    ) -> None:
        self.steps = [code.instructions[place] for place in path]
        self.costs = [cost_of(step) for step in self.steps]
        self.warps_each = warps
        self.warps = [Warp(number // warps) for number in range(warps * blocks)]
        self.quarters = [self.warps[quarter::QUARTERS] for quarter in range(QUARTERS)]
        self.pipes = [dict.fromkeys([*PIPES, "dispatch"], 0) for _ in range(QUARTERS)]
        self.left, self.arrived, self.finished = [turns] * blocks, [0] * blocks, [0] * blocks
        self.memory_unit = 0
        self.issued = 0
        self.active = len(self.warps)

    def run(self) -> tuple[int, int]:
        """Run all programs.

        Returns:
            The cycles until all are done, and the number of instructions issued.
        """
        now = 0
        while self.active > 0:
            now = min(
                self.issue_first_ready(warps, pipes, now)
                for warps, pipes in zip(self.quarters, self.pipes, strict=True)
            )
        return now, self.issued

    def issue_first_ready(self, warps: list[Warp], pipes: dict[str, int], now: int) -> int:
        """Issue an instruction of the first warp of a quarter that is ready.

        Returns:
            The next cycle in which a warp of the quarter may be ready.
        """
        soonest = NEVER
        for warp in warps:
            if warp.blocked or warp.place >= len(self.steps):
                continue
            when = self.earliest(warp, pipes)
            if when <= now:
                self.issue(warp, pipes, now)
                return now + 1
            soonest = min(soonest, when)
        return soonest

    def earliest(self, warp: Warp, pipes: dict[str, int]) -> int:
        """The cycle in which the next instruction of a warp can be issued."""
        step, cost = self.steps[warp.place], self.costs[warp.place]
        when = max(warp.ready, pipes[cost.pipe])
        if step.waits:
            when = max(when, warp.boards_clear(step.waits))
        if cost.waits_for_products:
            when = max(when, warp.product)
        if cost.copies_left >= 0:
            when = max(when, warp.copies_done(cost.copies_left))
        if cost.pipe == "memory":
            when = max(when, self.memory_unit)
        return when

    def issue(self, warp: Warp, pipes: dict[str, int], now: int) -> None:
        """Issue the next instruction of a warp."""
        step, cost = self.steps[warp.place], self.costs[warp.place]
        self.issued += 1
        pipes[cost.pipe] = now + cost.cycles
        if cost.pipe == "memory":
            self.memory_unit = max(self.memory_unit, now) + cost.memory_cycles
        warp.ready = now + max(1, step.stall)
        done = warp.start(step, cost, now)
        warp.set_boards(step, now, done)
        warp.place += 1
        if step.name == "BAR":
            self.arrive(warp, done)
        if warp.place >= len(self.steps):
            self.finish(warp, now)

    def members(self, block: int) -> list[Warp]:
        """The warps of a program."""
        return self.warps[block * self.warps_each : (block + 1) * self.warps_each]

    def arrive(self, warp: Warp, when: int) -> None:
        """Wait at a barrier for the other warps of the program."""
        warp.blocked = True
        self.arrived[warp.block] += 1
        if self.arrived[warp.block] == self.warps_each:
            self.arrived[warp.block] = 0
            for other in self.members(warp.block):
                other.blocked, other.ready = False, when

    def finish(self, warp: Warp, now: int) -> None:
        """Start the next program once all warps of this one are done."""
        self.finished[warp.block] += 1
        if self.finished[warp.block] < self.warps_each:
            return
        self.finished[warp.block] = 0
        self.left[warp.block] -= 1
        if self.left[warp.block] == 0:
            self.active -= self.warps_each
            return
        for other in self.members(warp.block):
            other.restart(now)


_simulated: dict[tuple[int, tuple[int, ...], int], float] = {}


def cycles_of(code: Code, path: list[int], needs: Needs, blocks: int) -> float:
    """Cycles that ``blocks`` programs side by side take, once started.

    Results are kept: the same programs are simulated only once.
    """
    mark = (id(code), tuple(path), blocks)
    if mark not in _simulated:
        _simulated[mark] = Multiprocessor(code, path, needs.warps, blocks).run()[0] / 2
    return _simulated[mark]


def side_by_side(needs: Needs, programs: float) -> int:
    """Programs of a launch that a multiprocessor runs at once."""
    return min(needs.programs_at_once, max(1, round(programs / PROCESSORS)))


def microseconds(code: Code, path: list[int], needs: Needs, programs: float) -> float:
    """Time of a launch all of whose programs go the same way."""
    blocks = side_by_side(needs, programs)
    rounds = programs / (PROCESSORS * blocks)
    return max(1.0, rounds) * cycles_of(code, path, needs, blocks) / CLOCK * 1e6
