"""Small models that the tests of exported files share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dgt.tasks import TASKS
from dgt.training import load_recipe
from dgt.training.run import export_model, make_record

SMALL = {"stem_width": 8, "dims": [16, 16, 32, 32], "num_heads": [1, 2, 2, 2], "depths": [1, 1, 1, 1], "head_width": 24}


def make_run(folder: Path, name: str = "dgt_nano", **arguments: Any) -> Path:
    """A model folder as a training leaves it, of a model with random weights and norms as after training."""
    settings = [f"--model.name={name}", "--model.drop_path_rate=null", f"--model.args={json.dumps(arguments)}"]
    recipe = load_recipe("scenes", [*settings, "--data.image_size=64"])
    classes = [f"class {i}" for i in range(8)]
    torch.manual_seed(3)
    network = TASKS["classify"].build(recipe.model, len(classes), 64)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, 0.0, 0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
        if isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(part.weight, 1.0, 0.2)
    export_model(folder, network, make_record(recipe, classes))
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small DGT: five groups, seven keys, eight classes."""
    return make_run(tmp_path_factory.mktemp("export") / "dgt", num_groups=5, top_k=7, **SMALL)


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """The function :func:`make_run`."""
    return make_run
