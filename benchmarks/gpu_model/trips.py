"""How often every loop of every kernel runs, which the machine code does not say; edit it together
with the kernels.

The programs of a kernel are divided into parts that take different paths. A part names loops by a
piece of their statement, or of a call that leads to it, and says how often they run; it also names
pieces of code that it never enters. Every loop must have a rule: :func:`path` raises an error if
one is missing, so that a changed kernel cannot go unnoticed.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from sass import Code, Instruction, Loop

# arguments and constants of a launch by name, and its number of programs
Launched = SimpleNamespace
Statistics = dict[str, Any]  # a row of inputs.py


class MissingRuleError(KeyError):
    """A loop of a kernel that no rule of its part names."""


class Part(NamedTuple):
    """Programs that take the same path."""

    name: str
    programs: float
    trips: dict[str, float | tuple[float, ...]]
    """By a piece of the statement; several numbers for as many copies of a loop, in their order."""
    avoided: tuple[str, ...] = ()

    def avoids(self, statements: str) -> bool:
        """Whether these programs never enter the code of some statements."""
        return any(piece in statements for piece in self.avoided)

    def rule_of(self, statements: str) -> str:
        """The piece of a loop's statements by which its trips are known.

        Raises:
            MissingRuleError: no rule names the loop.
        """
        for piece in self.trips:
            if piece in statements:
                return piece
        raise MissingRuleError(statements)

    def trips_of_copy(self, rule: str, nth: int) -> int:
        """How often the n-th copy of a loop runs."""
        number = self.trips[rule]
        if isinstance(number, tuple):
            number = number[min(nth, len(number) - 1)]
        return round(number)


def score_tokens(a: Launched, s: Statistics) -> list[Part]:
    """Groups of queries, and block maxima of keys."""
    tiles = ceil(min(a.run, a.tokens) / a.T)
    scoring = {
        "for start in range(nth * run": tiles,
        "for begin in range(0, groups + 1, GP)": ceil((a.groups + 1) / a.GP),
        "for begin in range(0, 1 if ONE else groups, GP)": 1 if a.ONE else ceil(a.groups / a.GP),
    }
    full, passes = a.tokens // a.N, ceil(a.tokens / a.N)
    maxima: dict[str, float | tuple[float, ...]] = {
        "for nth in tl.range(begin, end": (full, passes - full)
    }
    return [
        Part("queries", a.first, scoring, ("best_of_blocks(",)),
        Part("keys", a.programs - a.first, maxima, ("group_run(",)),
    ]


def bound_and_place(a: Launched, s: Statistics) -> list[Part]:
    """Order of queries, and bounds of rows."""
    placing = {
        "for first in range(0, runs, RC)": ceil(a.runs / a.RC),
        "for first in range(0, end, 32)": max(1, ceil(s["tiles"] / a.groups / 32)),
        "for first in range(0, pitch, WP)": ceil(a.pitch / a.WP),
        "for _ in range(tl.max(count": s["member_turns"],
    }
    searching = {
        "while (most > count) & (step": s.get("bound_guesses", 0),
        "while (most > count) & (middle": s.get("bound_halvings", 0),
    }
    return [
        Part("place", a.first, placing, ("bound_row(",)),
        Part("bound", a.programs - a.first, searching, ("place_group(",)),
    ]


def mark_candidates(a: Launched, s: Statistics) -> list[Part]:
    """Bits of the keys that reach their bounds."""
    return [
        Part("", a.programs, {"for begin in range(piece * span": ceil(min(a.span, a.tokens) / a.T)})
    ]


def pick_best(a: Launched, s: Statistics) -> list[Part]:
    """The choice among candidates that fit registers."""
    padding = ceil((a.padded - a.width) / 32)
    trips: dict[str, float | tuple[float, ...]] = {
        "for first in range(0, pitch, W)": ceil(a.pitch / a.W),
        "for _ in range(tl.max(count": s["candidate_turns"],
        "for first in range(begin, end, N)": ceil(s["candidates"] / a.N),
        "while (most > count) & (step": s["guesses"],
        "while (most > count) & (middle": s["halvings"],
        "while most > count:": 0,
        "for begin in range(0, count, KEEP)": ceil(a.width / a.KEEP),
        "fill(lists": padding,
        "fill(key_ids": 0,
        "def fill(": (padding, 0),  # the same two calls, where Triton 3.6 does not tell them apart
    }
    return [Part("", a.programs, trips, ("list_in_turns(", "keep_best("))]


def pick_all(a: Launched, s: Statistics) -> list[Part]:
    """The choice among all keys."""
    padding = ceil((a.padded - a.width) / 32)
    trips: dict[str, float | tuple[float, ...]] = {
        "while (most > count) & (step": s["guesses"],
        "while (most > count) & (middle": s["halvings"],
        "while most > count:": 0,
        "fill(lists": padding,
        "fill(key_ids": 0,
        "def fill(": (padding, 0),  # the same two calls, where Triton 3.6 does not tell them apart
    }
    return [Part("", a.programs, trips)]


def attend_tiles(a: Launched, s: Statistics) -> list[Part]:
    """Tiles that hold queries, over the keys of their group."""
    full, rest = divmod(s["top_k"], a.N)
    trips: dict[str, float | tuple[float, ...]] = {
        "for start in tl.range(begin, end": (full, int(rest > 0))
    }
    return [Part("", a.programs / a.slots * s["tiles"], trips)]


def query_gradient(a: Launched, s: Statistics) -> list[Part]:
    """The same tiles, backward."""
    return [
        Part(
            "",
            a.programs / a.slots * s["tiles"],
            {"for start in range(0, count, N)": ceil(s["top_k"] / a.N)},
        )
    ]


def lengths_of_runs(a: Launched, s: Statistics) -> list[int]:
    """How many queries the runs of all groups have; only a heavy group has several runs."""
    return [
        min(a.run, size - begin)
        for size in map(round, s["groups_by_size"])
        for begin in range(0, max(size, 1), a.run)
    ]


# What finds the group of a further run: most programs take the first run of a group.
FURTHER = ("further_runs(", "tl.cumsum(runs, 0)", "tl.where(ids < group, runs, 0)")


def key_gradients(a: Launched, s: Statistics) -> list[Part]:
    """Runs of the queries of a group, by how many tiles they have."""
    tiles = [ceil(length / a.T) for length in lengths_of_runs(a, s)]
    heads = a.programs / a.blocks / (a.groups + a.further)
    blocks = ceil(s["top_k"] / a.N)
    parts = []
    for low, high in ((0, 1), (2, 3), (4, 7), (8, 15), (16, 10**9)):
        some = [number for number in tiles if low <= number <= high]
        if some:
            trips = {"for start in range(begin, end, T)": sum(some) / len(some)}
            parts.append(Part(f"{low}", heads * blocks * len(some), trips, FURTHER))
    return parts


def add_runs(a: Launched, s: Statistics) -> list[Part]:
    """The further runs of heavy groups."""
    runs = [(max(size, 1) - 1) // a.run for size in map(round, s["groups_by_size"])]
    heavy = [number for number in runs if number]
    heads = a.programs / a.blocks / a.groups
    blocks = ceil(s["top_k"] / a.N)
    trips = {"for which in range(own)": sum(heavy) / max(len(heavy), 1)}
    return [Part("", heads * blocks * max(len(heavy), 0.1), trips)]


def dense_blocks(a: Launched, s: Statistics) -> list[Part]:
    """All keys for a tile of queries, or all queries for a block of keys."""
    forward = {
        "for start in tl.range(0, tokens, N": ceil(a.tokens / a.N),
        "for start in range(0, tokens, N)": ceil(a.tokens / a.N),
        "for start in range(0, tokens, T)": ceil(a.tokens / a.T),
    }
    return [Part("", a.programs, forward, ("attend_key_by_key(",))]


def fill_entries(a: Launched, s: Statistics) -> list[Part]:
    """Words of bits."""
    return [Part("", a.programs, {"for word in range(words - 1)": a.words - 1})]


def gather_partials(a: Launched, s: Statistics) -> list[Part]:
    """The longest list of a block of keys, as if groups chose keys at random."""
    mean = len(s["groups_by_size"]) * s["top_k"] / a.keys
    longest = float(np.random.default_rng(0).poisson(mean, (200, a.N)).max(1).mean())
    return [Part("", a.programs, {"for step in range(tl.max": longest})]


def once(a: Launched, s: Statistics) -> list[Part]:
    """No loop at all."""
    return [Part("", a.programs, {})]


TRIPS: dict[str, Callable[[Launched, Statistics], list[Part]]] = {
    "score_tokens": score_tokens,
    "bound_and_place": bound_and_place,
    "mark_candidates": mark_candidates,
    "pick_best": pick_best,
    "pick_all": pick_all,
    "attend_tiles": attend_tiles,
    "query_gradient": query_gradient,
    "key_gradients": key_gradients,
    "add_runs": add_runs,
    "attend_densely": dense_blocks,
    "query_gradient_densely": dense_blocks,
    "key_gradients_densely": dense_blocks,
    "mark_keys": once,
    "fill_entries": fill_entries,
    "gather_partials": gather_partials,
}


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
