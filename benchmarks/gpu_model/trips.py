"""How often every loop of every kernel runs, which the machine code does not say; edit it together
with the kernels.

The programs of a kernel are divided into parts that take different paths. A part names loops by a
piece of their statement, or of a call that leads to it, and says how often they run; it also names
pieces of code that it never enters. Every loop must have a rule: `paths.path` raises an error if one
is missing, so that a changed kernel cannot go unnoticed.
"""

from collections.abc import Callable
from math import ceil
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

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
