"""Whether an exported file computes what its source does, told before anybody relies on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dgt.inference.formats import Runner
from dgt.utils.errors import Disagreement

TOLERANCE = 1e-4
"""Largest difference of equal outputs, relative to the largest output or 1."""
BATCH = 3


@dataclass(frozen=True)
class Verification:
    """How an exported file and its source agreed.

    Args:
        images: how many images both got, one by one and in batches.
        equal: for how many of them all outputs were within `TOLERANCE`, and the largest of the logits the same.
        difference: the largest difference of all, relative to the largest output or 1.
    """

    images: int
    equal: int
    difference: float

    def __str__(self) -> str:
        return f"equal for {self.equal} of {self.images} images, largest difference {self.difference:.1e}"


@torch.inference_mode()
def verify(
    module: nn.Module, run: Runner, sizes: Sequence[tuple[int, int]], seed: int = 0, least: float = 0.5
) -> Verification:
    """Compare an exported file with its source on random images, in batches of three and one by one.

    Where two groups (or keys) are as near to a query (a centroid) as float32 can tell, rounding decides, and runtimes
    round differently: such an image may differ in some places. It is counted, and does not make the file wrong; a wrong
    graph fails for every image of a size.

    Args:
        module, run: the source and the exported file.
        sizes: heights and widths of images in pixels.
        seed: of the images.
        least: share of the images of every size whose outputs must be equal.

    Raises:
        RuntimeError: they are equal for less, or the file cannot be run.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[bool, float]] = []
    for height, width in sizes:
        images = torch.randn(BATCH, 3, height, width, generator=generator)
        here = [pair for batch in (images, *images.split(1)) for pair in _compare(module, run, batch)]
        if sum(equal for equal, _ in here) < least * len(here):
            raise Disagreement(
                f"the exported model is not equal to its source: images of {height} x {width} pixels differ by up to "
                f"{max(difference for _, difference in here):.1e}; nothing was written"
            )
        found += here
    return Verification(len(found), sum(equal for equal, _ in found), max(difference for _, difference in found))


def _compare(module: nn.Module, run: Runner, images: Tensor) -> list[tuple[bool, float]]:
    """For each image of a batch: whether the outputs are equal, and their largest relative difference."""
    expected = module(images)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    try:
        found = run(images)
    except Exception as error:  # of many kinds: whatever the other runtime raises
        what = f"images of {images.shape[2]} x {images.shape[3]} pixels: {str(error).strip().splitlines()[0]}"
        raise Disagreement(f"the exported model fails for {what}; nothing was written") from error
    if [output.shape for output in found] != [output.shape for output in expected]:
        return [(False, float("inf"))] * len(images)
    pairs = []
    for outputs in zip(*expected, *found, strict=True):
        both = list(zip(outputs[: len(expected)], outputs[len(expected) :], strict=True))
        relative = torch.stack([(ours - theirs).abs().max() / ours.abs().max().clamp(min=1) for ours, theirs in both])
        difference = float(relative.nan_to_num(torch.inf).max())
        same = all(ours.dim() > 1 or ours.argmax() == theirs.argmax() for ours, theirs in both)
        pairs.append((same and difference <= TOLERANCE, difference))
    return pairs
