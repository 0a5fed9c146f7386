"""Errors over inputs: relative error, its interval, a bound for unseen inputs together, and what single
ones may have; cosines of outputs.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.utils.errors import UserError

BEYOND = 0.05  # of the cases: how often the error of unseen inputs together may be above its bound
ONE_IN_TWENTY = 0.05
ONE_IN_THOUSAND = 0.001
# Of the error asked for, that the bound may be. Chosen by photographs of COCO, Imagenette and others
# (``docs/error.md``), which therefore do not test it.
TOGETHER = 0.5
SINGLE = 2.0  # times the error asked for, that one input in a thousand may have
USUAL_VARIANCE = 1.0  # of logarithms of squared errors between inputs, as trained models show
USUAL_WEIGHT = 6  # inputs that this counts like
LEAST_INPUTS = USUAL_WEIGHT + 1  # of fewer the spread is mostly the usual one
UNSEEN = 32  # inputs at most that the bound is for together
COSINE_ROWS = 4096  # of an output, whose cosines are kept
ROUNDING = torch.finfo(torch.float32).eps ** 2
"""A squared relative error; how far smaller ones are apart is chance."""


def squares_between(after: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """(2,) float64: |after - before| and |before|, squared, over all tensors together.

    Raises:
        UserError: they differ in number or sizes.
    """
    sizes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (after, before)]
    if sizes[0] != sizes[1]:
        raise UserError(
            "forward must return tensors whose number and sizes do not depend on values, as those of "
            f"detections do, got {sizes[0]} after {sizes[1]} with the original attention"
        )
    pairs = [
        ((new - old).square().sum(), old.square().sum())
        for new, old in zip(after, before, strict=True)
    ]
    return torch.tensor(pairs, dtype=torch.float64, device="cpu").sum(0)


def relative_error(squares: Tensor) -> float:
    """|after - before| / |before| over all inputs together, of (inputs, 2) as
    :func:`squares_between`.
    """
    return float((squares[:, 0].sum() / squares[:, 1].sum().clamp(min=1e-30)).sqrt())


def largest_error(squares: Tensor) -> float:
    """The largest relative error of single inputs, of (inputs, 2) as :func:`squares_between`."""
    return float((squares[:, 0] / squares[:, 1].clamp(min=1e-30)).max().sqrt())


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


def student_t(beyond: float, freedom: float) -> float:
    """The quantile of Student's t that is exceeded with a probability, by its expansion around the
    normal distribution's; within 0.03 of it from seven degrees of freedom on.
    """
    z = NormalDist().inv_cdf(1 - beyond)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


class Spread(NamedTuple):
    """Logarithms of the squared relative errors of inputs."""

    inputs: int
    mean: float
    variance: float
    """Of the inputs and, like :data:`USUAL_WEIGHT` inputs more, the usual one."""
    freedom: int
    """Degrees of freedom of the variance."""


def spread_of(squares: Tensor) -> Spread | None:
    """How errors differ between inputs; None where there are fewer than two, or no errors.

    Args:
        squares: (inputs, 2), as :func:`squares_between`.
    """
    count = len(squares)
    if not squares[:, 0].any() or count < 2:
        return None
    shares = (squares[:, 0] / squares[:, 1].clamp(min=1e-30)).clamp(min=ROUNDING)
    logs = shares.log()
    freedom = count - 1 + USUAL_WEIGHT
    variance = float(logs.var()) * (count - 1) + USUAL_VARIANCE * USUAL_WEIGHT
    return Spread(count, float(logs.mean()), variance / freedom, freedom)


def error_bound(squares: Tensor) -> float:
    """An upper bound, at 95 %, of the error over unseen inputs of the same kind together.

    Squared errors of inputs are modeled as lognormal. With y their logarithms,
    relative to the squared norm of the output, over n inputs and s their standard deviation, the
    logarithm of their mean is estimated by ``mean(y) + s^2 / 2`` with variance ``s^2 / n + s^4 / (2
    nu)`` (Cox's method), and that of the mean of m unseen ones varies by ``log(1 + (exp(s^2) - 1) /
    m)`` itself; m is n, 32 at most. The bound is Student's t such deviations above that estimate,
    or above what was measured, whichever is more. A few inputs say little of s: an s of 1, as
    trained models show, counts like six inputs more, and nu is n + 5.

    Args:
        squares: (inputs, 2), as :func:`squares_between`.
    """
    error = relative_error(squares)
    spread = spread_of(squares)
    if spread is None:
        return error
    variance = spread.variance
    estimate = spread.mean + variance / 2
    of_estimate = variance / spread.inputs + variance**2 / (2 * spread.freedom)
    of_others = math.log1p(math.expm1(min(variance, 50.0)) / min(spread.inputs, UNSEEN))
    above = student_t(BEYOND, spread.freedom) * math.sqrt(of_estimate + of_others)
    level = max(estimate, 2 * math.log(max(error, 1e-15)))
    return math.exp((level + above) / 2)


def single_error(squares: Tensor, share: float) -> float:
    """The error that a share of single unseen inputs of the same kind may exceed.

    With the model and the terms of :func:`error_bound`, the logarithm of the squared error of one
    input more is ``mean(y) + t s sqrt(1 + 1 / n)``: how differently inputs amplify what attention
    leaves out is in s. Shares below one in n are extrapolated by the lognormal model.

    Args:
        squares: (inputs, 2), as :func:`squares_between`.
        share: of the inputs.
    """
    spread = spread_of(squares)
    if spread is None:
        return relative_error(squares)
    deviation = math.sqrt(min(spread.variance, 50.0) * (1 + 1 / spread.inputs))
    above = student_t(share, spread.freedom) * deviation
    return math.exp((spread.mean + above) / 2)


def single_errors(squares: Tensor) -> tuple[float, float] | tuple[None, None]:
    """What one unseen input in twenty may exceed, and one in a thousand; None where too few inputs would
    say it.

    Args:
        squares: (inputs, 2), as :func:`squares_between`.
    """
    if len(squares) < LEAST_INPUTS:
        return None, None
    return single_error(squares, ONE_IN_TWENTY), single_error(squares, ONE_IN_THOUSAND)


def least_request(squares: Tensor) -> float:
    """The least error that may have been asked for, given the errors of some inputs.

    With it the bound for unseen inputs together is half of it, one input in twenty may be above
    it, and one in a thousand above twice as much.

    Args:
        squares: (inputs, 2), as :func:`squares_between`.
    """
    return max(
        error_bound(squares) / TOGETHER,
        single_error(squares, ONE_IN_TWENTY),
        single_error(squares, ONE_IN_THOUSAND) / SINGLE,
    )


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
