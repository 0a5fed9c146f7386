"""Tables of sizes, accuracy and what attention chooses."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from tables_shared import NAMES, Cells, bold, off, read, relative, table

from dgt.utils.records import interval, number, wilson

ABLATED = {  # key of the measures in a table's JSON: head, decimals and factor
    "selected": ("mass on selected keys, %", 1, 100),
    "random": ("random", 1, 100),
    "window": ("window", 1, 100),
    "best_for_all": ("best for all", 1, 100),
    "best_for_group": ("for each group", 1, 100),
    "best_for_query": ("for each query", 1, 100),
    "perplexity": ("perplexity of groups", 1, 1),
}


def _sizes(task: str) -> Cells:
    rows = []
    for row in read("sizes")["rows"]:
        if row["task"] == task:
            params, flops = number(row["params"], 2, 1e-6) + " M", number(row["flops"], 1, 1e-9) + " G"
            paper = f"{row['paper_params'] / 1e6:g} M", f"{row['paper_flops'] / 1e9:g} G"
            rows.append([NAMES[row["model"]], params, paper[0], flops, paper[1]])
    return [["backbone", "parameters", "paper", "FLOPs", "paper"], *rows]


@table
def sizes_of_classifiers() -> Cells:
    """Parameters and FLOPs of the classifiers, to the parameter."""
    rows = []
    for row in read("sizes")["rows"]:
        if row["task"] == "classify":
            paper = [number(row["paper_params"], 2, 1e-6), number(row["paper_flops"], 2, 1e-9)]
            rows.append([NAMES[row["model"]], f"{row['params']:,}", paper[0], number(row["flops"], 3, 1e-9), paper[1]])
    return [["model", "parameters", "paper, M", "FLOPs, G", "paper, G"], *rows]


@table
def sizes_of_segmenters() -> Cells:
    """Parameters and FLOPs of UperNet over each backbone."""
    return _sizes("segment")


@table
def sizes_of_detectors() -> Cells:
    """Parameters and FLOPs of Mask R-CNN over each backbone."""
    return _sizes("detect")


def _like(name: str) -> Cells:
    shares = {"pure": "pure groups, %", "random_pure": "drawn at random", "patch_pure": "patches of neighbours"}
    shares |= {"like": "like keys: the group's, %"}
    shares |= {"window": "in a window", "attention": "by global attention", "random": "at random"}
    rows = []
    for row in read(f"like_to_like_{name}")["rows"]:
        layer = row["layer"].removeprefix("backbone.model.").removesuffix(".attn").replace(".blocks.", ", ")
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


@table
def comparators() -> Cells:
    """Parameters and FLOPs of every row of Tables 2, 3 and 4 (a), beside the paper's."""
    rows = []
    for row in read("comparators")["rows"]:
        printed = [f"{row['paper_params'] / 1e6:g}", f"{row['paper_flops'] / 1e9:g}"]
        more = 100 * (row["flops"] / row["paper_flops"] - 1)
        cells = [{"classify": "2", "segment": "3"}.get(row["task"], "4 (a)"), row["row"], row["model"]]
        cells += [number(row["params"], 1, 1e-6), printed[0], number(row["flops"], 1, 1e-9), printed[1]]
        rows.append([*cells, f"{more:+.1f}"])
    return [["table", "row", "model", "parameters, M", "paper", "FLOPs, G", "paper", "over the paper's, %"], *rows]


@table
def predicted_errors() -> Cells:
    """What reports of a ViT predict, beside images that they had not: draw by draw of those that they had."""
    rows = []
    for row in sorted(read("accelerate_prediction")["rows"], key=lambda row: (row["asked_error"], row["draw"])):
        grouped = sum(groups > 0 for groups, _ in row["layers"])
        cells = [f"{100 * row['asked_error']:.2g} %", str(row["draw"]), f"{grouped} of {len(row['layers'])}"]
        rows.append([*cells, *(relative(row, name) for name in ("predicted", "measured", "unseen")), off(row)])
    heads = ["error asked", "draw", "layers in groups", "predicted", "on images kept aside", "on other images"]
    return [[*heads, "prediction off by"], *rows]


