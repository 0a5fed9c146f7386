"""How a budget is split between groups, residual keys, and selected keys."""

from __future__ import annotations

# The budget is a share of L keys per query; this split is close to the best (docs/residual_keys.md).
GROUPS_SHARE, RESIDUAL_SHARE, KEYS_SHARE = 0.16, 0.25, 0.35


def split_budget(tokens: int, share: float) -> dict[str, int]:
    """Groups, residual keys, and keys per group for a share of dense attention's products."""
    pairs = share * tokens
    return {
        "groups": max(4, round(GROUPS_SHARE * pairs)),
        "residual": max(2, round(RESIDUAL_SHARE * pairs)),
        "keys": max(4, round(KEYS_SHARE * pairs)),
    }
