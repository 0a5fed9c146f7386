"""Training as users need it: recipes, runs with their folders, and the trained models opened again."""

from dgt.tasks.base import LoadedRun, Prediction
from dgt.training.fit import Result, evaluate, fit
from dgt.training.recipe import Recipe, load_recipe, shipped_recipes
from dgt.training.run import load_run, predict

__all__ = ["LoadedRun", "Prediction", "Recipe", "Result"]
__all__ += ["evaluate", "fit", "load_recipe", "load_run", "predict", "shipped_recipes"]