@table
def accelerated() -> Cells:
    """A ViT trained on CamVid, accelerated within several errors."""
    heads = ["error asked", "predicted", "on images kept aside", "on those measured", "same class", "mIoU"]
    rows = []
    for row in read("accelerate_camvid")["rows"]:
        if "asked_error" in row:
            cells = [f"{100 * row['asked_error']:.2g} %"]
            cells += [relative(row, name) for name in ("predicted", "measured", "unseen")]
            cells += [number(row["agreement"], 1, 100) + " %", number(row["miou"], 1, 100)]
            rows.append([*cells, *(number(row[key], 2) for key in ("attention_speedup", "model_speedup"))])
            rows[-1].append(number(row["bound"], 1))
    return [[*heads, "attention", "model", "bound"], *rows]


@table
def accelerated_on_imagenette() -> Cells:
    """A ViT trained on Imagenette at 4,096 tokens, beside itself accelerated within several errors."""
    heads = ["error asked", "predicted", "on unseen images", "prediction off by", "images", "top-1 gained, points"]
    rows = []
    for row in read("accelerate_imagenette")["rows"]:
        cells = [f"{100 * row['asked_error']:.2g} %", relative(row, "predicted"), relative(row, "unseen"), off(row)]
        cells += [str(row["unseen_images"]), f"{100 * row['top1_gain']:+.2f} ± {100 * row['top1_gain_half']:.2f}"]
        cells += [number(row["agreement"], 1, 100) + " %", number(row["attention_speedup"], 2)]
        rows.append([*cells, number(row["model_speedup"], 2), number(row["bound"], 1)])
    return [[*heads, "same class", "attention", "model", "bound"], *rows]


def _interval(low: float, high: float) -> str:
    return f"({number(low, 1, 100)} to {number(high, 1, 100)})"


@table
def weights() -> Cells:
    """What `tools/make_weights.sh` trains and packs: each metric with its 95 % interval."""
    rows = []
    for name, run in read("weights").items():
        metrics = [
            f"{row['label']} {number(row['value'], 1, 100)} {_interval(row['low'], row['high'])}"
            for row in run["evaluation"]["metrics"].values()
        ]
        time, images = number(run["seconds"], 0, 1 / 60), str(run["evaluation"]["images"])
        rows.append([f"`{name}`", number(run["parameters"], 2, 1e-6), "; ".join(metrics), images, time])
    return [["weights", "parameters, M", "% (95 % interval)", "on images", "minutes"], *rows]


@table
def imagenette_in_hours() -> Cells:
    """Imagenette from random weights, in hours of two cores."""
    rows = []
    for row in read("imagenette_cpu")["rows"]:
        cells = [str(row["hours"]), f"`{row['model']}`", number(row["parameters"], 2, 1e-6), str(row["epochs"])]
        cells += [number(row["seconds"], 0, 1 / 60), number(row["at_96"]["top1"], 1, 100)]
        top1, top5, images = (row["at_128"][key] for key in ("top1", "top5", "images"))
        cells += [f"{bold(number(top1, 1, 100))} {_interval(*wilson(top1, images))}", number(top5, 1, 100)]
        rows.append(cells)
    heads = ["hours of two cores", "model", "parameters, M", "epochs", "minutes of one core", "top-1 at 96 px, %"]
    return [[*heads, "top-1 at 128 px, % (95 % interval)", "top-5"], *rows]


@table
def camvid() -> Cells:
    """Segmentation of CamVid from random weights, in minutes."""
    rows = []
    for name, run in read("segmentation_cpu")["runs"].items():
        if "scenes" not in name and name != "camvid_nano":
            shares = [number(run["metrics"][key], 1, 100) + " %" for key in ("miou", "accuracy", "mean_accuracy")]
            rows.append([name, number(run["parameters"], 3, 1e-6) + " M", *shares])
    return [["backbone", "parameters", "mIoU", "pixel accuracy", "mean accuracy"], *rows]


@table
def camvid_by_class() -> Cells:
    """IoU of each class of CamVid after the longer training."""
    metrics = read("segmentation_cpu")["runs"]["camvid_nano"]["metrics"]
    shares = {key.partition("/")[2]: number(value, 1, 100) for key, value in metrics.items() if key.startswith("iou/")}
    return [["", *shares], ["IoU, %", *shares.values()]]


