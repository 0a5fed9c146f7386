r"""Pictures of DINOv2-S on a photograph: its tokens before and after acceleration, and its groups
and their keys.

    python -m studies.figure_dinov2 --weights dinov2_small.safetensors --photograph face.dat \
        --out docs/images

`face.dat` is the photograph of a raccoon that SciPy before 1.12 ships (`scipy/misc/face.dat`),
1,024 x 768 pixels, in the public domain. Without `--plan`, a plan of `dgt.accelerate`, all layers
but the first three (`--dense`) use `dgt.clustered_attention` with `--share` of dense attention's
products. Writes two pictures, and the numbers for their captions to `--json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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
from dgt.figures import GroupPanel, figure_groups, save_figure
from dgt.figures.drawing import sheet, spread
from dgt.runs.environment import environment
from dgt.utils.atomic_write import write_json
from dgt.utils.errors import UserError
from studies.captured_attention import (
    EXACT,
    PATCH,
    Captured,
    attention_as,
    capture,
    load_dinov2,
    middle_of,
    read_photograph,
    to_tensor,
)
from studies.rival_attentions import residual_keys

Array = NDArray[Any]
LAYERS = (0, 4, 8, 11)  # whose groups are drawn
GROUPS, KEYS = 32, 64  # few enough to be visible
HEAD = 0
RESULTS = Path("benchmarks/results/figure_dinov2.json")
DENSE = "0,1,2"
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


class Shortcut(NamedTuple):
    """How a model is accelerated: by a plan, or with a share of the products in most layers."""

    plan: Path | None
    share: float
    dense: tuple[int, ...]

    def settings(self, tokens: int) -> dict[str, Any]:
        """Numbers of groups, residual keys, and keys in a layer that is not dense; none with a plan."""
        if self.plan:
            return {}
        parts = {"groups": 0.16, "residual": 0.25, "keys": 0.35}
        return {name: max(4, round(part * self.share * tokens)) for name, part in parts.items()}


@torch.inference_mode()
def tokens_of(model: nn.Module, image: Tensor, shortcut: Shortcut) -> Tokens:
    """Tokens after the prefix, from the unchanged model and from an accelerated one."""
    features: Callable[[Tensor], Tensor] = model.forward_features  # type: ignore[assignment]
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    before = features(image)[0, prefix:]
    if shortcut.plan is not None:
        dgt.apply_plan(model, shortcut.plan)
        return Tokens(before, features(image)[0, prefix:])
    grid, settings = grid_of(image), shortcut.settings(len(before))

    def answer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in shortcut.dense:
            return EXACT(query, key, value)
        return residual_keys(Captured(query, key, value, grid, prefix), **settings)

    with attention_as(answer):
        return Tokens(before, features(image)[0, prefix:])


def grid_of(image: Tensor) -> tuple[int, int]:
    """Numbers of rows and columns of patches."""
    return image.shape[2] // PATCH, image.shape[3] // PATCH


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
    parser.add_argument("--plan", type=Path, help="of dgt.accelerate, for the tokens")
    parser.add_argument("--share", type=float, default=0.2, help="of the products, without a plan")
    parser.add_argument("--dense", default=DENSE, help="layers that stay dense, without a plan")
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
    shortcut = Shortcut(options.plan, options.share, layers_in(options.dense))
    tokens = tokens_of(model, image, shortcut)
    save_figure(figure_tokens(photograph, tokens), options.out / "dinov2-tokens.png", dpi=120)
    found = {
        "photograph": options.photograph.name,
        "pixels": [photograph.width, photograph.height],
        "tokens": len(tokens.before),
        "plan": None if options.plan is None else options.plan.name,
        "share": options.share,
        "dense": list(shortcut.dense),
        "settings": shortcut.settings(len(tokens.before)),
        "error": tokens.error,
        "cosine": float(tokens.cosines.mean()),
        "lowest_hundredth": float(tokens.cosines.quantile(0.01)),
    }
    write_json(options.json, {**found, **environment()})


def layers_in(words: str) -> tuple[int, ...]:
    """Layer numbers from text such as `0,1,2`.

    Raises:
        UserError: If the text is anything else.
    """
    if not all(word.strip().isdecimal() for word in words.split(",") if words):
        raise UserError(f"--dense must be numbers of layers such as 0,1,2, got {words!r}")
    return tuple(int(word) for word in words.split(",") if words)


if __name__ == "__main__":
    sys.exit(main())
