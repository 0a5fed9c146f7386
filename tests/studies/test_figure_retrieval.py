"""The figure of retrieval: every row has its bar, and a missing row is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from studies.figure_retrieval import BARS, figure_retrieval
from studies.retrieval import FEWER_KEYS, ROWS


def content(seeds: int = 2) -> dict[str, Any]:
    """Made-up results for all rows."""
    by_top_k = [
        {"top_k": top_k, "accuracy": 20.0 + top_k / 4, "served": 1.0} for top_k in FEWER_KEYS
    ]
    runs = [
        {
            "row": row.name,
            "seed": seed,
            "accuracy": 40.0 + 10 * seed,
            **({"by_top_k": by_top_k} if row.top_k else {}),
        }
        for seed in range(seeds)
        for row in ROWS
    ]
    return {"settings": {"codes": 64, "values": 8}, "runs": runs}


def test_every_named_row_has_a_bar_and_every_number_of_groups_its_points() -> None:
    """Names match the experiment; bars are means over seeds."""
    law, bars = figure_retrieval(content()).axes
    legend = law.get_legend()
    assert legend is not None
    assert set(BARS) <= {row.name for row in ROWS}
    assert [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)] == [45.0] * len(
        BARS
    )
    assert [text.get_text() for text in legend.get_texts()] == ["G 1", "G 4", "G 16", "G 48"]
    heights = np.asarray(law.lines[0].get_ydata())
    assert heights.max() == 45.0  # global attention
    assert heights[0] == pytest.approx(12.5 + 0.7 / 64 * (45 - 12.5))


@pytest.mark.parametrize("name", ["global", "stripes"])
def test_a_missing_row_is_reported(name: str) -> None:
    """It is not silently left out."""
    some = content()
    some["runs"] = [run for run in some["runs"] if run["row"] != name]
    with pytest.raises(ValueError, match=f"row '{name}'"):
        figure_retrieval(some)
