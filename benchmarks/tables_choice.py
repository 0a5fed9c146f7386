"""Tables of what attention chooses, and of what that choice is worth."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from tables_shared import Cells, bold, number_of_text, read, table

from dgt.utils.records import interval, number

ABLATED = {  # key of the measures in a table's JSON: head, decimals and factor
    "selected": ("mass on selected keys, %", 1, 100),
    "random": ("random", 1, 100),
    "window": ("window", 1, 100),
    "best_for_all": ("best for all", 1, 100),
    "best_for_group": ("for each group", 1, 100),
    "best_for_query": ("for each query", 1, 100),
    "perplexity": ("perplexity of groups", 1, 1),
}
READINGS = {  # the same
    "top1": ("top-1, %", 1, 100),
    "perplexity": ("perplexity of group sizes (of 16)", 1, 1),
    "perplexity_per_image": ("the same, image by image", 1, 1),
    "mass_selected": ("mass on selected keys", 3, 1),
}


def _like(name: str) -> Cells:
    shares = {
        "pure": "pure groups, %",
        "random_pure": "drawn at random",
        "patch_pure": "patches of neighbors",
    }
    shares |= {"like": "like keys: the group's, %"}
    shares |= {"window": "in a window", "attention": "by global attention", "random": "at random"}
    rows = []
    for row in read(f"like_to_like_{name}")["rows"]:
        layer = (
            row["layer"]
            .removeprefix("backbone.model.")
            .removesuffix(".attn")
            .replace(".blocks.", ", ")
        )
        cells = [layer.replace("stages.", ""), str(row["tokens"]), str(row["top_k"])]
        cells += [number(row[key], 1, 100) for key in shares]
        rows.append([*cells, f"{number(row['far'], 1)} ({number(row['anywhere'], 1)})"])
    return [["stage, block", "tokens", "k", *shares.values(), "distance (to any)"], *rows]


@table
def like_to_like_scenes() -> Cells:
    """Whether groups and their keys are of one kind: background and objects of the scenes."""
    return _like("scenes")


@table
def like_to_like_camvid() -> Cells:
    """The same for the eleven classes of CamVid."""
    return _like("camvid")


@table
def like_to_like_coco() -> Cells:
    """The same for COCO's masks, background and eighty categories."""
    return _like("coco")


def _with_interval(values: list[float], places: int, by: float) -> str:
    """A mean and half of its 95 % interval (Student's t)."""
    mean, half = interval(values)
    return number(mean, places, by, half)


def _ablated(name: str) -> Cells:
    """The rows of an ablation, with what attention chooses if that was measured."""
    found = read(f"ablate_{name}")["rows"]
    measures = ABLATED if any(row["measures"] for row in found) else {}
    rows = []
    for row in found:
        values = row["measures"] or {}
        measured = [number(values.get(key), *how) for key, (_, *how) in measures.items()]
        rows.append([*_result_cells(row), *measured, number(row["paper"], 1)])
    heads = ["", "parameters, M", "MFLOPs", "top-1, %", "seeds 0, 1, 2"]
    return [[*heads, *(head for head, *_ in measures.values()), "paper, %"], *rows]


def _result_cells(row: dict[str, Any]) -> list[str]:
    """A model's name, size, and accuracy: with its interval, and for each seed."""
    top1 = [run["metrics"]["top1"] for run in row["runs"]]
    return [
        row["name"],
        number(row["parameters"], 3, 1e-6),
        number(row["flops"], 1, 1e-6),
        _with_interval(top1, 2, 100),
        ", ".join(number(value, 2, 100) for value in top1),
    ]


@table
def ablate_blocks() -> Cells:
    """Blocks of other papers in DGT's skeleton."""
    return _ablated("blocks")


@table
def ablate_hybrids() -> Cells:
    """DG-Attention in Swin and CSWin."""
    return _ablated("hybrids")


@table
def ablate_groups_and_keys() -> Cells:
    """Fewer groups, fewer keys."""
    return _ablated("groups_and_keys")


@table
def diagnosis() -> Cells:
    """The share of global attention on the keys that a trained model selects, in blocks that select."""
    keys = ("selected", "random", "window", "best_for_all", "best_for_group", "best_for_query")
    rows = []
    for block in read("diagnosis_scenes"):
        if block["top_k"] < block["tokens"]:
            shares = [number(block[key], 1, 100) + " %" for key in keys]
            cells = [
                f"`{block['name'].removesuffix('.attn')}`",
                str(block["tokens"]),
                bold(shares[0]),
                *shares[1:],
            ]
            rows.append(
                [*cells, number(block["perplexity"], 1), number(block["perplexity_per_image"], 1)]
            )
    heads = [
        "block",
        "tokens",
        "selected",
        "random",
        "window around the query",
        "best for all queries",
    ]
    heads += [
        "best for each group",
        "best for each query",
        "perplexity of 16 groups",
        "image by image",
    ]
    return [heads, *rows]


def _retrieval() -> dict[str, list[dict[str, Any]]]:
    """The runs of each row, in the order of seeds."""
    runs = read("retrieval")["runs"]
    return {
        name: [run for run in runs if run["row"] == name]
        for name in dict.fromkeys(run["row"] for run in runs)
    }