def _ablated(name: str) -> Cells:
    content = read(f"ablate_{name}")
    measured = any(row["measures"] for row in content["rows"])
    heads = ["", "parameters, M", "MFLOPs", "top-1, %", "seeds 0, 1, 2"]
    rows = []
    for row in content["rows"]:
        seeds = ", ".join(number(run["metrics"]["top1"], 2, 100) for run in row["runs"])
        score = f"{number(row['mean'], 2, 100)} ± {number(row['spread'], 2, 100)}"
        rows.append([row["name"], number(row["parameters"], 3, 1e-6), number(row["flops"], 1, 1e-6), score, seeds])
        if measured:
            found = row["measures"] or {}
            rows[-1] += [number(found.get(key), places, by) for key, (_, places, by) in ABLATED.items()]
        rows[-1].append(number(row["paper"], 1))
    return [[*heads, *([head for head, _, _ in ABLATED.values()] if measured else []), "paper, %"], *rows]


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
    """Share of global attention on the keys that a trained model selected, where others are left out."""
    keys = ("selected", "random", "window", "best_for_all", "best_for_group", "best_for_query")
    rows = []
    for block in read("diagnosis_scenes"):
        if block["top_k"] < block["tokens"]:
            shares = [number(block[key], 1, 100) + " %" for key in keys]
            cells = [f"`{block['name'].removesuffix('.attn')}`", str(block["tokens"]), bold(shares[0]), *shares[1:]]
            rows.append([*cells, number(block["perplexity"], 1), number(block["perplexity_per_image"], 1)])
    heads = ["block", "tokens", "selected", "random", "window around the query", "best for all queries"]
    heads += ["best for each group", "best for each query", "perplexity of 16 groups", "image by image"]
    return [heads, *rows]


def _retrieval() -> dict[str, list[dict[str, Any]]]:
    """The runs of each row, in the order of seeds."""
    runs = read("retrieval")["runs"]
    return {name: [run for run in runs if run["row"] == name] for name in dict.fromkeys(run["row"] for run in runs)}


@table
def retrieval() -> Cells:
    """Retrieval at a distance: every row, mean and 95 % interval, and each seed."""
    rows = []
    for name, runs in _retrieval().items():
        mean, half = interval([run["accuracy"] for run in runs])
        served = [run["served"] for run in runs if run.get("served") is not None]
        seeds = ", ".join(number(run["accuracy"], 1) for run in runs)
        rows.append([name, f"{mean:.1f}" + (f" ± {half:.1f}" if half is not None else ""), seeds])
        rows[-1].append(number(statistics.fmean(served), 0) if served else "-")
    return [["row", "right, %", "seeds 0, 1, 2", "served, %"], *rows]


@table
def retrieval_by_k() -> Cells:
    """Retrieval measured at other k than trained at, the law in brackets; bold from k G = codes on."""
    content, found = read("retrieval"), _retrieval()
    codes, chance = content["settings"]["codes"], 100 / content["settings"]["values"]
    best = statistics.fmean(run["accuracy"] for run in found["global"])
    counts = [at["top_k"] for at in found["DG, G 1, k 16"][0]["by_top_k"]]
    rows = []
    for groups in (48, 16, 4, 1):
        runs = found[f"DG, G {groups}, k 16"]
        rows.append([f"G {groups}"])
        for place, top_k in enumerate(counts):
            mean = statistics.fmean(run["by_top_k"][place]["accuracy"] for run in runs)
            law = chance + min(1, top_k * groups / codes) * (best - chance)
            shown = number(mean, 1) if top_k * groups < codes else bold(number(mean, 1))
            rows[-1].append(f"{shown} ({law:.0f})")
    return [["trained at k 16", *(f"k {top_k}" for top_k in counts)], *rows]


def _choices(name: str, cell: Callable[[dict[str, Any]], str]) -> Cells:
    """Choices of keys by k, with the share of the keys where all layers have as many."""
    content = read(name)
    rows, tokens = content["rows"], set(content["tokens"].values())
    counts = sorted({row["top_k"] for row in rows})
    shares = [f" ({100 * k / min(tokens):.0f} %)" if len(tokens) == 1 else "" for k in counts]
    found = {(row["choice"], row["top_k"]): cell(row) for row in rows}
    choices = dict.fromkeys(row["choice"] for row in rows)
    heads = ["keys by", *(f"k {k}{share}" for k, share in zip(counts, shares, strict=True))]
    return [heads, *([choice, *(found[choice, k] for k in counts)] for choice in choices)]


