"""The figure of other keys: one line per selector in both panels."""

from __future__ import annotations

import pytest

from studies.figure_fixed_weights import STYLES, figure_fixed_weights
from studies.key_selectors import SELECTORS


@pytest.mark.parametrize(
    ("tokens", "tick"), [({"a": 100, "b": 100}, "4\n4 %"), ({"a": 100, "b": 50}, "4")]
)
def test_every_choice_has_its_line(tokens: dict[str, int], tick: str) -> None:
    """Names match the experiments; k is shown with its share if that is the same for all layers."""
    assert set(STYLES) == set(SELECTORS)
    rows = [
        {
            "choice": choice,
            "top_k": k,
            "agreement": 0.9,
            "divergence": 0.0,
            "agreement_half": 0.1,
            "divergence_half": 0.1,
        }
        for k in (16, 4)
        for choice in SELECTORS
    ]
    figure = figure_fixed_weights({"rows": rows, "tokens": tokens})
    assert [len(axes.containers) for axes in figure.axes] == [len(SELECTORS)] * 2
    assert figure.axes[0].get_xticklabels()[0].get_text() == tick
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(STYLES)


def test_no_rows_are_told() -> None:
    """A clear error."""
    with pytest.raises(ValueError, match="at least one row"):
        figure_fixed_weights({"rows": [], "tokens": {}})