@table
def retrieval() -> Cells:
    """Retrieval at a distance: every row, mean and 95 % interval, and each seed."""
    rows = []
    for name, runs in _retrieval().items():
        accuracies = [run["accuracy"] for run in runs]
        served = [run["served"] for run in runs if run.get("served") is not None]
        mean_served = number(statistics.fmean(served), 0) if served else "-"
        seeds = ", ".join(number(accuracy, 1) for accuracy in accuracies)
        rows.append([name, _with_interval(accuracies, 1, 1), seeds, mean_served])
    return [["row", "right, %", "seeds 0, 1, 2", "served, %"], *rows]


@table
def retrieval_by_k() -> Cells:
    """Retrieval at other k than trained at, and what the law predicts; bold from k G = codes on."""
    laws = _law_of_retrieval()
    counts = list(dict.fromkeys(row.top_k for row in laws))
    rows: dict[int, list[str]] = {}
    for row in laws:
        shown = bold(number(row.mean, 1)) if row.reached >= 1 else number(row.mean, 1)
        rows.setdefault(row.groups, [f"G {row.groups}"]).append(f"{shown} ({row.law:.0f})")
    return [["trained at k 16", *(f"k {top_k}" for top_k in counts)], *rows.values()]


@number_of_text
def off_the_law() -> str:
    """Retrieval: the most points that a mean is off the law, up to k G = codes / 2."""
    early = [row for row in _law_of_retrieval() if row.reached <= 0.5]
    return number(max(abs(row.mean - row.law) for row in early), 1)


class _AtOtherK(NamedTuple):
    """Right answers, %, of networks with some groups that attend to k keys, and the law's.

    Attributes:
        reached: k G over the number of codes.
    """

    groups: int
    top_k: int
    mean: float
    law: float
    reached: float


def _law_of_retrieval() -> list[_AtOtherK]:
    content, found = read("retrieval"), _retrieval()
    codes, chance = content["settings"]["codes"], 100 / content["settings"]["values"]
    best = statistics.fmean(run["accuracy"] for run in found["global"])
    counts = [at["top_k"] for at in found["DG, G 1, k 16"][0]["by_top_k"]]
    rows = []
    for groups in (48, 16, 4, 1):
        runs = found[f"DG, G {groups}, k 16"]
        for place, top_k in enumerate(counts):
            mean = statistics.fmean(run["by_top_k"][place]["accuracy"] for run in runs)
            reached = top_k * groups / codes
            law = chance + min(1, reached) * (best - chance)
            rows.append(_AtOtherK(groups, top_k, mean, law, reached))
    return rows


def _choices(name: str, cell: Callable[[dict[str, Any]], str]) -> Cells:
    """Choices of keys by k, with the share of the keys if all layers have equally many."""
    content = read(name)
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for row in content["rows"]:
        found[row["choice"]][row["top_k"]] = cell(row)
    counts = sorted({top_k for cells in found.values() for top_k in cells})
    tokens = set(content["tokens"].values())
    heads = [f"k {top_k}{_share(top_k, tokens)}" for top_k in counts]
    lines = [[choice, *(cells[top_k] for top_k in counts)] for choice, cells in found.items()]
    return [["keys by", *heads], *lines]


def _share(top_k: int, tokens: set[int]) -> str:
    """k as a share of the tokens, in brackets; nothing if layers have different numbers of tokens."""
    if len(tokens) > 1:
        return ""
    return f" ({100 * top_k / min(tokens):.0f} %)"


@table
def key_choice() -> Cells:
    """A trained DGT with other keys: top-1, and the divergence from all keys."""
    return _choices(
        "key_choice_demo",
        lambda row: f"{number(row['score'], 1, 100)} / {number(row['divergence'], 3)}",
    )


@table
def key_choice_of_a_segmenter() -> Cells:
    """The same for CamVid's segmenter: labels as before, the divergence, and mIoU."""
    return _labels_divergence_score("key_choice_camvid")


@table
def key_choice_of_imagenette() -> Cells:
    """The same for Imagenette's classifier: labels as before, the divergence, and top-1."""
    return _labels_divergence_score("key_choice_imagenette")


@table
def replacement() -> Cells:
    """A trained ViT with other attention: labels as before, the divergence, and mIoU."""
    return _labels_divergence_score("replacement")


def _labels_divergence_score(name: str) -> Cells:
    keys = (("agreement", 1, 100), ("divergence", 4, 1), ("score", 1, 100))
    return _choices(name, lambda row: " / ".join(number(row[key], *how) for key, *how in keys))


@table
def readings_of_eq_4() -> Cells:
    """The two readings of Eq. 4: mean and 95 % interval over seeds."""
    readings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read("centroid_update")["rows"]:
        readings[row["reading"]].append(row)
    rows = []
    for reading, runs in readings.items():
        cells = [
            _with_interval([run[key] for run in runs], places, by)
            for key, (_, places, by) in READINGS.items()
        ]
        shares = [run["mass_selected"] / run["mass_best"] for run in runs]
        rows.append([reading, *cells, f"{_with_interval(shares, 1, 100)} %"])
    return [["reading", *(head for head, *_ in READINGS.values()), "share of the best"], *rows]
