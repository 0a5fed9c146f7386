r"""Does the entropy of a head say whether its best keys or random ones are the better choice?

    python -m studies.head_entropy --weights dinov2_small.safetensors \
        --photographs A.jpg,B.jpg,C.jpg --out DIR

DINOv2-S runs on every photograph, without any training, and the operands of all its heads are given
to attention over few keys. For every head this measures the entropy of its exact attention, as a
share of that of uniform attention, and the relative error of its output when every query attends to
its best keys, those of its group, or random ones, the latter two with and without the residual key.
A head of low entropy has its mass on few keys, so that the best keys should win; a head of high
entropy averages, so that random keys, whose mean is unbiased, should. Results are saved in DIR; a
second call resumes where the first one stopped.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

from dgt.figures.drawing import tidy
from dgt.ops import find_centroids, seed_centroids
from dgt.utils.errors import UserError
from dgt.utils.records import markdown_table
from dgt.utils.seeding import seeded
from studies.captured_attention import (
    EXACT,
    Captured,
    capture,
    middle_of,
    read_inputs,
    to_tensor,
)
from studies.command import run_study
from studies.figure_fixed_weights import STYLES
from studies.key_selectors import Operands, attend_by
from studies.report import write_results

LOGGER = logging.getLogger(__name__)
GROUPS = 48
BEST = "best of each query"
RANDOM = "random, each query"
SELECTORS = (BEST, "groups", RANDOM, "groups, remainder", "random, remainder")
DRAWN = {  # in the figure
    BEST: "each query's best keys",
    RANDOM: "random keys",
    "groups, remainder": "its group's keys and the residual key",
}
DIGITS = 5  # of what is written
LEAST = 10**-DIGITS  # error: geometric means take no zero
PARTS = 4  # heads are sorted by entropy and split into as many equal parts
Content = dict[str, Any]
Row = dict[str, Any]


def head_entropy(words: Sequence[str] = (), seeds: int = 1, out: str | Path | None = None) -> Path:
    """Measure what is missing; write `head_entropy.json` and `head_entropy.md`.

    Args:
        words: `--weights FILE`; `--photographs FILE,FILE`; `--size 518` (pixels, a multiple of 14);
            `--percent 2,5,10`, of the keys.
        seeds: unused; random keys are drawn once for each photograph and layer.
        out: the folder; None for runs/head_entropy.

    Returns:
        The folder.

    Raises:
        UserError, OSError: If an option is wrong or a file is missing; also see `write_results`.
    """
    given = read_inputs("head_entropy", words, size=518, percent=(2, 5, 10))
    size, percent = given.options["size"], given.options["percent"]
    if not all(0 < share < 100 for share in percent):
        raise UserError(f"--percent must lie in 1 to 99, got {percent}")
    settings = {
        "experiment": "head_entropy",
        "photographs": given.names,
        "size": size,
        "percent": list(percent),
    }
    folder = Path(out or "runs/head_entropy")
    find = partial(find_all, given.model, given.images, size, percent)
    return write_results(folder / "head_entropy.json", settings, find, summary)


@torch.inference_mode()
def find_all(
    model: nn.Module, images: list[Any], size: int, percent: tuple[int, ...], content: Content
) -> Iterator[None]:
    """Add the rows that are missing, and yield after each photograph."""
    rows = content.setdefault("rows", [])
    done = {row["image"] for row in rows}
    layers = tuple(range(len(model.blocks)))  # type: ignore[arg-type]
    for number, image in enumerate(images):
        if number in done:
            continue
        captured = capture(model, to_tensor(middle_of(image, size, size)), layers)
        for layer, call in captured.items():
            LOGGER.info("photograph %d, layer %d", number, layer)
            with seeded(layer):
                measured = measure_layer(call, percent)
            rows += [{"image": number, "layer": layer, **row} for row in measured]
        yield


def measure_layer(call: Captured, percent: tuple[int, ...]) -> list[Row]:
    """Entropy of every head of a layer, and by selector its errors, one for each percentage of keys."""
    tokens = call.query.shape[2]
    exact = EXACT(call.query, call.key, call.value)
    scale = call.query.shape[-1] ** -0.5
    centroids = find_centroids(call.query, seed_centroids(call.query[0], GROUPS), 1)
    given = Operands("", call.query, call.key, call.value, scale, call.grid, centroids)
    rows: list[Row] = [
        {"head": head, "entropy": round(entropy, DIGITS)}
        for head, entropy in enumerate(entropy_of(call.query, call.key, scale).tolist())
    ]
    for selector in SELECTORS:
        for share in percent:
            top_k = max(1, round(tokens * share / 100))
            difference = attend_by(selector, top_k, given) - exact
            relative = difference[0].flatten(1).norm(dim=1) / exact[0].flatten(1).norm(dim=1)
            for row, error in zip(rows, relative.tolist(), strict=True):
                row.setdefault(selector, []).append(max(round(error, DIGITS), LEAST))
    return rows


def entropy_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(H,): mean entropy of the queries' attention (1, H, L, D), as a share of log L."""
    logarithms = (query[0] @ key[0].mT * scale).log_softmax(-1)
    entropy = -(logarithms.exp() * logarithms).sum(-1)
    return entropy.mean(-1) / math.log(key.shape[2])


