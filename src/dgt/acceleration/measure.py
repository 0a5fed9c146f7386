"""Measure the time and error of every setting of a call site on its actual calls."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgt.acceleration.calls import Call, read_call
from dgt.acceleration.grouped import answer_call
from dgt.acceleration.settings import SHARES, LayerReport, split_budget
from dgt.acceleration.special_tokens import special_places
from dgt.acceleration.statistics import squares_between
from dgt.ops import cluster_tokens

GAIN = 0.9  # a setting must take less than this share of the call's own time
ROUNDS = 2  # the least of this many timings counts
SLOW = 1.5  # a setting slower than this share of the call's own time is not timed again
LONG = 40.0  # milliseconds: slower settings are not timed again, nor for a batch
CLEARLY = 0.9  # of an error: less is clearly better
SHARP = 3.0  # of the statistic s: above, residual keys do not pay off
BROAD = 1.0  # below, they do
BATCH = 4  # batch size for which the gain must also hold
MOST_ELEMENTS = 1 << 27  # of the queries in such a batch
SAMPLED_QUERIES = 64  # queries per head used to measure the breadth of attention
STATISTIC_SHARE = 0.1  # the budget at which s is looked at


class Kind(NamedTuple):
    """A setting, independent of the call's sizes."""

    choice: str
    share: float = 0.0
    has_residual: bool = False
    shared_clusters: bool = False


@dataclass
class Measured:
    """A setting of a call site, and sums over the calls that it was measured on."""

    row: LayerReport
    ms: float = 0.0
    own_ms: float = 0.0
    squares: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    batch_ratio: float | None = None
    """Its time for a batch relative to the call's own; None if not measured."""
    batch: int = 1
    """Of the calls it was measured on."""

    @property
    def ratio(self) -> float:
        """Its time relative to the call's own."""
        return self.ms / self.own_ms if self.own_ms else torch.inf

    @property
    def error(self) -> float:
        """The relative error of the attention's output."""
        return float((self.squares[0] / self.squares[1].clamp(min=1e-30)).sqrt())

    def add(self, other: "Measured") -> None:
        """Add measurements of other calls."""
        self.ms += other.ms
        self.own_ms += other.own_ms
        self.squares += other.squares


Settings = dict[Kind, Measured]


class Own(NamedTuple):
    """A call computed by the model's own attention."""

    ms: float
    output: Any


def timed(work: Callable[[], Any], rounds: int = 1) -> tuple[float, Any]:
    """Return the shortest time of a function in milliseconds, and its result."""
    from torch.utils.benchmark import (
        timer,
    )  # waits for a GPU; only here: it loads torch's compilers

    times = []
    output = None
    for _ in range(rounds):
        start = timer()
        output = work()
        times.append(1000 * (timer() - start))
    return min(times, default=math.inf), output


def measure_call(
    call: Call, row: LayerReport, own: Own, settings: Settings, is_exact: bool
) -> None:
    """Measure every setting of a call site on one of its calls, and accumulate the results.

    Args:
        call: the call; its site's first fills in the settings.
        row: of the call site, with the sizes of its calls, and why it cannot be grouped.
        own: the model's own attention for the call.
        settings: what is known so far.
        is_exact: whether no error is allowed, so that no groups are tried.
    """
    is_first = not settings
    if is_first:
        settings.update(settings_to_try(call, row, is_exact))
    own = own._replace(ms=timed_again(call.run, own.ms))
    too_slow: set[tuple[bool, bool]] = set()  # grouped settings that more keys only make slower
    for kind, measured in settings.items():
        is_grouped = kind.choice == "groups"
        sort = (kind.has_residual, kind.shared_clusters)
        is_hopeless = sort in too_slow or call.reason is not None
        if is_grouped and is_hopeless:
            continue
        if not is_first and is_dominated(measured, settings):
            continue
        found = measure_setting(call, kind, measured.row, own)
        measured.add(found)
        if is_grouped and found.ratio >= GAIN:
            too_slow.add(sort)
    if is_first and own.ms < LONG:
        measure_batch(call, settings)


def measure_setting(call: Call, kind: Kind, row: LayerReport, own: Own) -> Measured:
    """Time one setting on one call, and compare its output with the model's own."""
    work = partial(answer_call, call, row)
    ms, output = timed(work)
    is_smallest = kind.share == SHARES[0]  # which decides about all of its sort
    if is_smallest or ms < SLOW * own.ms:
        ms = timed_again(work, ms)
    squares = squares_between(real_rows(call, output), real_rows(call, own.output))
    return Measured(row, ms, own.ms, squares)


def timed_again(work: Callable[[], Any], ms: float) -> float:
    """The shortest time of a function in milliseconds, timed again unless it took long."""
    return ms if ms > LONG else min(ms, timed(work, ROUNDS - 1)[0])


def is_dominated(measured: Measured, settings: Settings) -> bool:
    """Whether another setting is as fast and clearly more accurate."""
    return any(
        other.ratio <= measured.ratio and other.error < CLEARLY * measured.error
        for other in settings.values()
        if other.row.choice == "groups"
    )


