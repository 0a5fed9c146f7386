"""The call sites of attention in a model: where they are, what they need, why they cannot be grouped."""

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dgt.acceleration.bypass import bypass_in
from dgt.acceleration.calls import Call, first_reason
from dgt.acceleration.inputs import CALL_ERRORS, call_with, describe_failure, describe_item
from dgt.acceleration.intercept import trace_sdpa
from dgt.acceleration.prefix_tokens import (
    FrameTokens,
    PrefixTokens,
    as_count,
    count_prefix_tokens,
    prefix_positions,
)
from dgt.acceleration.settings import Setting
from dgt.utils.errors import UserError

# Shorter sequences are skipped: selecting keys alone takes as long as attention there.
LEAST_TOKENS = 192
PASSED_BY = "inside nn.TransformerEncoderLayer, which bypasses it in eval mode"
NESTED = "contains other attention"  # whose calls what is installed around it would answer as well
FEW = "few tokens"
NOT_NAMED = "not among what may be approximated"
NO_PREFIX = "no class or register tokens were detected: all tokens are treated as patches (set num_prefix_tokens=)"


@dataclass
class Measurement:
    """A setting of a call site, and sums over the calls that it was measured on.

    Times are milliseconds; in a report, for one input.
    """

    setting: Setting = field(default_factory=Setting)
    setting_ms: float = 0.0
    dense_ms: float = 0.0
    """Of the original attention."""
    squared_error: float = 0.0
    squared_norm: float = 0.0
    batch: int = 1
    """Of the calls it was measured on."""
    batch_ratio: float | None = None
    """Its time for a batch relative to the original attention's; None if not measured."""

    @property
    def ratio(self) -> float:
        """Its time relative to the original attention's."""
        return self.setting_ms / self.dense_ms if self.dense_ms else float("inf")

    @property
    def error(self) -> float:
        """The relative error of the attention's output."""
        return (self.squared_error / max(self.squared_norm, 1e-30)) ** 0.5

    def add(self, other: "Measurement") -> None:
        """Add measurements of other calls."""
        self.setting_ms += other.setting_ms
        self.dense_ms += other.dense_ms
        self.squared_error += other.squared_error
        self.squared_norm += other.squared_norm


@dataclass
class AttentionSite:
    """A call site of attention: a module of a model, whose calls share a setting.

    ``reason`` is why its attention stays dense; ``note`` says what was assumed.
    """

    name: str
    """Of the module that calls attention."""
    heads: int = 0
    tokens: int = 0
    """L: queries; of calls of several sizes, in the first one that may be grouped."""
    key_tokens: int = 0
    """S: keys; L where attention is within one sequence."""
    sizes_vary: bool = False
    """Whether calls of the module differed in their numbers of tokens."""
    channels: int = 0
    prefix_tokens: PrefixTokens = 0
    """Class, register or other tokens of a sequence that belong to no group."""
    calls: int = 1
    """How many calls of the module there are in one forward pass, at most."""
    sequences: int = 1
    """B: of a call; more than inputs where attention is within windows."""
    breadth: float = 0.0
    """Mean perplexity of the attention of sampled queries, in keys."""
    reason: str = ""
    note: str = ""
    measurement: Measurement = field(default_factory=Measurement)
    """Of the chosen setting."""
    candidates: dict[Setting, Measurement] = field(default_factory=dict, repr=False, compare=False)
    """Settings that were tried."""
    dense_times: list[float] = field(default_factory=list, repr=False, compare=False)
    """Milliseconds of the original attention in its calls, in their order."""
    least_tokens: int = field(default=0, repr=False, compare=False)
    """Shorter sequences are not to be grouped: half of the shortest that was seen, or fewer tokens
    than may be.
    """
    sensitivity: float = field(default=1.0, repr=False, compare=False)
    """The relative error of the model's output over that of this attention."""
    error_scale: float = field(default=1.0, repr=False, compare=False)
    """Its error with a choice, as guards estimated it on all inputs, over what was measured on few."""

    @property
    def title(self) -> str:
        """Name of the module."""
        return self.name or "(the model)"

    @property
    def setting(self) -> Setting:
        """The chosen setting."""
        return self.measurement.setting

    @property
    def sizes(self) -> tuple[int, int]:
        """L and S."""
        return self.tokens, self.key_tokens

    @property
    def is_within(self) -> bool:
        """Whether there are as many keys as queries, as within one sequence."""
        return self.tokens == self.key_tokens

    @property
    def num_prefix_tokens(self) -> int:
        """How many prefix tokens a sequence has."""
        return len(prefix_positions(self.prefix_tokens, self.tokens))

    @property
    def dense_ms(self) -> float:
        """Of the original attention, in milliseconds for one input."""
        return self.measurement.dense_ms


