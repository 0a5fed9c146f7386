"""Small models shared by the tests of exported files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from dgt.acceleration import Report, Setting, inspect_model
from dgt.ops import attend, group_queries, select_keys
from dgt.runs import load_recipe
from dgt.runs.model import export_model, make_record
from dgt.tasks import TASKS

SMALL = {"stem_width": 8, "dims": [16, 32], "num_heads": [1, 2], "depths": [1, 1], "head_width": 24}


def make_run(folder: Path, name: str = "dgt_nano", **arguments: Any) -> Path:
    """A model folder as training writes it, with random weights and norms as after training."""
    settings = [
        f"--model.name={name}",
        "--model.drop_path_rate=null",
        f"--model.args={json.dumps(arguments)}",
    ]
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
    """A very small DGT: five groups, twenty keys, eight classes.

    Images of 32 pixels have 64 and 16 tokens: 16 is less than k, and up to 50 = 2 (k + G) tokens
        attend densely.
    """
    return make_run(tmp_path_factory.mktemp("export") / "dgt", num_groups=5, top_k=20, **SMALL)


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """The function :func:`make_run`."""
    return make_run


class Steps(nn.Module):
    """Pixels as tokens, two heads of three channels, through all three steps; returns each result."""

    num_groups, top_k = 6, 9

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Few directions, so that scores of small integers are exact and often equal.
        self.centroids = nn.Parameter(torch.randint(-1, 2, (2, self.num_groups, 3)).float())

    def forward(self, images: Tensor) -> list[Tensor]:
        tokens = images.flatten(2).transpose(1, 2)[:, None]  # (B, 1, H W, 3)
        query, key = torch.cat([tokens, -tokens], 1), torch.cat([tokens.flip(-1), tokens], 1)
        groups = group_queries(query, self.centroids)
        keys = select_keys(self.centroids, key, self.top_k)
        return [groups, keys, attend(query, key, key * 2 + 1, groups, keys)]


@pytest.fixture(scope="session")
def steps() -> Steps:
    """The three steps as a model."""
    return Steps().eval()


@pytest.fixture(scope="session")
def same_as_eager(steps: Steps) -> Callable[[Callable[[Tensor], list[Tensor]], Tensor], None]:
    """A check that an exported file of the steps gives their groups, keys (as sets), and output."""

    def check(run: Callable[[Tensor], list[Tensor]], images: Tensor) -> None:
        with torch.no_grad():
            groups, keys, output = steps(images)
        found_groups, found_keys, found_output = run(images)
        assert torch.equal(found_groups, groups)
        assert torch.equal(found_keys.sort(-1).values, keys)
        torch.testing.assert_close(found_output, output, rtol=1e-5, atol=1e-5)

    return check


def make_accelerated(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A small timm ViT, saved as timm does, and a plan that uses groups in its two layers."""
    torch.manual_seed(0)
    arguments = {"img_size": 64, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **arguments, num_classes=5).eval()
    model.pretrained_cfg["input_size"] = (3, 64, 64)
    save_for_hf(model, str(folder / "vit"), model_args=arguments, safe_serialization=True)
    found = inspect_model(model, torch.randn(1, 3, 64, 64))
    settings = {"choice": "groups", "groups": 8, "keys": 16, "residual_keys": 8, **changes}
    for site in found:
        site.name = settings.pop("name", site.name)
        site.measurement.setting = Setting(**settings)
    report = Report(
        asked_error=0.1,
        predicted_error=0.05,
        measured_error=0.05,
        attention_speedup=2.0,
        model_speedup=1.5,
        speedup_limit=3.0,
        layers=found,
        prefix_tokens_detected=True,
    )
    report.save(folder / "plan.json")
    return folder / "vit", folder / "plan.json"


@pytest.fixture
def accelerated_folder() -> Callable[..., tuple[Path, Path]]:
    """A function that saves a model and a plan for it in a folder."""
    return make_accelerated
