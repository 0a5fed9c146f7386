"""Errors over inputs: relative error, its interval, and a bound for unseen inputs; cosines of outputs."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
"""Student's t, 95 % to one side, of 1 to 12 degrees of freedom."""
T_NORMAL = 1.645
USUAL_VARIANCE = 1.0  # of logarithms of squared errors between inputs, as trained models show
USUAL_WEIGHT = 6  # inputs that this counts like
UNSEEN = 32  # inputs at most that the bound is for together
COSINE_ROWS = 4096  # of an output, whose cosines are kept
ROUNDING = torch.finfo(torch.float32).eps ** 2
"""A squared relative error; how far smaller ones are apart is chance."""


def squares_between(after: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """(2,) float64: |after - before| and |before|, squared, over all tensors together."""
    pairs = [
        ((new - old).square().sum(), old.square().sum())
        for new, old in zip(after, before, strict=True)
    ]
    return torch.tensor(pairs, dtype=torch.float64).sum(0)


def relative_error(squares: Tensor) -> float:
    """|after - before| / |before| over all inputs together, of (inputs, 2) as
    :func:`squares_between`.
    """
    return float((squares[:, 0].sum() / squares[:, 1].sum().clamp(min=1e-30)).sqrt())


def half_interval(squares: Tensor) -> float | None:
    """Half of that error's 95 % interval, by the jackknife over inputs; None where nothing
    tells.
    """
    rest = squares.sum(0) - squares
    others = len(squares) - 1
    if others < 1 or not squares[:, 0].any():
        return None
    spread = (rest[:, 0] / rest[:, 1]).sqrt().std(correction=0) * others**0.5
    return (2 + 3 / others) * float(spread)  # about Student's t


def student_t(freedom: int) -> float:
    """Student's t, 95 % to one side."""
    if freedom <= len(T_95):
        return T_95[max(freedom, 1) - 1]
    return T_NORMAL + 1.5 / freedom


def error_bound(squares: Tensor) -> float:
    """An upper bound, at 95 %, of the error over unseen inputs of the same kind together.

    Squared errors of inputs are modeled as lognormal. With y their logarithms,
    relative to the squared norm of the output, over n inputs and s their standard deviation, the
    logarithm of their mean is estimated by ``mean(y) + s^2 / 2`` with variance ``s^2 / n + s^4 / (2
    nu)`` (Cox's method), and that of the mean of m unseen ones varies by ``log(1 + (exp(s^2) - 1) /
    m)`` itself; m is n, 32 at most. The bound is Student's t such deviations above that estimate,
    or above what was measured, whichever is more. A few inputs say little of s: an s of 1, as
    trained models show, counts like six inputs more, and nu is n + 5. Inputs beyond such a tail are
    what the guard is for.

    Args:
        squares: (inputs, 2), as :func:`squares_between`.
    """
    measured = relative_error(squares)
    count = len(squares)
    if not squares[:, 0].any() or count < 2:
        return measured
    shares = (squares[:, 0] / squares[:, 1].clamp(min=1e-30)).clamp(min=ROUNDING)
    logs = shares.log()
    freedom = count - 1 + USUAL_WEIGHT
    variance = float(logs.var()) * (count - 1) + USUAL_VARIANCE * USUAL_WEIGHT
    variance /= freedom
    estimate = float(logs.mean()) + variance / 2
    of_estimate = variance / count + variance**2 / (2 * freedom)
    of_others = math.log1p(math.expm1(min(variance, 50.0)) / min(count, UNSEEN))
    above = student_t(freedom) * math.sqrt(of_estimate + of_others)
    level = max(estimate, 2 * math.log(max(measured, 1e-15)))
    return math.exp((level + above) / 2)


def cosines_between(after: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """Cosines of the rows of outputs, their last dimension, before and after; evenly spaced ones
    of many.
    """
    cosines = []
    for new, old in zip(after, before, strict=True):
        width = old.shape[-1] if old.dim() > 1 else old.numel()
        rows_after = new.reshape(-1, width)
        rows_before = old.reshape(-1, width)
        step = math.ceil(len(rows_before) / COSINE_ROWS)
        cosines.append(F.cosine_similarity(rows_after[::step], rows_before[::step], dim=-1))
    return torch.cat(cosines)