def chosen(site: AttentionSite, measurement: Measurement, reason: str = "") -> AttentionSite:
    """A call site as it is reported, with what was chosen."""
    setting = replace(measurement.setting, least_tokens=site.least_tokens)
    return replace(
        site,
        measurement=replace(measurement, setting=setting),
        reason=reason,
        candidates={},
        dense_times=[],
        sensitivity=1.0,
    )


def find_sites(
    model: nn.Module, item: Any, prefix: PrefixTokens | None, least_tokens: int
) -> list[AttentionSite]:
    """Trace one call of the model without measuring: all call sites, and why they cannot be grouped.

    Raises:
        UserError: the model fails on the item, or calls no attention.
    """
    tracer = Tracer(model, prefix, least_tokens)
    run_first(tracer, item, tracer.look, lambda: call_with(model, item))
    return tracer.finish()


class Tracer:
    """Collects the call sites of a model over passes of it.

    Args:
        model: what is traced.
        prefix: where prefix tokens are; None asks the model.
        least_tokens: call sites of fewer are not tried.
        approximate: patterns of the modules whose attention may be grouped; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        prefix: PrefixTokens | None,
        least_tokens: int,
        approximate: Sequence[str] | None = None,
    ) -> None:
        self.model = model
        self.prefix = prefix
        self.least_tokens = least_tokens
        self.approximate = approximate
        self.sites: dict[str, AttentionSite] = {}
        """By the module's name."""

    def look(self, name: str, number: int, call: Call) -> None:
        """Record a call; the model computes it."""
        self.site_of(name, number, call)

    def site_of(self, name: str, number: int, call: Call) -> AttentionSite:
        """The call site of a call. It has the sizes of the first one that may be grouped: calls of a
        module may differ in size, as those of matchers and packed sequences do.
        """
        site = self.describe(name, call)
        known = self.sites.setdefault(name, site)
        sizes_vary = known.sizes_vary or known.sizes != site.sizes
        if known.reason and not site.reason:
            site.calls = known.calls
            site.dense_times = known.dense_times
            self.sites[name] = site
        elif not site.reason:
            known.least_tokens = min(known.least_tokens, site.least_tokens)
        site = self.sites[name]
        site.sizes_vary = sizes_vary
        site.calls = max(site.calls, number + 1)
        return site

    def describe(self, name: str, call: Call) -> AttentionSite:
        """A call site's sizes, prefix tokens, and why it may not be grouped."""
        tokens, channels = call.query.shape[-2:]
        key_tokens = call.key.shape[-2]
        is_within = tokens == key_tokens
        prefix, note = self.prefix_of(name, is_within)
        positions = prefix_positions(prefix, tokens)
        reason = self.reason_against(name, call, min(tokens, key_tokens) - len(positions))
        is_long = is_within and tokens >= self.least_tokens  # apart from its prefix tokens
        if reason is None or (reason == FEW and is_long and self.prefix is not None):
            check_positions(prefix, tokens, name)
        least_tokens = max(self.least_tokens, (min(tokens, key_tokens) + 1) // 2)
        return AttentionSite(
            name=name,
            heads=call.query.shape[1],
            tokens=tokens,
            key_tokens=key_tokens,
            channels=channels,
            prefix_tokens=prefix if isinstance(prefix, FrameTokens) else as_count(positions),
            sequences=call.query.shape[0],
            reason=reason or "",
            note=note,
            least_tokens=least_tokens,
        )

    def prefix_of(self, name: str, is_within: bool) -> tuple[PrefixTokens, str]:
        """The prefix tokens of a call, and a note where neither the user nor the model says."""
        prefix = count_prefix_tokens(self.model, name) if self.prefix is None else self.prefix
        if not is_within:
            return 0, ""
        if prefix is None:
            return 0, NO_PREFIX
        return prefix, ""

    def reason_against(self, name: str, call: Call, patches: int) -> str | None:
        """Why a call with so many patches may not be grouped; None if it may."""
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return first_reason(
            {
                call.reason or "": call.reason is not None,
                PASSED_BY: isinstance(parent, nn.TransformerEncoderLayer),
                NOT_NAMED: self.approximate is not None and not is_named(name, self.approximate),
                FEW: patches < self.least_tokens,
            }
        )

    def finish(self) -> list[AttentionSite]:
        """The call sites."""
        sites = list(self.sites.values())
        for site in sites:
            if any(is_inside(other.name, site.name) for other in sites):
                site.reason = site.reason or NESTED
                site.candidates.clear()
        return sites


def check_positions(prefix: PrefixTokens, tokens: int, name: str) -> None:
    """Reject prefix tokens outside the sequence, or that are all of it."""
    of_sequence = f"the {tokens} tokens of {name!r}"
    if isinstance(prefix, FrameTokens):
        if prefix.period > tokens:
            raise UserError(
                f"num_prefix_tokens must have frames of at most {of_sequence}, got {prefix}"
            )
        return
    if isinstance(prefix, int):
        if prefix >= tokens:
            raise UserError(f"num_prefix_tokens must be fewer than {of_sequence}, got {prefix}")
        return
    outside = [position for position in prefix if position >= tokens]
    if outside:
        raise UserError(
            f"num_prefix_tokens must be positions within the sequence, got {outside[0]} for {of_sequence}"
        )


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is inside another one, by their names; the model's own name is empty."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether some pattern, as a shell has them, is that of a module or of one around it, by its name."""
    parts = name.split(".")
    around = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatchcase(outer, pattern) for outer in around for pattern in patterns)


