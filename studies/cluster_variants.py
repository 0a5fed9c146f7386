r"""Cheaper or finer clusters for residual keys: shared between layers, or in two levels.

    python -m studies.cluster_variants --weights dinov2_small.safetensors \
        --photographs A.jpg,B.jpg,C.jpg --out DIR

DINOv2-S runs on every photograph, and its layers' queries, keys, and values are given to attention
in groups with residual keys (`docs/residual_keys.md`). The variants differ in where the groups of
queries and the clusters of keys come from:

- own: from the layer itself, as in `dgt.clustered_attention`;
- of the layer before: which tokens belong together is taken from the previous layer, at no cost;
- of the layer before, refined: the same, followed by one Lloyd step;
- keys of the layer before: only the clusters of keys are taken from it;
- two levels: four times as many clusters of keys, of which every group attends to the heaviest, and
  to the others merged into larger clusters. The number of residual keys per group is that of *own*.

Each has several budgets. Measured are the relative error of a layer's output, for sampled queries,
and the number of products, compared with dense attention. Times are not measured. Results are saved
in DIR; a second call resumes where the first one stopped.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.acceleration.settings import Split, split_budget
from dgt.ops.clusters import Clusters, cluster_tokens
from dgt.ops.lloyd import EVERY, STEPS
from dgt.ops.residual_keys import summarize_clusters
from studies.captured_attention import (
    EXACT,
    Captured,
    capture,
    middle_of,
    read_inputs,
    to_tensor,
)
from studies.command import run_study
from studies.report import write_results

LOGGER = logging.getLogger(__name__)
OWN = "own"
BEFORE = "of the layer before"
REFINED = "of the layer before, refined"
KEYS_BEFORE = "keys of the layer before"
LEVELS = "two levels"
VARIANTS = (OWN, BEFORE, REFINED, KEYS_BEFORE, LEVELS)
SHARES = (0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56)  # budgets of `own`
COMPARED = (0.05, 0.1, 0.2)  # budgets of the others
FINER = 4  # clusters in the lower level for each residual key
SAMPLED = 512  # queries per head
LEAST = -1e30  # logarithm of a mass
CLUSTERING = 1 + STEPS / EVERY  # products with each token, per cluster
Content = dict[str, Any]
Row = dict[str, Any]


class Tokens(NamedTuple):
    """The patches of one layer, without the prefix: (1, H, L, D)."""

    query: Tensor
    key: Tensor
    value: Tensor


class Residual(NamedTuple):
    """Residual keys of every group of one image."""

    key: Tensor
    """(H, G, M, D)."""
    value: Tensor
    """(H, G, M, D)."""
    bias: Tensor
    """(H, G, M), -inf where a cluster has no members left."""


def cluster_variants(
    words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None
) -> Path:
    """Measure what is missing; write `cluster_variants.json` and `cluster_variants.md`.

    Args:
        words: `--weights FILE`, `--photographs FILE,FILE`, `--size 1036` (pixels, a multiple of 14).
        seeds: unused, since nothing is random.
        out: the folder; None for runs/cluster_variants.

    Returns:
        The folder.

    Raises:
        UserError, OSError: If an option is wrong or a file is missing; also see `write_results`.
    """
    given = read_inputs("cluster_variants", words, size=1036)
    size = given.options["size"]
    settings = {"experiment": "cluster_variants", "photographs": given.names, "size": size}
    folder = Path(out or "runs/cluster_variants")
    find = partial(find_all, given.model, given.images, size)
    return write_results(folder / "cluster_variants.json", settings, find, summary)


@torch.inference_mode()
def find_all(model: nn.Module, images: list[Any], size: int, content: Content) -> Iterator[None]:
    """Add the rows that are missing, and yield after each photograph."""
    rows = content.setdefault("rows", [])
    done = {row["image"] for row in rows}
    layers = tuple(range(len(model.blocks)))  # type: ignore[arg-type]
    for number, image in enumerate(images):
        if number in done:
            continue
        captured = capture(model, to_tensor(middle_of(image, size, size)), layers)
        found = []
        for layer in layers[1:]:
            LOGGER.info("photograph %d, layer %d", number, layer)
            place = {"image": number, "layer": layer}
            measured = measure_layer(captured[layer], patches_of(captured[layer - 1]))
            found += [{**place, **row} for row in measured]
        rows += found
        yield


def patches_of(captured: Captured) -> Tokens:
    """The patches of a layer, without its prefix."""
    first = captured.prefix
    return Tokens(*(part[:, :, first:] for part in captured[:3]))


def measure_layer(captured: Captured, before: Tokens) -> list[Row]:
    """Error and products of all variants in one layer; ``before`` is the previous one."""
    tokens = patches_of(captured)
    count = tokens.query.shape[2]
    sample = torch.arange(0, count, max(1, count // SAMPLED))
    exact = EXACT(tokens.query[:, :, sample], captured.key, captured.value)
    found = []
    for variant in VARIANTS:
        for share in SHARES if variant == OWN else COMPARED:
            split = split_budget(share, count, count, has_residual=True)
            output = approximate(captured, before, sample, split, variant)
            error = (output - exact).norm() / exact.norm()
            products = products_of(split, count, variant)
            row = {"variant": variant, "share": share, "products": products}
            found.append({**row, "error": float(error)})
    return found


def products_of(split: Split, tokens: int, variant: str) -> float:
    """Multiply-adds compared with dense attention's.

    Two levels are not charged for the finer clusters: a tree of clusters could cost as little as M.
    """
    groups, clusters = {
        OWN: (CLUSTERING, CLUSTERING),
        BEFORE: (0.0, 0.0),
        REFINED: (1.0, 1.0),
        KEYS_BEFORE: (CLUSTERING, 0.0),
        LEVELS: (CLUSTERING, CLUSTERING),
    }[variant]
    clustering = groups * split.groups + clusters * split.residual_keys
    summaries = 3 * split.groups  # scores of the mean queries, k', and v'
    attention = 2 * (split.keys + split.residual_keys)
    return (clustering + summaries + attention) / (2 * tokens)


def approximate(
    captured: Captured, before: Tokens, sample: Tensor, split: Split, variant: str
) -> Tensor:
    """(1, H, n, D) attention of the sampled queries, in groups with residual keys."""
    tokens = patches_of(captured)
    scale = tokens.query.shape[-1] ** -0.5
    groups = groups_of(tokens, before, split, variant)
    finer = FINER if variant == LEVELS else 1
    clusters = clusters_of_keys(tokens, before, finer * split.residual_keys, variant)
    means = groups.centroids[0] * scale
    selected = (means @ tokens.key[0].mT).topk(split.keys).indices  # (H, G, K)
    rest_key, rest_value, bias, empty = summarize_clusters(
        *tokens, groups.ids, selected[None], scale, clusters.ids, finer * split.residual_keys
    )
    bias = bias.masked_fill(empty, -torch.inf)
    residual = Residual(rest_key[0], rest_value[0], bias[0])
    if variant == LEVELS:
        residual = merge_light(residual, means, clusters.centroids, split.residual_keys)
    ids = groups.ids[0, :, sample]
    heads = [
        attend(head, captured, sample, selected[head], residual, ids[head], scale)
        for head in range(len(ids))
    ]
    return torch.stack(heads)[None]


def groups_of(tokens: Tokens, before: Tokens, split: Split, variant: str) -> Clusters:
    """Groups of queries, with the means of their members."""
    if variant in (BEFORE, REFINED):
        return adopt(tokens.query, before.query, split.groups, variant)
    return cluster_tokens(tokens.query, split.groups)


def clusters_of_keys(tokens: Tokens, before: Tokens, count: int, variant: str) -> Clusters:
    """Clusters of keys, with the means of their members."""
    if variant in (BEFORE, REFINED, KEYS_BEFORE):
        return adopt(tokens.key, before.key, count, variant)
    return cluster_tokens(tokens.key, count)


def adopt(tokens: Tensor, before: Tensor, count: int, variant: str) -> Clusters:
    """The clusters of another layer's tokens, with the means of these; after one Lloyd step if refined."""
    ids = cluster_tokens(before, count).ids
    centroids = means_of(tokens, ids, count)
    if variant == REFINED:
        ids = torch.cdist(tokens, centroids).argmin(-1)
        centroids = means_of(tokens, ids, count)
    return Clusters(centroids, ids)


