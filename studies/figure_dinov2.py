r"""Pictures of DINOv2-S on a photograph: its tokens before and after acceleration, and its groups
and their keys.

    python -m studies.figure_dinov2 --weights dinov2_small.safetensors --photograph face.dat \
        --out docs/images

`face.dat` is the photograph of a raccoon that SciPy before 1.12 ships (`scipy/misc/face.dat`),
1,024 x 768 pixels, in the public domain. The model is accelerated by `--plan`, a file or the name of
a plan that comes with the package. Writes two pictures, and the numbers for their captions to
`--json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import dgt
from dgt.acceleration.check import total_counts
from dgt.figures import GroupPanel, figure_groups, save_figure
from dgt.figures.drawing import sheet, spread
from dgt.runs.environment import environment
from dgt.utils.errors import UserError
from dgt.utils.records import write_record
from studies.captured_attention import (
    PATCH,
    Captured,
    capture,
    load_dinov2,
    middle_of,
    read_photograph,
    to_tensor,
)

Array = NDArray[Any]
LAYERS = (0, 4, 8, 11)  # whose groups are drawn
GROUPS, KEYS = 32, 64  # few enough to be visible
HEAD = 0
RESULTS = Path("benchmarks/results/figure_dinov2.json")
PLAN = "vit_small_patch14_dinov2.lvd142m@1036-0.05"
MOST_ERROR = 0.2  # of a token; drawn brightest


class Tokens(NamedTuple):
    """Patch tokens (L, D) of one image, dense and accelerated."""

    before: Tensor
    after: Tensor

    @property
    def error(self) -> float:
        """Relative error over all tokens."""
        return float((self.after - self.before).norm() / self.before.norm())

    @property
    def cosines(self) -> Tensor:
        """(L,): of each token before with the same token after."""
        return F.cosine_similarity(self.before, self.after, dim=-1)


@torch.inference_mode()
def tokens_of(model: nn.Module, image: Tensor, plan: str) -> Tokens:
    """Patch tokens of an image, from the model as it is, and then accelerated by a plan."""
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    before = model.forward_features(image)[0, prefix:]  # type: ignore[operator]
    dgt.apply_plan(model, plan)
    after = model.forward_features(image)[0, prefix:]  # type: ignore[operator]
    return Tokens(before, after)


def as_colors(tokens: Tokens) -> tuple[Array, Array]:
    """Two (L, 3) in [0, 1]: both on the first three principal components of the dense tokens."""
    mean = tokens.before.mean(0)
    axes = torch.linalg.svd(tokens.before - mean, full_matrices=False).Vh[:3].T
    parts = [(part - mean) @ axes for part in tokens]
    low, high = (parts[0].quantile(level, dim=0) for level in (0.01, 0.99))
    before, after = (((part - low) / (high - low)).clamp(0, 1).numpy() for part in parts)
    return before, after


def figure_tokens(photograph: Image.Image, tokens: Tokens) -> Figure:
    """The photograph, its tokens' principal components before and after, and each token's change."""
    image = np.asarray(photograph) / 255
    grid = (photograph.height // PATCH, photograph.width // PATCH)
    before, after = (spread(colors.reshape(*grid, 3), image.shape) for colors in as_colors(tokens))
    moved = (tokens.after - tokens.before).norm(dim=-1) / tokens.before.norm(dim=-1)
    light = (moved / MOST_ERROR).clamp(max=1).numpy().reshape(grid)
    distance = colormaps["magma"](spread(light, image.shape))[..., :3]
    cells = [
        (image, (1, 1), f"photograph, {photograph.width} x {photograph.height} px"),
        (before, (1, 1), "its tokens: dense attention"),
        (after, (1, 1), "its tokens: accelerated"),
        (distance, (1, 1), f"how far they moved: black 0, brightest {100 * MOST_ERROR:.0f} %"),
    ]
    return sheet(cells, 2, 3.3)


def panel_of(photograph: Image.Image, call: Captured, title: str) -> GroupPanel:
    """Groups of one head's queries, and the keys that score highest with the mean query of each."""
    queries, keys = (part[:, HEAD : HEAD + 1, call.prefix :] for part in (call.query, call.key))
    clusters = dgt.cluster_tokens(queries, GROUPS)
    scores = clusters.centroids[0, 0] @ keys[0, 0].T * queries.shape[-1] ** -0.5
    best = scores.softmax(-1).topk(KEYS)
    return GroupPanel(
        np.asarray(photograph),
        call.grid,
        clusters.ids[0, 0],
        best.indices,
        title,
        best.values,
    )


def figure_groups_of_layers(photograph: Image.Image, calls: dict[int, Captured]) -> Figure:
    """One row per layer: three groups of queries and their keys."""
    panels = [panel_of(photograph, call, f"layer {layer}") for layer, call in calls.items()]
    return figure_groups(panels, 3)


def main() -> int:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--photograph", type=Path, required=True)
    parser.add_argument("--plan", default=PLAN, help="that accelerates the model")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    try:
        draw(options)
    except (UserError, OSError) as error:
        print(f"figure_dinov2: error: {error}", file=sys.stderr)
        return 2
    return 0


def draw(options: argparse.Namespace) -> None:
    """Write the pictures and the numbers for their captions."""
    model = load_dinov2(options.weights)
    whole = read_photograph(options.photograph)
    size = (whole.height // PATCH * PATCH, whole.width // PATCH * PATCH)
    photograph = middle_of(whole, *size)
    image = to_tensor(photograph)
    calls = capture(model, image, LAYERS)
    save_figure(
        figure_groups_of_layers(photograph, calls), options.out / "dinov2-groups.png", dpi=120
    )
    tokens = tokens_of(model, image, options.plan)
    save_figure(figure_tokens(photograph, tokens), options.out / "dinov2-tokens.png", dpi=120)
    found = {
        "photograph": options.photograph.name,
        "pixels": [photograph.width, photograph.height],
        "tokens": len(tokens.before),
        "plan": options.plan,
        "guard_acted": total_counts(model)[1],
        "error": tokens.error,
        "cosine": float(tokens.cosines.mean()),
        "lowest_hundredth": float(tokens.cosines.quantile(0.01)),
    }
    write_record(options.json, {**found, **environment()})


if __name__ == "__main__":
    sys.exit(main())
