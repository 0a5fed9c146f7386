"""Table and numbers of docs/experiments.md: the entropy of heads, and which keys are best for them."""

from __future__ import annotations

from functools import cache

from tables_shared import Cells, number_of_text, read, table

from studies.head_entropy import BEST, RANDOM, SELECTORS, Part, heads_of, parts_of, rank_correlation

RAW = "head_entropy"
NAMES = {
    BEST: "each query's best",
    "groups": "its group's",
    RANDOM: "random",
    "groups, remainder": "its group's, and the residual key",
    "random, remainder": "random, and the residual key",
}


@cache
def parts(percent: int) -> list[Part]:
    """Heads of similar entropy, with this percentage of keys."""
    return parts_of(heads_of(read(RAW), percent))


@table
def head_entropy() -> Cells:
    """Errors by entropy and selector, with 5 % of the keys."""
    heads = [
        "entropy of the heads",
        *(NAMES[selector] for selector in SELECTORS),
        "random ahead of best",
    ]
    rows = []
    for part in parts(5):
        errors = [f"{100 * part.errors[selector]:.1f}" for selector in SELECTORS]
        span = f"{part.lowest:.2f} to {part.highest:.2f}"
        rows.append([span, *errors, f"{part.random_wins} of {part.heads}"])
    return [heads, *rows]


@number_of_text
def rank_correlation_of_entropy() -> str:
    """The least and the greatest over percentages of keys."""
    percents = read(RAW)["settings"]["percent"]
    found = [rank_correlation(heads_of(read(RAW), percent)) for percent in percents]
    return f"{min(found):.2f} to {max(found):.2f}"


@number_of_text
def random_ahead_of_best(percent: str) -> str:
    """In how many of all heads random keys have the smaller error."""
    found = parts(int(percent))
    return f"{sum(part.random_wins for part in found)} of {sum(part.heads for part in found)}"


@number_of_text
def photographs_of_entropy() -> str:
    """How many photographs were measured."""
    return str(len(read(RAW)["settings"]["photographs"]))


@number_of_text
def heads_of_entropy() -> str:
    """How many heads the model has."""
    return str(len(heads_of(read(RAW), 5)))
