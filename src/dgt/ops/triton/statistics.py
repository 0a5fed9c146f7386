# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The step of Eq. 4 for all centroids of a layer in one launch.

PyTorch takes about 25 small kernels for it.
"""

import triton
import triton.language as tl
from torch import Tensor

from dgt.ops.triton.common import load_rows, store_rows
from dgt.ops.triton.launch import launch, plan_launch, power_of_two

LEAST_LENGTH = tl.constexpr(1e-6)  # of a centroid that can be brought to unit norm
LEAST_NORM = tl.constexpr(1e-12)


@triton.jit
def move_rows(
    centroids, sums, counts, num_updates, rate, rows,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """Move all rows, R at a time, in one program; clear the sums and counts.

    IN_MEMORY: the rate is a tensor.
    """
    if IN_MEMORY:
        rate = tl.load(rate).to(tl.float32)
    any_counted = 0
    for first in range(0, rows, R):
        row = first + tl.arange(0, R)
        present = row < rows
        old = load_rows(centroids, row, D, present, D, DP)
        old = old / tl.maximum(tl.sqrt(tl.sum(old * old, 1)), LEAST_NORM)[:, None]
        total = load_rows(sums, row, D, present, D, DP)
        count = tl.load(counts + row, mask=present, other=0.0)
        moved = (1 - rate) * old + rate * (total / tl.maximum(count, 1.0)[:, None])
        length = tl.sqrt(tl.sum(moved * moved, 1))
        usable = (count > 0) & (length < float("inf")) & (length > LEAST_LENGTH)
        moved = moved / tl.maximum(length, LEAST_NORM)[:, None]
        store_rows(centroids, row, D, present, tl.where(usable[:, None], moved, old), D, DP)
        store_rows(sums, row, D, present, tl.zeros([R, DP], tl.float32), D, DP)
        tl.store(counts + row, tl.zeros([R], tl.float32), mask=present)
        any_counted = tl.maximum(any_counted, tl.max((count > 0).to(tl.int32), 0))
    tl.store(num_updates, tl.load(num_updates) + any_counted)


def move_centroids(
    centroids: Tensor, sums: Tensor, counts: Tensor, num_updates: Tensor, rate: float | Tensor
) -> None:
    """Move (H, G, D) centroids in place as :func:`dgt.ops.grouping.blend_centroids` does.

    The update is counted.

    ``sums``, (H, G, D), and ``counts``, (H, G), become zero; all are float32 and contiguous.
    ``num_updates``, int64 of no dimension, grows by one if any group has members.
    """
    channels, in_memory = centroids.shape[2], isinstance(rate, Tensor)
    plan = plan_launch(
        move_rows, 1, counts.numel(), D=channels, DP=power_of_two(channels), R=64,
        IN_MEMORY=in_memory, num_warps=8,
    )  # fmt: skip
    launch(plan, centroids, sums, counts, num_updates, rate)
