"""Settings of an attention call: a budget of pairs, split over groups, selected keys and residual keys."""

from dataclasses import dataclass
from typing import NamedTuple

from dgt.acceleration.special_tokens import FrameTokens, SpecialTokens

SHARES = (0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)  # of the pairs of queries and keys
GROUP_PART = 0.4  # of a budget; a group costs 2.5 pairs per key: its scores, its means, refining its centroid
GROUP_COST = 2.5
RESIDUAL_PART = (
    0.25  # of a budget; half of it pays the means' keys and values, half refining the clusters
)


@dataclass(frozen=True)
class LayerReport:
    """One call site of attention: its choice, and what was measured.

    ``choice`` is "groups", "exact" (:func:`dgt.dense_attention`, faster than PyTorch's there), or
    "dense" (PyTorch's), ``reason`` why it is dense. ``error`` is relative, of this attention's
    output alone; times are milliseconds for one input. ``note`` says what was assumed.
    """

    name: str
    """Of the module that calls attention."""
    choice: str
    reason: str = ""
    heads: int = 0
    tokens: int = 0
    """L: queries."""
    channels: int = 0
    prefix: int = 0
    """How many class, register or other special tokens a sequence has."""
    groups: int = 0
    keys: int = 0
    """K: selected keys of a group."""
    error: float = 0.0
    ms_before: float = 0.0
    ms_after: float = 0.0
    note: str = ""
    call: int = 0
    """Which of its module's calls this is, from 0."""
    calls: int = 1
    """How many calls of the module in one forward pass this stands for."""
    key_tokens: int = 0
    """S: keys; L where attention is within one sequence."""
    residual_keys: int = 0
    """M: means of key clusters a group attends to."""
    shared_clusters: bool = False
    """Whether all heads share one clustering of keys."""
    places: list[int] | None = None
    """Where the special tokens are; None for the start of the sequence."""
    frame: list[int] | None = None
    """``[count, period]`` where the special tokens are the first of every frame."""
    least_tokens: int = 0
    """Shorter sequences are left unchanged."""
    most_batch: int | None = None
    """Larger batches are left unchanged; None for no limit."""
    sequences: int = 1
    """B: of a call; more than inputs where attention is within windows."""
    breadth: float = 0.0
    """Mean perplexity of the attention of sampled queries, in keys."""

    @property
    def title(self) -> str:
        """Name of the call site, with the number of the call if its module makes several."""
        name = self.name or "(the model)"
        return f"{name} call {self.call + 1}" if self.call else name

    @property
    def special(self) -> SpecialTokens:
        """Where its special tokens are, as ``special_tokens`` gives them."""
        if self.frame is not None:
            return FrameTokens(*self.frame)
        return self.prefix if self.places is None else self.places


class Split(NamedTuple):
    """A budget, split."""

    groups: int
    keys: int
    residual_keys: int


def split_budget(share: float, tokens: int, key_tokens: int, has_residual: bool) -> Split:
    """Split a share of the pairs of L queries and S keys over groups, selected keys and residual
    keys.

    Of B = share S pairs a query, 0.4 go to groups, 0.25 to residual keys, and the rest to selected
    keys; that was within 7 % of the best split's error on average over models, layers and budgets.
    The counts are at least 1.
    """
    budget = share * key_tokens
    groups = GROUP_PART * budget / GROUP_COST * tokens / key_tokens
    residual = RESIDUAL_PART * budget / 2 if has_residual else 0.0
    keys = (1 - GROUP_PART) * budget - 2 * residual
    return Split(
        groups=max(1, min(tokens, round(groups))),
        keys=max(1, min(key_tokens, round(keys))),
        residual_keys=max(1, round(residual)) if has_residual else 0,
    )


def scale_split(row: LayerReport, tokens: int, key_tokens: int) -> Split:
    """The split of a row for sequences of other lengths: the same share of their pairs."""
    if tokens == row.tokens and key_tokens == row.key_tokens:
        return Split(row.groups, row.keys, row.residual_keys)
    queries = tokens / row.tokens
    keys = key_tokens / row.key_tokens
    residual = max(1, round(row.residual_keys * keys)) if row.residual_keys else 0
    return Split(
        groups=max(1, round(row.groups * queries)),
        keys=max(1, round(row.keys * keys)),
        residual_keys=residual,
    )
