"""The average of the weights: its decay, its arithmetic, and centroids that stay on the unit sphere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dgt.training import fit, load_recipe, load_run
from dgt.training.state import WeightAverage, read_checkpoint, step_checkpoints


def test_the_decay_forgets_as_fast_image_for_image() -> None:
    def decay(stated: float, images: int) -> float:
        return WeightAverage(nn.Linear(1, 1), stated, images).decay

    assert decay(0.99992, 1024) == 0.99992
    assert decay(0.9, 256) ** 4 == pytest.approx(0.9)
    assert decay(0.9, 2048) == pytest.approx(0.81)


def test_the_average_is_exponential_and_counters_are_copied() -> None:
    network = nn.BatchNorm1d(2)
    averaged = WeightAverage(network, 0.75)
    expected: Tensor | None = None
    for step in range(4):
        with torch.no_grad():
            network.weight.fill_(float(step))
        network(torch.randn(8, 2))
        averaged.update(network, step + 1)
        now = network.weight.detach().clone()
        expected = now if expected is None else 0.75 * expected + 0.25 * now
    torch.testing.assert_close(averaged.module.weight.detach(), expected)
    assert int(averaged.module.num_batches_tracked) == int(network.num_batches_tracked) == 4


def test_a_trained_average_differs_and_keeps_centroids_of_unit_norm(tmp_path: Path) -> None:
    overrides = ["--data.image_size=32", "--data.train_size=48", "--data.batch_size=16", "--data.val_size=8"]
    overrides += ["--schedule.epochs=2", "--schedule.warmup_epochs=0", "--optimizer.lr=0.01", "--ema.decay=0.0000001"]
    folder = fit(load_recipe("scenes", [*overrides, "--trainer.accelerator=cpu", f"--out={tmp_path / 'run'}"])).folder
    stored = read_checkpoint(step_checkpoints(folder)[0])
    averaged, current = stored["state_dict"], stored["training_weights"]
    centroids = [key for key in averaged if key.endswith("centroids")]
    assert centroids
    for key in centroids:
        torch.testing.assert_close(averaged[key].norm(dim=-1), torch.ones(averaged[key].shape[:-1]), rtol=0, atol=1e-5)
        assert averaged[key].dtype == torch.float32
    assert any(not torch.equal(averaged[key], current[key]) for key in centroids)
    assert not torch.equal(averaged["head.fc.weight"], current["head.fc.weight"])
    exported = load_run(folder).network.state_dict()
    assert all(torch.equal(exported[key], averaged[key]) for key in averaged)