def real_rows(call: Call, output: Tensor) -> list[Tensor]:
    """A call's output without the queries that are padding."""
    if call.key_mask is None or call.query.shape[2] != call.key.shape[2]:
        return [output.float()]
    return [output.transpose(1, 2)[call.key_mask].float()]


def settings_to_try(call: Call, row: LayerReport, is_exact: bool) -> Settings:
    """Candidate settings for a call: the native dense kernel on CPUs, and groups of several budgets, smallest first."""
    kinds = []
    if call.arguments is not None and call.query.device.type == "cpu":
        kinds.append(Kind("exact"))
    if not is_exact and not row.reason:
        sorts = residual_kinds(residual_statistic(call, row), call.query.shape[1])
        kinds += [sort._replace(share=share) for share in SHARES for sort in sorts]
    return {kind: Measured(row_for(row, kind), batch=call.query.shape[0]) for kind in kinds}


def residual_kinds(statistic: float | None, heads: int) -> list[Kind]:
    """Which residual keys to try: none where attention is sharp, only with them where it is
    broad.
    """
    own = Kind("groups", has_residual=True)
    shared = Kind("groups", has_residual=True, shared_clusters=True)
    none = Kind("groups")
    with_residual = [own, shared] if heads > 1 else [own]
    if statistic is None:
        return [*with_residual, none]
    if statistic > SHARP:
        return [none]
    return with_residual if statistic < BROAD else [*with_residual, none]


def row_for(row: LayerReport, kind: Kind) -> LayerReport:
    """A call site's row with this setting."""
    if kind.choice == "exact":
        return replace(row, choice="exact", reason="")
    split = split_budget(kind.share, row.tokens, row.key_tokens, kind.has_residual)
    residual = 2 * split.residual_keys if kind.shared_clusters else split.residual_keys
    keys = max(1, split.keys - split.residual_keys) if kind.shared_clusters else split.keys
    return replace(
        row,
        choice="groups",
        groups=split.groups,
        keys=keys,
        residual_keys=residual,
        shared_clusters=kind.shared_clusters,
    )


def measure_batch(call: Call, settings: Settings) -> None:
    """Time the smallest setting of each kind for a batch of several inputs."""
    arguments = call.arguments or {}
    is_large = call.query.shape[0] >= BATCH or BATCH * call.query.numel() > MOST_ELEMENTS
    if is_large or call.shape != call.query.shape or arguments.get("attn_mask") is not None:
        return
    batch = repeat_call(call, BATCH)
    own_ms = timed(batch.run, ROUNDS)[0]
    seen: set[tuple[str, bool, bool]] = set()
    for kind, measured in settings.items():
        sort = (kind.choice, kind.has_residual, kind.shared_clusters)
        if sort in seen or measured.ratio >= GAIN:
            continue
        seen.add(sort)
        ms = timed(partial(answer_call, batch, measured.row), ROUNDS)[0]
        worse = (ms / own_ms) / measured.ratio
        for other, same in settings.items():
            if (other.choice, other.has_residual, other.shared_clusters) == sort:
                same.batch_ratio = worse * same.ratio


def repeat_call(call: Call, count: int) -> Call:
    """The same call for a batch of copies of its input."""
    arguments = dict(call.arguments or {})
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].repeat(count, 1, 1, 1)
    return read_call(**arguments)


@torch.no_grad()
def residual_statistic(call: Call, row: LayerReport) -> float | None:
    """``s = scale^2 tr(Cq Ck)``, with the covariances of queries within groups and of keys within
    clusters.

    Where it is large, attention within a group and a cluster is far from linear, and means of keys
    do not pay. The mean over heads; None for padded sequences, of which nothing is known.
    """
    if call.key_mask is not None or call.query.shape[1] != call.key.shape[1]:
        return None
    is_within = row.tokens == row.key_tokens
    places = len(special_places(row.special, row.tokens)) if is_within else 0
    split = split_budget(STATISTIC_SHARE, row.tokens, row.key_tokens, True)
    queries = call.query[:1, :, places:]
    keys = call.key[:1, :, places:]
    of_queries = covariance_within(queries, min(split.groups, queries.shape[2]))
    of_keys = covariance_within(keys, min(split.residual_keys, keys.shape[2]))
    return call.scale**2 * float((of_queries * of_keys).sum((-2, -1)).mean())


def covariance_within(tokens: Tensor, clusters: int) -> Tensor:
    """(B, H, D, D): the covariance of tokens around the centroids of their clusters."""
    found = cluster_tokens(tokens, clusters)
    places = found.ids[..., None].expand(-1, -1, -1, tokens.shape[-1])
    rest = tokens.float() - found.centroids.gather(2, places)
    return rest.mT @ rest / tokens.shape[2]


def breadth(call: Call) -> float:
    """The mean perplexity, in keys, of the attention of evenly spaced queries."""
    step = max(1, call.query.shape[2] // SAMPLED_QUERIES)
    query = call.query[:1, :, ::step].float()
    key = call.key[:1].float()
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    score = query @ key.mT * call.scale
    if call.key_mask is not None:
        score = score.masked_fill(~call.key_mask[:1, None, None], -torch.inf)
    return float(torch.special.entr(score.softmax(-1)).sum(-1).exp().mean())
