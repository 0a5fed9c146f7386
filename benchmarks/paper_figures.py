"""Figures 1 and 2 of the paper, redrawn from the modules of this package: `python
benchmarks/paper_figures.py RUN`.

RUN is a classifier of the scenes (`dgt demo`). What a query sees is not drawn by hand but found by
running the layer: the tokens that its output depends on have a gradient. Groups and keys are those
of the trained model; the numbers in the drawing of the architecture are computed for DGT-T. Writes
docs/images/attention-patterns.png and architecture.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn

from dgt.data.scenes import draw_scene
from dgt.figures import GroupPanel, choose_groups, panels_of, save_figure
from dgt.figures.drawing import dimmed, group_colors, lights, lit, spread
from dgt.layers import GlobalAttention
from dgt.layers.baselines.cmt import ReducedAttention
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.swin import WindowAttention
from dgt.models import cost, group_records
from dgt.runs import load_run

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIDE = 16  # tokens, of the model's first stage
RED, BLUE = np.array([0.9, 0.25, 0.2]), np.array([0.2, 0.5, 0.95])


def sees(attention: Callable[[Tensor], Tensor], query: tuple[int, int]) -> Any:
    """The tokens that the output at a place of the map depends on, (SIDE, SIDE) of 0 and 1."""
    x = torch.randn(1, SIDE, SIDE, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    attention(x)[0, query[0], query[1]].sum().backward()
    assert x.grad is not None
    return (x.grad[0].abs().sum(-1) > 0).float().numpy()


def shuffled(attention: nn.Module) -> Callable[[Tensor], Tensor]:
    """Attention of the Shuffle Transformer: the tokens of a window are as far apart as there are
    windows in a row.
    """

    def apply(x: Tensor) -> Tensor:
        order = torch.arange(SIDE).view(4, 4).T.flatten()
        back = order.argsort()
        found: Tensor = attention(x[:, order][:, :, order])
        return found[:, back][:, :, back]

    return apply


def figure_patterns(panel: GroupPanel, queries: tuple[tuple[int, int], tuple[int, int]]) -> Figure:
    """Figure 1: what two queries of a scene see with six kinds of attention."""
    torch.manual_seed(0)
    patterns: dict[str, Callable[[Tensor], Tensor]] = {
        "(a) all keys (ViT)": GlobalAttention(8, 2),
        "(b) shifted windows (Swin)": WindowAttention(8, 2, window=4, shift=2),
        "(c) crossed stripes (CSWin)": StripeAttention(8, 2, width=2),
        "(d) shuffled windows (Shuffle)": shuffled(WindowAttention(8, 2, window=4)),
        "(e) 4 x 4 tokens a key (PVT, CMT)": ReducedAttention(8, 2, ratio=4),
    }
    seen = {
        name: [sees(attention, query) for query in queries] for name, attention in patterns.items()
    }
    groups = [int(panel.group_ids[row * SIDE + column]) for row, column in queries]
    keys = [(lights(panel, group)[1] > 0).astype(float) for group in groups]
    seen[f"(f) dynamic groups, k = {panel.key_ids.shape[1]} (DGT)"] = keys
    figure = Figure(figsize=(9, 6.2), layout="constrained", facecolor="white")
    image = panel.image / 255
    for axes, (name, (red, blue)) in zip(figure.subplots(2, 3).flat, seen.items(), strict=True):
        amount = [spread(part, image.shape)[..., None] * 0.55 for part in (red, blue)]
        shown = dimmed(image) * (1 - np.maximum(*amount)) + image * 0.45 * np.maximum(*amount)
        show(axes, np.clip(shown + amount[0] * RED * 0.8 + amount[1] * BLUE * 0.8, 0, 1), name)
        grid(axes, 4 if name.startswith("(e)") else 1)
        for (row, column), color in zip(queries, (RED, BLUE), strict=True):
            axes.plot(
                column,
                row,
                "o",
                color=color,
                markersize=8,
                markeredgecolor="white",
                markeredgewidth=1.5,
            )
    return figure


def show(axes: Axes, image: Any, title: str) -> None:
    """Show an image, in units of tokens, under a title."""
    axes.imshow(image, extent=(-0.5, SIDE - 0.5, SIDE - 0.5, -0.5), interpolation="nearest")
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set(xticks=[], yticks=[])


def grid(axes: Axes, step: int) -> None:
    """Draw lines between tokens, or between squares of them."""
    for place in np.arange(-0.5, SIDE, step):
        axes.axhline(place, color="white", linewidth=0.3, alpha=0.35)
        axes.axvline(place, color="white", linewidth=0.3, alpha=0.35)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draw a rounded box with centered text."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, "round,pad=0,rounding_size=0.06", fc=color, ec="#555555"
        )
    )
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, linespacing=1.35
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow between two points."""
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": "#333333", "lw": 1, "shrinkA": 0, "shrinkB": 0},
    )


def figure_architecture(panel: GroupPanel) -> Figure:
    """Figure 2: the model with its counts, one block, and DG-Attention on a scene."""
    figure = Figure(figsize=(11, 6.4), layout="constrained", facecolor="white")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.45)).flat
    _draw_stages(above.subplots())
    left, right = below.subfigures(1, 2, width_ratios=(1, 3.4))
    _draw_block(left.subplots())
    _draw_attention(right, panel)
    return figure