def check_patterns(patterns: Sequence[str], names: Collection[str], what: str) -> None:
    """Reject a pattern that names nothing.

    Args:
        patterns: of names, as :func:`is_named` has them.
        names: what they are to be names of.
        what: describes these.

    Raises:
        UserError: with the pattern, and the names nearest to it.
    """
    for pattern in patterns:
        if not any(is_named(name, [pattern]) for name in names):
            nearest = difflib.get_close_matches(pattern, filter(None, names), cutoff=0.0)
            hint = f"; the nearest names are {', '.join(map(repr, nearest))}" if nearest else ""
            raise UserError(f"approximate must name {what}, got {pattern!r}{hint}")


def run_first(
    tracer: Tracer, item: Any, answer: Callable[[str, int, Call], Any], run: Callable[[], Any]
) -> Any:
    """Run a model for the first time; on failure, report the input it fails on."""
    try:
        with trace_sdpa(tracer.model, answer):
            raw = run()
    except UserError:
        raise
    except CALL_ERRORS as failed:
        raise UserError(
            f"model must accept the inputs, got {describe_item(item)}: {describe_failure(failed)}"
        ) from failed
    if not tracer.sites:
        cause = bypass_in(tracer.model)
        raise UserError(
            "model must call F.scaled_dot_product_attention, "
            f"got a {type(tracer.model).__name__} that does not{f': {cause}' if cause else ''}"
        )
    if tracer.approximate is not None:
        what = "modules that call F.scaled_dot_product_attention"
        check_patterns(tracer.approximate, tracer.sites, what)
    return raw
