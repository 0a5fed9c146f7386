"""The parts that the model card of a folder of weights must have.

`tools/weights_card.py` writes such cards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dgt.utils.errors import UserError

SECTIONS = ("Use", "Data", "License", "Training", "Metrics", "Not good for")


def check_card(path: Path, metrics: Sequence[str]) -> None:
    """Check that a card is complete.

    Args:
        path: of the card.
        metrics: the metrics that were measured; each needs a row with an interval.

    Raises:
        UserError: a section or a row is missing.
    """
    parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8", errors="replace"), flags=re.M)
    sections = {
        title.strip(): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    missing = [section for section in SECTIONS if not sections.get(section)]
    if missing:
        raise UserError(f"the card {path} is incomplete: it lacks {', '.join(map(repr, missing))}")
    rows = re.findall(
        r"^\|[^|]+\| +[\d.]+ % \| +[\d.]+ to [\d.]+ % +\|", sections["Metrics"], flags=re.M
    )
    if not metrics or len(rows) < len(metrics):
        raise UserError(
            f"the card {path} lists {len(rows)} metrics with an interval, but {len(metrics)} were measured"
        )