class Head(NamedTuple):
    """A head of the model, over all photographs.

    Attributes:
        entropy: the mean.
        errors: by selector, geometric means of the relative errors.
    """

    entropy: float
    errors: dict[str, float]


class Part(NamedTuple):
    """Heads of similar entropy, for one percentage of keys.

    Attributes:
        lowest, highest: entropy.
        errors: by selector, geometric means over the heads.
        random_wins: in how many heads random keys have a smaller error than the best keys.
    """

    heads: int
    lowest: float
    highest: float
    errors: dict[str, float]
    random_wins: int


def heads_of(content: Content, percent: int) -> list[Head]:
    """All heads, by entropy, with their errors at one of the percentages of keys."""
    at = content["settings"]["percent"].index(percent)
    by_head: dict[tuple[int, int], list[Row]] = {}
    for row in content["rows"]:
        by_head.setdefault((row["layer"], row["head"]), []).append(row)
    heads = []
    for photographs in by_head.values():
        errors = {
            selector: statistics.geometric_mean(row[selector][at] for row in photographs)
            for selector in SELECTORS
        }
        heads.append(Head(statistics.fmean(row["entropy"] for row in photographs), errors))
    return sorted(heads, key=lambda head: head.entropy)


def parts_of(heads: Sequence[Head]) -> list[Part]:
    """Heads split into `PARTS` parts of similar entropy."""
    parts = []
    for number in range(PARTS):
        chosen = heads[number * len(heads) // PARTS : (number + 1) * len(heads) // PARTS]
        errors = {
            selector: statistics.geometric_mean(head.errors[selector] for head in chosen)
            for selector in SELECTORS
        }
        wins = sum(head.errors[RANDOM] < head.errors[BEST] for head in chosen)
        parts.append(Part(len(chosen), chosen[0].entropy, chosen[-1].entropy, errors, wins))
    return parts


def rank_correlation(heads: Sequence[Head]) -> float:
    """Spearman's rank correlation of entropy with the best keys' error over the random keys'."""
    ratios = torch.tensor([head.errors[BEST] / head.errors[RANDOM] for head in heads])
    entropies = torch.tensor([head.entropy for head in heads])
    ranks = torch.stack([values.argsort().argsort() for values in (entropies, ratios)])
    return float(torch.corrcoef(ranks.double())[0, 1])


def summary(content: Content) -> str:
    """Tables in Markdown, one for each percentage of keys."""
    heads = ["entropy, share of uniform", *(f"{name}, %" for name in SELECTORS), "random wins"]
    texts = []
    for percent in content["settings"]["percent"]:
        found = heads_of(content, percent)
        lines = []
        for part in parts_of(found):
            errors = [f"{100 * part.errors[name]:.1f}" for name in SELECTORS]
            wins = f"{part.random_wins} of {part.heads}"
            lines.append([f"{part.lowest:.2f} to {part.highest:.2f}", *errors, wins])
        told = f"{percent} % of the keys; rank correlation {rank_correlation(found):.2f}\n\n"
        texts.append(told + markdown_table(heads, lines))
    return "\n\n".join(texts) + "\n"


def draw(content: Content) -> Figure:
    """Error of every head over its entropy, by selector, a panel for each percentage of keys."""
    figure = Figure(figsize=(9.6, 3.3), layout="constrained", facecolor="white")
    percents = content["settings"]["percent"]
    panels = figure.subplots(1, len(percents), sharey=True, squeeze=False)[0]
    for axes, percent in zip(panels, percents, strict=True):
        draw_heads(axes, heads_of(content, percent))
        axes.set_title(f"{percent} % of the keys", loc="left", fontsize=10)
    panels[0].set_ylabel("relative error of the output")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.supxlabel(
        "entropy of a head's attention, as a share of uniform attention's", fontsize=10
    )
    return figure


def draw_heads(axes: Axes, heads: Sequence[Head]) -> None:
    """A point for every head and drawn selector."""
    entropies = [head.entropy for head in heads]
    for selector, name in DRAWN.items():
        color, marker, _ = STYLES[selector]
        errors = [head.errors[selector] for head in heads]
        axes.scatter(entropies, errors, s=14, color=color, marker=marker, linewidths=1, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y", color="#eeeeee")
    tidy(axes, size=9)


if __name__ == "__main__":
    sys.exit(run_study("head_entropy", __doc__ or "", head_entropy, draw))
