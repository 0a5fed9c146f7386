"""Tables of docs/experiments.md."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from dgt.utils.records import interval, number
from studies import camvid_hours, residual_summary

from .shared import Cells, bold, read, table

AS_TRAINED = "as-trained"
CONTENT_TESTS = {  # of models with groups, by the name in the raw file
    "k-4": "4",
    AS_TRAINED: "32, as trained",
    "k-256": "256",
    "k-all": "all",
    "k-32-remainder": "32 and one residual key",
}
CAMVID_NAMES = {  # by kind of attention and test
    ("groups", "residual-key"): "groups, tested with one residual key",
    ("groups", "all-keys"): "groups, tested with all keys",
    ("groups with a residual key", AS_TRAINED): "groups, trained and tested with one residual key",
}
CHANGES = {  # what changes between two rows of the ablation: row, row it is compared with
    "a CPE added to Swin, which keeps its position table": ("Swin with CPE", "Swin"),
    "then the table removed": ("Swin with CPE, no table", "Swin with CPE"),
    "then groups instead of windows: the hybrid": (
        "Swin with DG-Attention",
        "Swin with CPE, no table",
    ),
    "all three together, the appendix's comparison": ("Swin with DG-Attention", "Swin"),
    "the hybrid's CPE removed": ("Swin with DG-Attention, no CPE", "Swin with DG-Attention"),
    "groups without any position encoding, compared with Swin": (
        "Swin with DG-Attention, no CPE",
        "Swin",
    ),
    "all keys instead of the groups'": (
        "Swin with global attention and CPE",
        "Swin with DG-Attention",
    ),
    "16 random keys instead of the groups'": (
        "Swin with random keys and CPE",
        "Swin with DG-Attention",
    ),
    "a CPE added to CSWin, which keeps its LePE": ("CSWin with CPE", "CSWin"),
    "CSWin's hybrid compared with CSWin, as in the appendix": ("CSWin with DG-Attention", "CSWin"),
    "CSWin's hybrid compared with CSWin with a CPE": ("CSWin with DG-Attention", "CSWin with CPE"),
}


# Retrieval at a distance


def _runs() -> dict[str, list[dict[str, Any]]]:
    """The runs of each row, in the order of seeds."""
    runs = read("retrieval")["runs"]
    names = dict.fromkeys(run["row"] for run in runs)
    return {name: [run for run in runs if run["row"] == name] for name in names}


@table
def retrieval() -> Cells:
    """Every row: mean and 95 % interval, each seed, and how often the source can be seen."""
    rows = []
    for name, runs in _runs().items():
        accuracies = [run["accuracy"] for run in runs]
        mean, half = interval(accuracies)
        served = [run["served"] for run in runs if run.get("served") is not None]
        seeds = ", ".join(number(accuracy, 1) for accuracy in accuracies)
        cells = [name, number(mean, 1, 1, half), seeds]
        rows.append([*cells, number(statistics.fmean(served), 0) if served else "-"])
    return [["row", "right, %", "seeds 0, 1, 2", "served, %"], *rows]


@table
def retrieval_by_k() -> Cells:
    """Networks trained at k 16, tested at others; in parentheses the prediction; bold from k G = codes on."""
    content, found = read("retrieval"), _runs()
    codes, chance = content["settings"]["codes"], 100 / content["settings"]["values"]
    best = statistics.fmean(run["accuracy"] for run in found["global"])
    counts = [at["top_k"] for at in found["DG, G 1, k 16"][0]["by_top_k"]]
    rows = []
    for groups in (48, 16, 4, 1):
        cells = [f"G {groups}"]
        for place, top_k in enumerate(counts):
            own = [run["by_top_k"][place]["accuracy"] for run in found[f"DG, G {groups}, k 16"]]
            mean, covered = number(statistics.fmean(own), 1), top_k * groups / codes
            predicted = chance + min(1, covered) * (best - chance)
            cells.append(f"{bold(mean) if covered >= 1 else mean} ({predicted:.0f})")
        rows.append(cells)
    return [["trained at k 16", *(f"k {top_k}" for top_k in counts)], *rows]


@table
def retrieval_with_other_centroids() -> Cells:
    """Points gained in evaluation if the means of one more batch replace the centroids."""
    runs = _runs()["DG, G 16, k 4"]
    won: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for found in run["last_batch"]:
            won[found["maps"]] += [accuracy - run["accuracy"] for accuracy in found["accuracies"]]
    rows = []
    for maps, values in sorted(won.items()):
        mean, half = interval(values)
        rows.append([str(maps), f"{mean:+.1f} ± {half:.1f}"])
    return [["maps in the batch", "points gained, G 16, k 4"], *rows]


# What the selection holds


@table
def diagnosis() -> Cells:
    """The share of global attention on the keys that trained models select, in blocks that select."""
    keys = ("selected", "random", "window", "best_for_all", "best_for_group", "best_for_query")
    rows = []
    for model, name in (("the demo's", "scenes"), ("Swin's hybrid", "hybrid")):
        for block in read(f"diagnosis_{name}"):
            if block["top_k"] < block["tokens"]:
                place = block["name"].removesuffix(".attn").removeprefix("stages.")
                cells = [
                    f"{model}, {place.replace('.blocks.', ', ')}",
                    str(block["tokens"]),
                    str(block["top_k"]),
                ]
                cells += [number(block[key], 1, 100) for key in keys]
                rows.append([*cells, number(block["perplexity"], 1)])
    heads = [
        "model; stage, block",
        "tokens",
        "k",
        "selected, %",
        "random",
        "window around the query",
    ]
    heads += ["best for all queries", "best for each group", "best for each query"]
    return [[*heads, "perplexity of 16 groups"], *rows]


@table
def distinct_keys() -> Cells:
    """How different the keys are that groups of one image and head select, by block."""
    models = {
        "`dgt_nano.imagenette`": read("diagnosis_imagenette"),
        "`dgt_nano.camvid`, 1 residual key": read("diagnosis_camvid"),
    }
    rows = []
    for model, blocks in models.items():
        for block in blocks:
            _, place = block["name"].removesuffix(".attn").split("stages.")
            cells = [f"{model}; {place.replace('.blocks.', ', ')}"]
            cells += [str(block[key]) for key in ("tokens", "groups", "top_k")]
            cells += [number(block["distinct_keys"], 0), bold(number(block["overlap"], 0, 100))]
            cells.append(number(block["top_k"] / block["tokens"], 0, 100))
            rows.append([*cells, number(block.get("residual"), 0, 100)])
    heads = ["model; stage, block", "tokens", "groups", "k", "distinct keys of all groups"]
    heads += ["keys two groups share, %", "by chance", "attention on residual keys, %"]
    return [heads, *rows]


# Pairs of rows of the ablations


def _points(name: str, row: str, compared_with: str) -> str:
    """How many points of top-1 a row is ahead, in pairs of seeds, with the 95 % interval."""
    runs = {found["name"]: found["runs"] for found in read(name)["rows"]}
    first, second = (
        {run["seed"]: run["metrics"]["top1"] for run in runs[one]} for one in (row, compared_with)
    )
    mean, half = interval([100 * (first[seed] - second[seed]) for seed in first if seed in second])
    return f"{mean:+.1f} ± {half:.1f}"


@table
def hybrids_change_by_change() -> Cells:
    """The hybrids, one change at a time."""
    rows = [[words, _points("ablate_hybrids", *pair)] for words, pair in CHANGES.items()]
    return [["change", "points of top-1"], *rows]


@table
def ablate_blocks() -> Cells:
    """Blocks of other papers in DGT's architecture."""
    return _ablated("blocks", "DGT block")