def means_of(tokens: Tensor, ids: Tensor, count: int) -> Tensor:
    """(1, H, M, D) means of the members of every cluster; zeros of an empty one."""
    batch, heads, _, channels = tokens.shape
    places = ids[..., None].expand(tokens.shape)
    sums = tokens.new_zeros(batch, heads, count, channels).scatter_add(2, places, tokens)
    ones = torch.ones_like(tokens[..., 0])
    numbers = tokens.new_zeros(batch, heads, count).scatter_add(2, ids, ones)
    return sums / numbers.clamp(min=1)[..., None]


def merge_light(residual: Residual, means: Tensor, centroids: Tensor, count: int) -> Residual:
    """Keep the heaviest half of `count` residual keys, and merge the others into as many larger ones.

    Merging is exact for the mean query of the group, like the residual keys themselves.

    Args:
        residual: of the lower level.
        means: (H, G, D) mean queries times the scale.
        centroids: (1, H, F, D) of the lower level's clusters.
        count: M, the residual keys that every group has in the end.
    """
    kept = count // 2
    parents = cluster_tokens(centroids, count - kept).ids[0]  # (H, F)
    score = (means[:, :, None] * residual.key).sum(-1)
    mass = residual.bias + score  # logarithms, (H, G, F)
    heaviest = mass.topk(kept).indices
    light = mass.scatter(-1, heaviest, -torch.inf)
    largest = light.amax(-1, keepdim=True).clamp(min=LEAST)  # of none, a finite number
    weight = (light - largest).exp()
    members = F.one_hot(parents, count - kept).to(weight)  # (H, F, C)
    total = weight @ members
    share = total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
    key = torch.einsum("hgf,hfc,hgfd->hgcd", weight, members, residual.key) / share
    value = torch.einsum("hgf,hfc,hgfd->hgcd", weight, members, residual.value) / share
    bias = total.log() + largest - (means[:, :, None] * key).sum(-1)
    rows = heaviest[..., None].expand(-1, -1, -1, key.shape[-1])
    return Residual(
        torch.cat([residual.key.gather(2, rows), key], 2),
        torch.cat([residual.value.gather(2, rows), value], 2),
        torch.cat([residual.bias.gather(2, heaviest), bias], 2),
    )


