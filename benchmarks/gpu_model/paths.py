"""The path of a kernel's programs through its machine code, by the rules of `trips.py`.

A conditional branch says nothing about how often it is taken. Whether it is follows from the code
around it: it skips a loop that never runs, or code that the programs never enter, or it is the way
into a loop that does run.
"""

from collections import Counter

from sass import Code, Instruction, Loop
from trips import Part


def trips_of_loops(code: Code, part: Part) -> list[int]:
    """How often each loop runs; 1 for code that was moved out of line and jumps back.

    What is inside of an avoided loop is avoided too, even if its own statements do not say so.

    Raises:
        MissingRuleError: no rule names a loop.
    """
    seen: Counter[str] = Counter()
    found = []
    avoided_to = -1  # the end of the last avoided loop
    for loop in code.loops:
        statements = " | ".join(loop.statements)
        if loop.last <= avoided_to:
            found.append(0)
        elif not is_of_source(loop):
            found.append(1)
        elif part.avoids(statements):
            found.append(0)
            avoided_to = loop.last
        else:
            rule = part.rule_of(statements)
            found.append(part.trips_of_copy(rule, seen[rule]))
            seen[rule] += 1
    return found


def is_of_source(loop: Loop) -> bool:
    """Whether it is a loop of the source, not one that the compiler's order of the code makes."""
    return any(": for " in line or ": while " in line for line in loop.statements[:1])


def loops_around(code: Code, place: int) -> list[int]:
    """Numbers of the loops that a branch jumps over and whose statement is its own."""
    branch = code.instructions[place]
    return [
        nth
        for nth, loop in enumerate(code.loops)
        if place < loop.first <= loop.last < branch.target
        and loop.statements[:1] == branch.source[:1]
    ]


def skips(code: Code, place: int, part: Part, trips: list[int]) -> bool:
    """Whether a conditional forward branch is taken: it is if it jumps over a loop that never runs,
    or over code that the part avoids, as far as its callers are known.
    """
    skipped_loops = loops_around(code, place)
    if skipped_loops:
        return all(trips[nth] == 0 for nth in skipped_loops)
    skipped = code.instructions[place + 1 : code.instructions[place].target]
    known = [each for each in skipped if code.knows_callers(each)]
    avoided = sum(any(map(part.avoids, each.source)) for each in known)
    return bool(part.avoided) and 2 * avoided > len(known)


def leads_to_loop(code: Code, place: int, trips: list[int]) -> bool:
    """Whether a forward branch is the way into a loop that runs: the code behind the branch ends
    with a jump over that loop.
    """
    target = code.instructions[place].target
    jumps = [each for each in code.instructions[place + 1 : target] if is_plain_jump(each)]
    return any(
        trips[nth] > 0 and target <= loop.first and loop.last < jump.target
        for jump in jumps
        for nth, loop in enumerate(code.loops)
    )


def is_plain_jump(instruction: Instruction) -> bool:
    """Whether it is a branch that is always taken."""
    return instruction.name == "BRA" and not instruction.is_conditional


class Walk:
    """A warp's path through the code of a part.

    Args:
        code: the instructions and loops.
        trips: how often each loop runs.
        taken: places of the forward branches that are taken.
    """

    def __init__(self, code: Code, trips: list[int], taken: set[int]) -> None:
        self.code = code
        self.trips = trips
        self.taken = taken
        self.starts = {loop.first: nth for nth, loop in enumerate(code.loops)}
        self.issued: list[int] = []

    def go(self, place: int, end: int, inside: int) -> int | None:
        """Go from ``place`` to ``end``.

        Args:
            place: of the first instruction.
            end: the place behind the last one.
            inside: where the innermost loop around them starts.

        Returns:
            Where a jump out of there leads, or -1 at the end of the program; None if there is none.
        """
        while place < end:
            if place in self.starts and place != inside:
                out = self.repeat(place)
                if out is not None:
                    return out
                place = self.code.loops[self.starts[place]].last + 1
                inside = -1
                continue
            each = self.code.instructions[place]
            if each.name == "EXIT" and not each.is_conditional:
                return -1
            self.issued.append(place)
            if place not in self.taken:
                place += 1
            elif each.target >= end:
                return each.target
            else:
                place = each.target
        return None

    def repeat(self, place: int) -> int | None:
        """Go through the loop that starts at ``place``, as often as it runs.

        Returns:
            Where a jump out of it leads; None if there is none.
        """
        nth = self.starts[place]
        loop = self.code.loops[nth]
        for _ in range(self.trips[nth]):
            out = self.go(place, loop.last + 1, place)
            if out is not None and not loop.first <= out <= loop.last:
                return out
        return None


def taken_branches(code: Code, part: Part, trips: list[int]) -> set[int]:
    """Places of the forward branches that the programs of a part take."""
    return {
        place
        for place, each in enumerate(code.instructions)
        if each.target > place and is_taken(code, place, part, trips)
    }


def is_taken(code: Code, place: int, part: Part, trips: list[int]) -> bool:
    """Whether the programs of a part take a forward branch."""
    if not code.instructions[place].is_conditional:
        return True
    return skips(code, place, part, trips) or leads_to_loop(code, place, trips)


def path(code: Code, part: Part) -> list[int]:
    """Places of the instructions that a warp of a part issues, in order.

    Raises:
        MissingRuleError: no rule names a loop.
    """
    trips = trips_of_loops(code, part)
    walk = Walk(code, trips, taken_branches(code, part, trips))
    place: int | None = 0
    while place is not None and 0 <= place < len(code.instructions):
        place = walk.go(place, len(code.instructions), -1)
    return walk.issued
