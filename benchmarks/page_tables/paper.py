"""Tables of docs/paper.md, and of the models in README.md and docs/zoo.md."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from dgt.models.cost import attention_share
from dgt.utils.records import interval, number

from .shared import NAMES, Cells, read, table

READINGS = {  # key: head, decimals and factor
    "top1": ("top-1, %", 1, 100),
    "perplexity": ("perplexity of group sizes (of 16)", 1, 1),
    "perplexity_per_image": ("the same, image by image", 1, 1),
    "mass_selected": ("mass on selected keys", 3, 1),
}
LIKE = {
    "pure": "pure groups, %",
    "random_pure": "random groups",
    "patch_pure": "square patches",
    "like": "like keys: the group's, %",
    "window": "in a window",
    "attention": "by global attention",
    "random": "at random",
}
PRINTED = {"paper_params": 1e6, "paper_flops": 1e9}  # and their units
CLOSE = 5  # percent within which a comparator's size is the paper's
TOP1 = {"dgt_tiny": "83.8", "dgt_small": "84.6", "dgt_base": "85.0"}  # the paper's, in %


@table
def sizes() -> Cells:
    """Parameters and FLOPs of classifiers, of UperNet and Mask R-CNN over each backbone, of blocks and hybrids."""
    heads = {"classify": "", "segment": ", UperNet", "detect": ", Mask R-CNN", "compared": ""}
    rows = []
    for row in read("sizes")["rows"]:
        places = 1 if heads[row["task"]] else 3
        parameters = f"{row['params']:,}"
        flops = number(row["flops"], places, 1e-9)
        printed = [
            f"{row[key] / scale:g}" if row.get(key) else "-" for key, scale in PRINTED.items()
        ]
        model = NAMES.get(row["model"], f"`{row['model']}`") + heads[row["task"]]
        rows.append([model, parameters, printed[0], flops, printed[1]])
    return [["model", "parameters", "paper, M", "FLOPs (multiply-adds), G", "paper, G"], *rows]


@table
def models() -> Cells:
    """The models: size, and what the paper reports."""
    included = {"dgt_nano.imagenette": "128 px", "dgt_nano.camvid": "with UperNet, 480 px"}
    weights = read("weights")
    trained = "; ".join(
        f"`{name}`: {number(weights[name]['parameters'], 2, 1e-6)} M, {about}"
        for name, about in included.items()
    )
    rows = []
    for row in read("sizes")["rows"]:
        if row["task"] == "classify":
            params, flops = number(row["params"], 2, 1e-6), number(row["flops"], 2, 1e-9)
            own = trained if row["model"] == "dgt_nano" else "no"
            cells = [f"{NAMES[row['model']]}, `{row['model']}`", params, flops]
            rows.append([*cells, f"{row['image_size'][0]} px", own, TOP1.get(row["model"], "-")])
    heads = ["model", "parameters, M", "FLOPs (multiply-adds), G", "counted at", "weights here"]
    return [[*heads, "ImageNet top-1, % (paper, not reproduced)"], *rows]


@table
def equation_7() -> Cells:
    """The share of the products that Eq. 7 predicts, and its reciprocal."""
    rows = []
    cases = ((3136, 98, 2), (784, 98, 4), (196, 98, 8), (16384, 98, 2), (25600, 500, 2))
    for tokens, top_k, heads in cases:
        share, side = attention_share(tokens, 32 * heads, top_k), math.isqrt(tokens)
        rows.append([f"{side} x {side}", str(top_k), number(share, 3), number(1 / share, 1)])
    heads_of_table = ["tokens", "k", "share of the products"]
    return [[*heads_of_table, "speedup if time were proportional to products"], *rows]


@table
def comparators() -> Cells:
    """Rows of Tables 2, 3 and 4 (a) whose parameters or FLOPs are not within 5 % of the paper's."""
    rows = []
    for row in read("comparators")["rows"]:
        place = {"classify": "2", "segment": "3"}.get(row["task"], "4 (a)")
        cells = [place, row["row"], row["model"]]
        over = {key: 100 * (row[key] / row[f"paper_{key}"] - 1) for key in ("params", "flops")}
        if all(abs(more) <= CLOSE for more in over.values()):
            continue
        for key, factor in (("params", 1e-6), ("flops", 1e-9)):
            cells += [
                number(row[key], 1, factor),
                f"{row[f'paper_{key}'] * factor:g}",
                f"{over[key]:+.1f}",
            ]
        rows.append(cells)
    heads = ["table", "row", "model", "parameters, M", "paper", "over, %"]
    return [[*heads, "FLOPs (multiply-adds), G", "paper", "over, %"], *rows]


@table
def other_ways_to_count() -> Cells:
    """Rows of the paper that another configuration or another way of counting reproduces."""
    rows = []
    for row in read("comparators")["variants"]:
        cells = [row["row"], number(row.get("params"), 1, 1e-6), number(row.get("flops"), 0, 1e-9)]
        rows.append([*cells, number(row.get("flops_over_small"), 0, 1e-9)])
    return [
        ["row", "parameters, M", "FLOPs (multiply-adds), G", "more than the small model, G"],
        *rows,
    ]


@table
def readings_of_eq_4() -> Cells:
    """The two readings of Eq. 4: mean and 95 % interval over seeds."""
    readings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read("centroid_update")["rows"]:
        readings[row["reading"]].append(row)
    rows = []
    for reading, runs in readings.items():
        cells = [reading]
        for key, (_, places, by) in READINGS.items():
            mean, half = interval([run[key] for run in runs])
            cells.append(number(mean, places, by, half))
        mean, half = interval([run["mass_selected"] / run["mass_best"] for run in runs])
        rows.append([*cells, number(mean, 1, 100, half)])
    heads = [head for head, *_ in READINGS.values()]
    return [["reading", *heads, "share of the best, %"], *rows]


@table
def like_to_like() -> Cells:
    """Whether groups and their keys are of one kind, in the first and the last block."""
    rows = []
    for name, words in (("scenes", "scenes"), ("camvid", "CamVid"), ("coco", "COCO")):
        found = read(f"like_to_like_{name}")["rows"]
        for row, place in ((found[0], "first"), (found[-1], "last")):
            cells = [f"{words}, {place}", str(row["tokens"]), str(row["top_k"])]
            cells += [number(row[key], 1, 100) for key in LIKE]
            rows.append([*cells, number(row["far"], 1), number(row["anywhere"], 1)])
        rows += _objects(words, found) if name == "coco" else []
    heads = ["data, block", "tokens", "k", *LIKE.values()]
    return [[*heads, "tokens to a key", "to any token"], *rows]


def _objects(words: str, found: list[dict[str, Any]]) -> Cells:
    """The same of tokens that are no background, where labels were kept apart."""
    rows = []
    for row, place in ((found[0], "first"), (found[-1], "last")):
        own = [one for label, one in row["by_label"].items() if label != "background"]
        share = sum(one["share"] for one in own)
        cells = [f"{words}'s objects, {place}", str(row["tokens"]), str(row["top_k"])]
        for key in LIKE:
            known = all(key in one for one in own)
            mean = sum(one["share"] * one[key] for one in own) / share if known else None
            cells.append(number(mean, 1, 100))
        rows.append([*cells, "-", "-"])
    return rows
