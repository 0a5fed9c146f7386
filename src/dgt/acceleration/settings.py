"""Settings of an attention call: a budget of pairs, split over groups, selected keys and residual keys."""

from dataclasses import dataclass, replace
from typing import NamedTuple

SHARES = (0.025, 0.05, 0.1, 0.2, 0.4)  # of the pairs of queries and keys, which are measured
GROUP_PART = 0.4  # of a budget; a group costs 2.5 pairs per key: its scores, its means, refining its centroid
GROUP_COST = 2.5
# Half of residual keys' part of a budget pays the means' keys and values, half refining the clusters. It falls on a
# line between small and large budgets, which are shares of the pairs.
RESIDUAL_PART = 0.25
LEAST_RESIDUAL_PART = 0.12
SMALL_SHARE = 0.1
LARGE_SHARE = 0.2


class Kind(NamedTuple):
    """What settings of several budgets have in common: the choice, and whether there are residual
    keys, to first order.
    """

    choice: str
    has_residual: bool
    first_order: bool


@dataclass(frozen=True)
class Setting:
    """How an attention call is computed.

    ``choice`` is "groups", "exact" (:func:`dgt.dense_attention`, where it is faster than PyTorch's),
    or "dense" (the original).
    """

    choice: str = "dense"
    groups: int = 0
    keys: int = 0
    """K: selected keys of a group."""
    residual_keys: int = 0
    """M: means of key clusters a group attends to."""
    first_order: bool = False
    """Whether what residual keys lose to first order is added."""
    least_tokens: int = 0
    """Shorter sequences are computed by the original attention."""
    most_batch: int | None = None
    """Larger batches are, too; None for no limit."""
    where_faster: bool = False
    """Whether PyTorch's attention runs instead at shapes where it is faster, as their first call is timed."""
    allowed_error: float | None = None
    """Of the attention's output on one input, as its guard estimates it; None for no guard."""
    share: float = 0.0
    """The budget that was split, a share of the pairs of queries and keys; 0 where it is not known."""

    def __str__(self) -> str:
        if self.choice == "groups":
            residual = f" + {self.residual_keys} residual" if self.residual_keys else ""
            order = ", first order" if self.first_order else ""
            return f"{self.groups} groups, {self.keys}{residual} keys{order}"
        if self.choice == "exact":
            return f"exact, native kernel{' where it is faster' if self.where_faster else ''}"
        return "dense"

    @property
    def kind(self) -> Kind:
        """What it has in common with settings of other budgets."""
        return Kind(self.choice, self.residual_keys > 0, self.first_order)


def split_budget(share: float, tokens: int, key_tokens: int, has_residual: bool) -> Setting:
    """Split a share of the pairs of L queries and S keys over groups, selected keys and residual
    keys.

    Of B = share S pairs a query, 0.4 go to groups, 0.25 to residual keys, and the rest to selected
    keys: at most a tenth of all pairs, that is within 8 % of the least error of twelve splits at equal
    products. From a fifth on, 0.12 for residual keys is as good or better, to first order clearly (0.7
    to 0.93 of the error), as its products grow with groups times residual keys. Measured in seven
    layers of DINOv2-S, on two photographs (``docs/log.md``). The counts are at least 1.
    """
    budget = share * key_tokens
    largeness = min(max((share - SMALL_SHARE) / (LARGE_SHARE - SMALL_SHARE), 0.0), 1.0)
    part = RESIDUAL_PART + (LEAST_RESIDUAL_PART - RESIDUAL_PART) * largeness
    groups = GROUP_PART * budget / GROUP_COST * tokens / key_tokens
    residual = part * budget / 2 if has_residual else 0.0
    keys = (1 - GROUP_PART) * budget - 2 * residual
    return Setting(
        "groups",
        groups=max(1, min(tokens, round(groups))),
        keys=max(1, min(key_tokens, round(keys))),
        residual_keys=max(1, round(residual)) if has_residual else 0,
        share=share,
    )


def scale_setting(setting: Setting, queries: float, keys: float) -> Setting:
    """The setting for sequences so many times as long: the same share of their pairs."""
    if queries == keys == 1:
        return setting
    residual = max(1, round(setting.residual_keys * keys)) if setting.residual_keys else 0
    return replace(
        setting,
        groups=max(1, round(setting.groups * queries)),
        keys=max(1, round(setting.keys * keys)),
        residual_keys=residual,
    )
