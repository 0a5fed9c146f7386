"""Runs without training: recipes, the folder of a run, and the trained models in it, opened again
and used.

Nothing here needs the libraries of training: what predicts or exports a trained model imports this
package alone.
"""

from dgt.runs.model import load_run
from dgt.runs.prediction import predict
from dgt.runs.recipe import Recipe, load_recipe, shipped_recipes
from dgt.tasks.base import LoadedRun, Prediction

__all__ = [
    "LoadedRun",
    "Prediction",
    "Recipe",
    "load_recipe",
    "load_run",
    "predict",
    "shipped_recipes",
]