@table
def key_choice() -> Cells:
    """A trained DGT with other keys: top-1, and the divergence from all keys."""
    return _choices("key_choice_demo", lambda row: f"{number(row['score'], 1, 100)} / {number(row['divergence'], 3)}")


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
    """The two readings of Eq. 4: mean and deviation over seeds."""
    measures = {"top1": ("top-1, %", 1, 100), "perplexity": ("perplexity of group sizes (of 16)", 1, 1)}
    measures |= {"perplexity_per_image": ("the same, image by image", 1, 1)}
    measures |= {"mass_selected": ("mass on selected keys", 3, 1)}
    found = read("centroid_update")["rows"]
    rows = []
    for reading in dict.fromkeys(row["reading"] for row in found):
        runs = [row for row in found if row["reading"] == reading]
        columns = [([run[key] for run in runs], places, by) for key, (_, places, by) in measures.items()]
        columns.append(([run["mass_selected"] / run["mass_best"] for run in runs], 1, 100))
        cells = [
            f"{number(statistics.fmean(values), places, by)} ± {number(statistics.stdev(values), places, by)}"
            for values, places, by in columns
        ]
        rows.append([reading, *cells[:-1], f"{cells[-1]} %"])
    return [["reading", *(head for head, _, _ in measures.values()), "share of the best"], *rows]


@table
def detection_of_scenes() -> Cells:
    """Epoch by epoch."""
    keys = {"epoch": 0, "training loss": 3, "box AP": 1, "box AP50": 1, "mask AP": 1, "mask AP50": 1}
    columns = [[number(one, places) for one in _single(f"scenes_detect, {key}")] for key, places in keys.items()]
    return [list(keys), *map(list, zip(*columns, strict=True))]


@table
def detection_of_coco() -> Cells:
    """A few hundred images, too few for either."""
    rows = []
    for name in ("DGT-Nano", "Swin, 32 channels, blocks 1-2-5-1"):
        found = [_single(f"coco, {name}, {key}") for key in ("parameters", "loss of the epochs", "box and mask AP50")]
        rows.append([name, number(found[0], 2) + " M", ", ".join(number(loss, 2) for loss in found[1])])
        rows[-1] += [number(precision, 2) + " %" for precision in found[2]]
    return [["backbone", "parameters, whole", "loss of the epochs", "box AP50", "mask AP50"], *rows]


@table
def needs_of_training() -> Cells:
    """What 300 epochs of ImageNet compute and move, model by model: derived."""
    return read("scaling")["needs"]


@table
def steps_of_training() -> Cells:
    """The parts of a step on many GPUs: derived."""
    return read("scaling")["steps"]


@table
def loaders() -> Cells:
    """Images a second of this loader and of timm's."""
    files = {"128 px": "loaders_shared_cpu", "128 px, before": "loaders_small_cpu", "500 x 375, before": "loaders_cpu"}
    found = [{row["loader"]: row["images_per_second"] for row in read(name)["rows"]} for name in files.values()]
    names = dict.fromkeys(name for rates in found for name in rates if "shards" not in name)
    rows = [[name, *(number(rates[name], 0) if name in rates else "-" for rates in found)] for name in names]
    return [["images/s", *files], *rows]


def _single(name: str) -> Any:
    return next(row["value"] for row in read("single")["rows"] if row["name"] == name)


@table
def three_numbers() -> Cells:
    """What the README shows: speed of the attention, what choosing keys is worth, a model accelerated."""
    fast = next(row for row in read("attention_cpu")["rows"] if "L16384 k98" in row["case"])
    right = {name: statistics.fmean(run["accuracy"] for run in runs) for name, runs in _retrieval().items()}
    at = next(row for row in read("accelerate_imagenette")["rows"] if row["asked_error"] == 0.05)
    ratio, backward = (bold(number(fast[key], 1)) for key in ("ratio", "ratio_backward"))
    groups = bold(number(right["DG, G 48, k 16"], 1))
    return [
        ["", "DG-Attention", "beside it"],
        [
            "attention over 128 x 128 tokens, k 98; with backward: times as fast",
            f"{ratio}; {backward}",
            "global: 1",
        ],
        [
            "a source in the other half of the map is found, %, with 16 of 256 keys",
            groups,
            f"global {right['global']:.1f}, windows {right['windows 4 x 4']:.1f}, chance 12.5",
        ],
        [
            "a small ViT accelerated, no training, error asked 5 %: attention, model times as fast; top-1, %",
            f"{bold(number(at['attention_speedup'], 1))}, {number(at['model_speedup'], 1)}; {100 * at['top1']:.1f}",
            f"1, 1; {100 * at['top1_before']:.1f}",
        ],
    ]
