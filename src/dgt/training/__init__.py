"""Training: fit a recipe, resume to the bit, evaluate.

Importing this package needs the extra `train`; recipes and trained models, opened again, are in :mod:`dgt.runs`.
"""

from dgt.training.evaluation import evaluate
from dgt.training.fit import Result, fit

__all__ = ["Result", "evaluate", "fit"]
