"""The contents of `results.json` for a finished training."""

from __future__ import annotations

from typing import Any

from dgt.runs.environment import environment
from dgt.runs.recipe import Recipe
from dgt.tasks.optim import batch_scale
from dgt.training.state import TrainingState


def results(recipe: Recipe, state: TrainingState) -> dict[str, Any]:
    """Collect the result of a run: its settings, metrics, cost, and the machine and versions that
    it ran on.
    """
    progress = state.progress
    return {
        "recipe": recipe.name,
        "task": recipe.task,
        "model": recipe.model.name,
        "seed": recipe.seed,
        "metrics": progress.metrics,
        "best": progress.best,
        "epochs": progress.epoch,
        "steps": progress.step,
        "seconds": round(progress.seconds, 2),
        "skipped_steps": progress.skipped,
        "global_batch": state.global_batch,
        "precision": state.fabric.strategy.precision.precision,
        "parameters": sum(parameter.numel() for parameter in state.network.parameters()),
        "learning_rate": recipe.optimizer.lr * batch_scale(recipe.optimizer, state.global_batch),
        "broken_images": sum(len(report) for report in state.data.broken_images.values()),
        **environment(),
    }
