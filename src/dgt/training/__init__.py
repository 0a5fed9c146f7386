"""Training as users need it: recipes, runs with their folders, and the trained models opened again.

Importing this package needs the extra `train`; to open and apply trained models without it, use :mod:`dgt.runs`.
"""

from dgt.runs import LoadedRun, Prediction, Recipe, load_recipe, load_run, predict, shipped_recipes
from dgt.training.evaluation import evaluate
from dgt.training.fit import Result, fit

__all__ = [
    "LoadedRun",
    "Prediction",
    "Recipe",
    "Result",
    "evaluate",
    "fit",
    "load_recipe",
    "load_run",
    "predict",
    "shipped_recipes",
]
