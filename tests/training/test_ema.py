"""Weight averaging: its decay, its arithmetic, the best of its validations, and centroids that stay
on the unit sphere."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dgt.runs import load_recipe, load_run
from dgt.runs.checkpoints import read_checkpoint, step_checkpoints
from dgt.runs.recipe import parse_recipe
from dgt.training import evaluate, fit
from dgt.training.average import WeightAverage, decay_at
from dgt.training.fabric import build_fabric
from dgt.training.fit import build_state


@pytest.mark.parametrize(("batch", "decay"), [(256, 0.9**0.25), (2048, 0.81)])
def test_the_decay_forgets_as_fast_image_for_image(batch: int, decay: float) -> None:
    recipe = parse_recipe(
        {"model": {"name": "test_resnet"}, "ema": {"decay": 0.9}, "trainer": {"accelerator": "cpu"}}
    )
    fabric = build_fabric(recipe.trainer)
    state = build_state(
        recipe, fabric, SimpleNamespace(num_classes=2, batch_size=batch), fresh=True
    )
    assert state.average is not None
    assert state.average.decay == pytest.approx(decay)


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 60))
def test_the_average_holds_the_weights_after_each_step_and_no_others(
    decay: float, steps: int
) -> None:
    """Also where d is 0, or so close to 1 that a plain average would still be the first weights."""
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(network.weight, 1e6)  # of the start
    average = WeightAverage(network, decay)
    after = torch.sin(torch.arange(1.0, steps + 1, dtype=torch.float64))
    for step, weight in enumerate(after, 1):
        nn.init.constant_(network.weight, float(weight))
        average.update(network, step)
    shares = torch.tensor(decay, dtype=torch.float64) ** torch.arange(steps - 1, -1, -1)
    expected = float((shares * after).sum() / shares.sum())
    assert average.module.weight.item() == pytest.approx(expected, abs=1e-9)


def test_after_many_steps_the_decay_is_the_recipes() -> None:
    assert decay_at(0.999, 40_000) == pytest.approx(0.999, rel=1e-15)
    assert decay_at(0.999, 1) == 0
    with pytest.raises(ValueError, match="step must be the number of averaged steps, from 1, got"):
        WeightAverage(nn.Linear(1, 1), 0.9).update(nn.Linear(1, 1), 0)


def test_a_weight_that_layers_share_is_averaged_once() -> None:
    layer, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    alone.load_state_dict(layer.state_dict())
    shared, single = (WeightAverage(nn.Sequential(*them), 0.9) for them in ([layer] * 2, [alone]))
    for step in (1, 2, 3):
        for each in (layer, alone):
            nn.init.constant_(each.weight, step)
        shared.update(nn.Sequential(layer, layer), step)
        single.update(nn.Sequential(alone), step)
    torch.testing.assert_close(shared.module[1].weight, single.module[0].weight)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_an_average_of_types_of_16_bits_loses_no_step(kind: torch.dtype) -> None:
    network = nn.Linear(8, 8, bias=False).to(kind)
    exact = WeightAverage(nn.Linear(8, 8, bias=False), 0.999)
    average, first = WeightAverage(network, 0.999), network.weight.detach().float()
    for step in range(1, 301):
        with torch.no_grad():
            network.weight.copy_(first * (1 + step / 300))
        average.update(network, step)
        exact.update(copy.deepcopy(network).float(), step)
    torch.testing.assert_close(average.module.weight, exact.module.weight)
    assert average.like(network).weight.dtype == kind
    assert exact.like(exact.module) is exact.module


def test_the_best_checkpoint_is_the_best_of_the_weights_that_are_written(tmp_path: Path) -> None:
    """Rates far too high, and a slow average: last weights, average and first weights differ."""
    overrides = ["--data.image_size=32", "--data.train_size=32", "--data.batch_size=16"]
    overrides += ["--data.val_size=40", "--schedule.epochs=3", "--schedule.warmup_epochs=0"]
    overrides += ["--optimizer.lr=0.3", "--optimizer.lr_batch=null", "--ema.decay=0.999999"]
    overrides += ["--model.name=test_resnet", "--trainer.accelerator=cpu"]
    folder = fit(load_recipe("scenes", [*overrides, f"--out={tmp_path / 'run'}"])).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validated = [row["val/top1"] for row in rows if "val/top1" in row]
    best = evaluate(folder / "checkpoints" / "best.ckpt")
    assert best["top1"] == max(validated)
    assert evaluate(folder)["top1"] == validated[-1]
    first = read_checkpoint(step_checkpoints(folder)[-1])
    assert not torch.equal(first["model"]["fc.weight"], first["model_ema"]["fc.weight"])


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
