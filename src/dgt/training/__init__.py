"""Training as users need it: recipes, runs with their folders, and the trained models opened again.

Importing this package needs the extra `train`; what opens and applies trained models alone is
:mod:`dgt.runs`.
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
