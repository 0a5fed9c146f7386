"""Weight averaging: its decay, its arithmetic, and centroids that stay on the unit sphere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dgt.runs import load_recipe, load_run
from dgt.runs.checkpoints import read_checkpoint, step_checkpoints
from dgt.runs.recipe import parse_recipe
from dgt.tasks import TASKS
from dgt.training import fit
from dgt.training.fabric import build_fabric
from dgt.training.fit import build_state


@pytest.mark.parametrize(("batch", "decay"), [(256, 0.9**0.25), (2048, 0.81)])
def test_the_decay_forgets_as_fast_image_for_image(batch: int, decay: float) -> None:
    recipe = parse_recipe(
        {"model": {"name": "test_resnet"}, "ema": {"decay": 0.9}, "trainer": {"accelerator": "cpu"}}
    )
    fabric = build_fabric(recipe.trainer, TASKS["classify"])
    state = build_state(
        recipe, fabric, SimpleNamespace(num_classes=2, batch_size=batch), fresh=True
    )
    assert state.average is not None
    assert state.average.decay == pytest.approx(decay)


def test_a_trained_average_differs_and_keeps_centroids_of_unit_norm(tmp_path: Path) -> None:
    overrides = [
        "--data.image_size=32",
        "--data.train_size=48",
        "--data.batch_size=16",
        "--data.val_size=8",
    ]
    overrides += [
        "--schedule.epochs=2",
        "--schedule.warmup_epochs=0",
        "--optimizer.lr=0.01",
        "--ema.decay=0.0000001",
    ]
    folder = fit(
        load_recipe(
            "scenes", [*overrides, "--trainer.accelerator=cpu", f"--out={tmp_path / 'run'}"]
        )
    ).folder
    stored = read_checkpoint(step_checkpoints(folder)[0])
    averaged, current = stored["model_ema"], stored["model"]
    centroids = [key for key in averaged if key.endswith("centroids")]
    assert centroids
    for key in centroids:
        torch.testing.assert_close(
            averaged[key].norm(dim=-1), torch.ones(averaged[key].shape[:-1]), rtol=0, atol=1e-5
        )
        assert averaged[key].dtype == torch.float32
    assert any(not torch.equal(averaged[key], current[key]) for key in centroids)
    assert not torch.equal(averaged["head.fc.weight"], current["head.fc.weight"])
    exported = load_run(folder).network.state_dict()
    assert all(torch.equal(exported[key], averaged[key]) for key in averaged)
