"""How often every loop of every kernel runs, which no machine code tells; to be edited together
with the kernels.

A kernel's programs come in parts that go different ways. A part names loops by a piece of their
statement, or of a call that leads to it, and says how often they run; and pieces of code that it
never enters. Every loop must have a rule: :func:`path` raises where one is missing, so that a
changed kernel cannot go unnoticed.
"""

from collections.abc import Callable
from math import ceil
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from sass import Code

# arguments and constants of a launch by name, and its number of programs
Launched = SimpleNamespace
Statistics = dict[str, Any]  # a row of inputs.py


class Part(NamedTuple):
    """Programs that go the same way."""

    name: str
    programs: float
    trips: dict[str, float | tuple[float, ...]]
    """By a piece of the statement; several numbers for as many copies of a loop, in their order."""
    avoided: tuple[str, ...] = ()


class MissingRuleError(KeyError):
    """A loop of a kernel that no rule of its part names."""


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
    trips = {
        "for first in range(0, pitch, W)": ceil(a.pitch / a.W),
        "for _ in range(tl.max(count": s["candidate_turns"],
        "for first in range(begin, end, N)": ceil(s["candidates"] / a.N),
        "while (most > count) & (step": s["guesses"],
        "while (most > count) & (middle": s["halvings"],
        "while most > count:": 0,
        "fill(lists": ceil((a.padded - a.width) / 32),
        "fill(key_ids": 0,
    }
    return [
        Part(
            "",
            a.programs,
            trips,
            ("list_in_turns(", "keep_best(", "for begin in range(0, count, KEEP)"),
        )
    ]


def pick_all(a: Launched, s: Statistics) -> list[Part]:
    """The choice among all keys."""
    trips = {
        "while (most > count) & (step": s["guesses"],
        "while (most > count) & (middle": s["halvings"],
        "while most > count:": 0,
        "fill(lists": ceil((a.padded - a.width) / 32),
        "fill(key_ids": 0,
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


def key_gradients(a: Launched, s: Statistics) -> list[Part]:
    """Runs of the queries of a group, of which a heavy group has several: by how many tiles they
    have.
    """
    lengths = [
        min(a.run, size - begin)
        for size in map(round, s["groups_by_size"])
        for begin in range(0, max(size, 1), a.run)
    ]
    tiles = [ceil(length / a.T) for length in lengths]
    heads = a.programs / a.blocks / (a.groups + a.further)
    blocks = ceil(s["top_k"] / a.N)
    parts = []
    for low, high in ((0, 1), (2, 3), (4, 7), (8, 15), (16, 10**9)):
        some = [number for number in tiles if low <= number <= high]
        if some:
            trips = {"for start in range(begin, end, T)": sum(some) / len(some)}
            parts.append(Part(f"{low}", heads * blocks * len(some), trips, ("further_runs(",)))
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

    Raises:
        MissingRuleError: for a loop that no rule names.
    """
    seen: dict[str, int] = {}
    found = []
    for loop in code.loops:
        told = " | ".join(loop.statements)
        is_loop = loop.statements and any(
            word in loop.statements[0] for word in (": for ", ": while ")
        )
        rule = next((piece for piece in part.trips if piece in told), None)
        if any(piece in told for piece in part.avoided) or not is_loop:
            found.append(0 if is_loop else 1)
        elif rule is None:
            raise MissingRuleError(told)
        else:
            value = part.trips[rule]
            nth = seen.get(rule, 0)
            seen[rule] = nth + 1
            number = value[min(nth, len(value) - 1)] if isinstance(value, tuple) else value
            found.append(round(number))
    return found


def skips(code: Code, place: int, part: Part, trips: list[int]) -> bool:
    """Whether a forward branch that depends on a condition is taken: around a loop that never runs,
    or code avoided.
    """
    branch = code.instructions[place]
    inside = [loop for loop in code.loops if place < loop.first <= loop.last < branch.target]
    same = [
        nth
        for nth, loop in enumerate(code.loops)
        if loop in inside and loop.statements[:1] == branch.source[:1]
    ]
    if same:
        return all(trips[nth] == 0 for nth in same)
    skipped = code.instructions[place + 1 : branch.target]
    avoided = sum(
        any(piece in line for line in each.source for piece in part.avoided) for each in skipped
    )
    return bool(part.avoided) and 2 * avoided > len(skipped)


class Walk:
    """A warp's way through the code of a part.

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

        Where a jump leads out of there to, or -1 at the end of the program.
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
            if each.name == "EXIT" and not each.text.startswith("@"):
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

        Where a jump leads out of it to.
        """
        nth = self.starts[place]
        loop = self.code.loops[nth]
        for _ in range(self.trips[nth]):
            out = self.go(place, loop.last + 1, place)
            if out is not None and not loop.first <= out <= loop.last:
                return out
        return None


def path(code: Code, part: Part) -> list[int]:
    """Places of the instructions that a warp of a part issues, in their order.

    Raises:
        MissingRuleError: for a loop that no rule names.
    """
    trips = trips_of_loops(code, part)
    taken = {
        place
        for place, each in enumerate(code.instructions)
        if each.target > place
        and (not each.text.startswith("@") or skips(code, place, part, trips))
    }
    walk = Walk(code, trips, taken)
    place: int | None = 0
    while place is not None and 0 <= place < len(code.instructions):
        place = walk.go(place, len(code.instructions), -1)
    return walk.issued