def _draw_stages(axes: Axes) -> None:
    model: Any = timm.create_model("dgt_tiny", device="meta").eval()
    shapes: list[tuple[int, ...]] = []
    hooks = [
        m.register_forward_hook(lambda *a: shapes.append(tuple(a[2].shape)))
        for m in (model.stem, *model.stages)
    ]
    model(torch.empty(1, 3, 224, 224, device="meta"))
    for hook in hooks:
        hook.remove()
    parts = cost(model).stages
    texts = ["stem\n3 convolutions 3 x 3"]
    for i, stage in enumerate(model.stages):
        attention = stage.blocks[0].attn
        kind = (
            f"G {attention.centroids.shape[1]}, k {attention.top_k}"
            if hasattr(attention, "top_k")
            else "global"
        )
        name = "DGT" if hasattr(attention, "top_k") else "GSA"
        count = f"{len(stage.blocks)} {name} block{'s' if len(stage.blocks) > 1 else ''}"
        texts.append(
            f"stage {i + 1}\nmerging 3 x 3, stride 2\n{count}\n{attention.num_heads} heads, {kind}"
        )
    texts.append(f"head\n1 x 1, {model.head.num_features}\nclassifier, {model.num_classes}")
    colors = ["#dce9f5", *["#fde6cf"] * 3, "#e3f0dc", "#eeeeee"]
    for i, (text, part) in enumerate(zip(texts, parts, strict=True)):
        box(axes, 1.75 * i, 0, 1.45, 1, text, colors[i])
        arrow(axes, (1.75 * i - 0.3, 0.5), (1.75 * i - 0.02, 0.5))
        axes.text(
            1.75 * i + 0.72,
            -0.14,
            f"{part.params / 1e6:.2f} M, {part.flops / 1e9:.2f} G",
            ha="center",
            fontsize=8,
        )
        if i < len(shapes):
            size = " x ".join(map(str, shapes[i][1:]))
            axes.text(1.75 * i + 0.72, 1.1, size, ha="center", fontsize=8, color="#c2410c")
    total = cost(model)
    title = "(a) DGT-T at 224 x 224 pixels: map after each part (red), parameters and multiply-adds (below); together "
    axes.set_title(
        f"{title}{total.params / 1e6:.2f} M, {total.flops / 1e9:.2f} G", loc="left", fontsize=9.5
    )
    axes.set(xlim=(-0.35, 10.35), ylim=(-0.3, 1.3))
    axes.set_axis_off()


def _draw_block(axes: Axes) -> None:
    steps = [
        ("CPE", "#dce9f5"),
        ("LayerNorm", "#eeeeee"),
        ("DG-Attention", "#fde6cf"),
        ("LayerNorm", "#eeeeee"),
    ]
    steps.append(("IRFFN", "#e3f0dc"))
    y, places = 0.0, []
    for i, (name, color) in enumerate(steps):
        box(axes, 0, y, 1, 0.5, name, color)
        arrow(axes, (0.5, y - 0.28), (0.5, y))
        places.append(y)
        y += 0.5 + (0.62 if i in (0, 2, 4) else 0.28)
    for first, last in ((0, 0), (1, 2), (3, 4)):
        low, high = places[first] - 0.17, places[last] + 0.5 + 0.2
        axes.plot([0.5, 1.2, 1.2], [low, low, high], color="#333333", linewidth=1)
        arrow(axes, (1.2, high), (0.58, high))
        axes.text(
            0.5,
            high,
            "+",
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "circle,pad=0.1", "fc": "white"},
        )
        axes.plot(
            [0.5, 0.5], [places[last] + 0.5, high - 0.1], color="#333333", linewidth=1, zorder=0
        )
    arrow(axes, (0.5, places[-1] + 0.8), (0.5, places[-1] + 1.05))
    axes.set_title("(b) a block: Eqs. 8 to 10", loc="left", fontsize=9.5)
    axes.set(xlim=(-0.2, 1.4), ylim=(-0.4, places[-1] + 1.1))
    axes.set_axis_off()


def _draw_attention(place: Any, panel: GroupPanel) -> None:
    image = panel.image / 255
    chosen = choose_groups(panel.group_ids.reshape(panel.grid), panel.key_ids, 2)
    axes = place.subplots(2, 3)
    place.suptitle(
        "(c) DG-Attention of the demo's first block: every query to its nearest centroid, every centroid to its k keys",
        fontsize=9.5,
        x=0.01,
        ha="left",
    )
    for row, (group, color) in enumerate(zip(chosen, (RED, BLUE), strict=True)):
        queries, keys = lights(panel, group)
        if row == 0:
            show(axes[0, 0], image, "the image")
        else:
            show(
                axes[1, 0],
                group_colors(image, panel),
                f"its queries in {len(panel.key_ids)} groups",
            )
        show(
            axes[row, 1],
            lit(image, queries, color),
            f"group {group}: {int(queries.sum())} queries",
        )
        show(axes[row, 2], lit(image, keys, color), f"its {int((keys > 0).sum())} keys")


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="folder of a classification run on the scenes")
    parser.add_argument("--scene", type=int, default=7, help="number of the scene")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder")
    return parser.parse_args()


def main() -> None:
    """Draw both figures."""
    args = parse_arguments()
    run = load_run(args.run)
    data = run.recipe.data
    scene = draw_scene(args.scene, "val", data.image_size)
    images = data.normalize(scene.image)[None]
    (panel,) = panels_of(
        group_records(run.network, images), scene.image.permute(1, 2, 0).numpy(), block=0
    )
    step = data.image_size // SIDE
    share = (scene.label_map > 0).float().view(SIDE, step, SIDE, step).mean((1, 3))
    inside = (share > 0.9).nonzero()
    outside = (share == 0).nonzero()
    queries = tuple(tuple(part[len(part) // 2].tolist()) for part in (inside, outside))
    save_figure(figure_patterns(panel, queries), args.out / "attention-patterns.png", dpi=110)  # type: ignore[arg-type]
    save_figure(figure_architecture(panel), args.out / "architecture.png", dpi=110)


if __name__ == "__main__":
    main()
