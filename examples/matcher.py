"""Accelerate a matcher: kornia's LightGlue, first with all its attention in PyTorch's own function, then in groups.

    python examples/matcher.py [WEIGHTS] [--pairs N] [--points N] [--error E]

On CPUs kornia computes self-attention by `F.scaled_dot_product_attention`, cross-attention by products of whole
matrices. `CrossAttention` is the same, with the same weights, in that function: exact and faster. There
`dgt.accelerate` sees it, and has it done in groups as far as the error allows; self-attention stays exact.

WEIGHTS is a file of LighterGlue for XFeat, `xfeat-lighterglue.pt`; without one they are random, and so are the
keypoints: take those of your own pairs of photographs. Needs `kornia`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kornia.feature.lightglue import CrossBlock, LightGlue
from torch import Tensor

import dgt

LIGHTERGLUE = {
    "features": None,  # weights come later
    "input_dim": 64,
    "descriptor_dim": 96,
    "n_layers": 6,
    "num_heads": 1,
    "depth_confidence": -1,
    "width_confidence": -1,  # keep all points: those that are left differ in number between layers
}


class CrossAttention(CrossBlock):
    """kornia's cross-attention, by `F.scaled_dot_product_attention` on every device and in every type."""

    def forward(self, x0: Tensor, x1: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map the (B, L, C) tokens of one image and the (B, S, C) of the other to the same shapes.

        `mask` is bool (B, 1, L, S), True where both tokens are real.
        """
        swapped = None if mask is None else mask.mT
        return self.look(x0, x1, mask), self.look(x1, x0, swapped)

    def look(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens of one image after they have looked at those of the other."""
        projected = (self.to_qk(x), self.to_qk(context), self.to_v(context))
        query, key, value = (
            tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2) for tokens in projected
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        message = self.to_out(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(torch.cat([x, message], -1))


def put_into_sdpa(matcher: LightGlue) -> None:
    """Have a matcher's cross-attention computed by `F.scaled_dot_product_attention`; its weights stay."""
    for layer in matcher.transformers:
        layer.cross_attn.__class__ = CrossAttention


def make_matcher(weights: str | None) -> LightGlue:
    """LighterGlue with all its attention in `F.scaled_dot_product_attention`."""
    torch.manual_seed(0)
    matcher = LightGlue(**LIGHTERGLUE).eval()
    if weights is not None:
        load_weights(matcher, weights)
    put_into_sdpa(matcher)
    return matcher


def load_weights(matcher: LightGlue, file: str | Path) -> None:
    """Load LighterGlue's weights, whose names are others than those of kornia's modules; the file also holds
    its features, which stay out.
    """
    prefix = "matcher."
    numbered = r"^(self_attn|cross_attn)\.(\d+)"
    found = {
        re.sub(numbered, r"transformers.\2.\1", name.removeprefix(prefix)): weight
        for name, weight in torch.load(file, map_location="cpu", weights_only=True).items()
        if name.startswith(prefix)
    }
    matcher.load_state_dict({**matcher.state_dict(), **found})


def random_pair(seed: int, points: int) -> dict[str, dict[str, Tensor]]:
    """Keypoints of two images of 1000 x 1000 pixels and their descriptors: the second are the first, moved a
    little, in another order, and fewer.
    """
    draws = torch.Generator().manual_seed(seed)
    keypoints = torch.rand(1, points, 2, generator=draws) * 900
    descriptors = F.normalize(torch.randn(1, points, 64, generator=draws), dim=-1)
    size = torch.tensor([[1000.0, 1000.0]])
    order = torch.randperm(points, generator=draws)[: points - points // 10]
    first = {"keypoints": keypoints, "descriptors": descriptors, "image_size": size}
    second = {
        "keypoints": keypoints[:, order] + 50,
        "descriptors": descriptors[:, order],
        "image_size": size,
    }
    return {"image0": first, "image1": second, "truth": {"first": order}}


def forward(matcher: LightGlue, item: tuple[dict[str, Any]]) -> dict[str, Any]:
    """What the error is measured on, the probabilities of all assignments; and the matches, for the metric."""
    found = matcher(item[0])
    return {"assigned": found["log_assignment"].exp(), "matches": found["matches"][0]}


def main() -> None:
    """Accelerate a matcher on some pairs, and print what it does."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("weights", nargs="?")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--points", type=int, default=2048)
    parser.add_argument("--error", type=float, default=0.5)
    options = parser.parse_args()
    matcher = make_matcher(options.weights)
    pairs = [random_pair(seed, options.points) for seed in range(options.pairs)]

    def correct_matches(outputs: list[dict[str, Any]]) -> float:
        correct = 0
        for pair, found in zip(pairs, outputs, strict=True):
            first, second = found["matches"].T
            correct += int((pair["truth"]["first"][second] == first).sum())
        return correct

    items = [(pair,) for pair in pairs]
    report = dgt.accelerate(
        matcher,
        items,
        options.error,
        forward=forward,
        metric=correct_matches,
        approximate="*.cross_attn",
        num_prefix_tokens=0,
    )
    print(report)


if __name__ == "__main__":
    main()
