"""benchmarks/photograph_figure.py draws groups and keys of a model over photographs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import dgt
from dgt.runs import load_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("residual_keys", [0, 1])
def test_groups_of_each_photograph_with_the_weights_of_their_keys(
    residual_keys: int, load_script: Callable[[Path], ModuleType], tmp_path: Path
) -> None:
    script = load_script(ROOT / "benchmarks" / "photograph_figure.py")
    run = load_run("dgt_nano.scenes")
    dgt.set_attention(run.network, residual_keys=residual_keys)
    panels = []
    for name, size in (("wide.png", (210, 130)), ("tall.png", (60, 110))):
        Image.effect_noise(size, 60).convert("RGB").save(tmp_path / name)
        panels.append(script.panel_of(run, tmp_path / name, 64, block=1, head=1))
    assert [panel.grid for panel in panels] == [(8, 12), (16, 8)]  # tokens of 8 pixels
    for panel in panels:
        sizes = np.bincount(panel.group_ids, minlength=len(panel.key_ids))
        sums = (panel.key_weights[sizes > 0] ** 2).sum(1)
        np.testing.assert_allclose(sums, 1, rtol=1e-5)
        assert (panel.residual_share is None) == (residual_keys == 0)
    figure = script.figure_groups(panels, [[1, 2], [3, 4]])
    assert len(figure.axes) == 2 * (1 + 2 * 2)