def attend(
    head: int,
    captured: Captured,
    sample: Tensor,
    selected: Tensor,
    residual: Residual,
    ids: Tensor,
    scale: float,
) -> Tensor:
    """(n, D): softmax attention of one head's sampled queries to prefix, selected, and residual keys."""
    first = captured.prefix
    query = captured.query[0, head, first:][sample] * scale
    key, value = captured.key[0, head], captured.value[0, head]
    rows = selected[ids] + first  # (n, K)
    scores = torch.cat(
        [
            query @ key[:first].mT,
            torch.einsum("nd,nkd->nk", query, key[rows]),
            torch.einsum("nd,nmd->nm", query, residual.key[head, ids]) + residual.bias[head, ids],
        ],
        -1,
    )
    kinds = [first, rows.shape[1], residual.key.shape[2]]
    of_prefix, of_selected, rest = scores.softmax(-1).split(kinds, -1)
    return (
        of_prefix @ value[:first]
        + torch.einsum("nk,nkd->nd", of_selected, value[rows])
        + torch.einsum("nm,nmd->nd", rest, residual.value[head, ids])
    )


class Compared(NamedTuple):
    """A variant with one budget: means over layers and photographs.

    Attributes:
        error: geometric mean of the relative errors.
        ratio: geometric mean of the errors compared with that of own clusters at equal products.
    """

    variant: str
    share: float
    products: float
    error: float
    ratio: float


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Every variant at the compared budgets."""
    found = []
    for variant, share in itertools.product(VARIANTS, COMPARED):
        chosen = [row for row in rows if row["variant"] == variant and row["share"] == share]
        ratios = [row["error"] / own_error(rows, row) for row in chosen]
        errors = [row["error"] for row in chosen]
        found.append(
            Compared(
                variant,
                share,
                chosen[0]["products"],
                statistics.geometric_mean(errors),
                statistics.geometric_mean(ratios),
            )
        )
    return found


def own_error(rows: Sequence[Row], row: Row) -> float:
    """The error of own clusters with the products of a row, interpolated between budgets."""
    own = [
        other
        for other in rows
        if other["variant"] == OWN
        and (other["layer"], other["image"]) == (row["layer"], row["image"])
    ]
    products = np.log([other["products"] for other in own])
    errors = np.log([other["error"] for other in own])
    return float(np.exp(np.interp(np.log(row["products"]), products, errors)))


def summary(content: Content) -> str:
    """A table in Markdown."""
    lines = ["| clusters | budget | products | error | compared with own |", "| --- " * 5 + "|"]
    for row in compare(content["rows"]):
        lines.append(
            f"| {row.variant} | {row.share:.0%} | {row.products:.1%} | {row.error:.2%} | {row.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run_study("cluster_variants", __doc__ or "", cluster_variants))