@table
def ablate_hybrids() -> Cells:
    """DG-Attention in Swin and CSWin."""
    return _ablated("hybrids")


@table
def ablate_groups_and_keys() -> Cells:
    """Fewer groups, fewer keys."""
    return _ablated("groups_and_keys", "G and k of the model")


def _ablated(name: str, beside: str = "") -> Cells:
    """The rows of an ablation, in pairs of seeds beside one of them."""
    rows = []
    for row in read(f"ablate_{name}")["rows"]:
        top1 = [run["metrics"]["top1"] for run in row["runs"]]
        mean, half = interval(top1)
        cells = [row["name"], number(row["parameters"], 3, 1e-6), number(row["flops"], 1, 1e-6)]
        cells += [number(mean, 2, 100, half), ", ".join(number(value, 2, 100) for value in top1)]
        if beside:
            cells.append(
                "-" if row["name"] == beside else _points(f"ablate_{name}", row["name"], beside)
            )
        rows.append([*cells, number(row["seconds"], 0), number(row["paper"], 1)])
    heads = ["", "parameters, M", "MFLOPs", "top-1, %", "seeds 0, 1, 2"]
    heads += [f"points ahead of {beside}"] * bool(beside) + ["s a run", "paper, %"]
    return [heads, *rows]


# What choosing keys buys on real images


def _content() -> dict[tuple[str, int, str], dict[str, Any]]:
    """The tests by kind of attention, image size, and name."""
    rows = read("content_selection")["rows"]
    return {(row["kind"], row["size"], row["test"]): row for row in rows}


def _sizes() -> dict[int, str]:
    """The image sizes, and the heads of their columns."""
    content = read("content_selection")
    heads = {}
    for size in sorted({row["size"] for row in content["rows"]}):
        trained = ", as trained" * (size == content["settings"]["train_size"])
        heads[size] = f"{size} px{trained}" + ", enlarged" * (size > content["enlarged_above"])
    return heads


def _content_cell(row: dict[str, Any]) -> str:
    """Mean accuracy over seeds, and in parentheses how far each seed is ahead of all keys."""
    mean = number(row["mean"], 1, 100)
    if row["kind"] == "all keys" or row["beside all keys"] is None:
        return mean
    return f"{mean} ({', '.join(f'{points:+.1f}' for points in row['beside all keys']['by_seed'])})"


@table
def content_selection() -> Cells:
    """Top-1 by kind of attention and image size."""
    rows, heads = _content(), _sizes()
    kinds = dict.fromkeys(kind for kind, _, _ in rows)
    lines = [
        [kind, *(_content_cell(rows[kind, size, AS_TRAINED]) for size in heads)] for kind in kinds
    ]
    return [["stages one and two attend to", *heads.values()], *lines]


@table
def content_selection_at_other_k() -> Cells:
    """The models with groups, tested with other numbers of keys."""
    rows, heads = _content(), _sizes()
    lines = [
        [name, *(_content_cell(rows["groups", size, test]) for size in heads)]
        for test, name in CONTENT_TESTS.items()
    ]
    return [["keys per group in the test", *heads.values()], *lines]


@table
def content_selection_on_camvid() -> Cells:
    """mIoU by kind of attention and image width, and how far each seed is ahead of all keys."""
    found = read("content_selection_camvid")["rows"]
    rows = {(row["kind"], row["test"], row["width"]): row for row in found}
    widths = sorted({row["width"] for row in found})
    lines = []
    for kind, test in dict.fromkeys((row["kind"], row["test"]) for row in found):
        cells = [CAMVID_NAMES.get((kind, test), kind)]
        for width in widths:
            row = rows[kind, test, width]
            cells.append(", ".join(number(value, 1, 100) for value in row["miou"]))
            own = (kind, test) == ("all keys", AS_TRAINED)
            cells.append("-" if own else _camvid_ahead(row["beside all keys"]))
        lines.append(cells)
    heads = [
        head
        for width in widths
        for head in (f"{width} px wide: mIoU, %", "ahead of all keys, points")
    ]
    return [["stages one and two attend to", *heads], *lines]


def _camvid_ahead(row: dict[str, Any]) -> str:
    pairs = zip(row["ahead"], row["half_over_images"], strict=True)
    return ", ".join(f"{100 * ahead:+.1f} ± {100 * half:.1f}" for ahead, half in pairs)


# Groups that train with residual keys


@table
def camvid_hours_of_training() -> Cells:
    """Every arm: what the same time pays for, and the mIoU at the end; open where no run is."""
    seconds = read("camvid_hours/times")["seconds_a_step"]
    records = camvid_hours.read_records()
    without = {run["seed"]: run["validation"]["miou"] for run in records[camvid_hours.NOTHING]}
    rows = []
    for kind, runs in records.items():
        is_timed = kind in seconds or kind == camvid_hours.LONGER
        steps = str(camvid_hours.steps_of(kind, seconds)) if is_timed else "-"
        cells = [kind, number(seconds.get(kind), 2), steps]
        if not runs:
            rows.append([*cells, "-", "-", "open", "-", "-"])
            continue
        miou = [run["validation"]["miou"] for run in runs]
        cells.append(number(runs[0]["epochs"], 1))
        cells.append(number(statistics.fmean(run["cpu_seconds"] for run in runs), 0, 1 / 60))
        cells.append(", ".join(number(value, 1, 100) for value in miou))
        cells.append(bold(number(statistics.fmean(miou), 1, 100)))
        pairs = [
            100 * (run["validation"]["miou"] - without[run["seed"]])
            for run in runs
            if run["seed"] in without
        ]
        rows.append([*cells, _mean_ahead(pairs) if kind != camvid_hours.NOTHING else "-"])
    heads = ["stages one and two attend to", "s a step", "steps", "epochs", "CPU minutes"]
    heads += ["mIoU of `val`, %, by seed", "mean", "points ahead of no attention"]
    return [heads, *rows]


def _mean_ahead(differences: list[float]) -> str:
    """The mean of differences, with its interval where there are several."""
    if not differences:
        return "-"
    ahead, half = interval(differences)
    return f"{ahead:+.1f}" + (f" ± {half:.1f}" if half else "")


@table
def residual_training() -> Cells:
    """Every data set, size and kind: scores, differences to all keys, and the verdict.

    The page says for how many epochs and in which precision runs were trained.
    """
    return [
        [place, *found]
        for place, _trained, *found in residual_summary.cells(read("residual_training"))
    ]


@table
def residual_times() -> Cells:
    """Milliseconds an image with all keys, and the other kinds' share of it."""
    rows = read("residual_times")["rows"]
    kinds = list(rows[0]["ms"])
    heads = ["data, px", "what", "images at a time", f"{kinds[0]}, ms an image"]
    cells = [[*heads, *(f"{kind}, of it" for kind in kinds[1:])]]
    for row in rows:
        dense, *others = (row["ms"][kind] for kind in kinds)
        place = [f"{row['data_set']}, {row['size']}", row["what"], str(row["images"])]
        cells.append([*place, f"{dense:.1f}", *(f"{taken / dense:.2f}" for taken in others)])
    return cells
