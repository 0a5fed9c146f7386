"""Tables of speed and memory: the attention, whole models, their parts, exported files."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tables_shared import NAMES, ROOT, Cells, bold, off, read, relative, table

from dgt.models.cost import attention_share
from dgt.utils.records import number


@table
def equation_7() -> Cells:
    """The share of the products that Eq. 7 predicts, and how much faster the operator is."""
    measured: dict[tuple[int, int], dict[int, str]] = {}
    heads = {}
    for row in read("attention_cpu")["rows"]:
        batch, head, tokens, top_k = (int(part) for part in re.findall(r"[BHLk](\d+)", row["case"])[:4])
        measured.setdefault((tokens, top_k), {})[batch] = number(row["ratio"], 2)
        heads[tokens] = head
    rows = []
    for (tokens, top_k), found in measured.items():
        share, side = attention_share(tokens, 32 * heads[tokens], top_k), math.isqrt(tokens)
        cells = [f"{side} x {side}", str(top_k), number(share, 3), number(1 / share, 1)]
        rows.append([*cells, found.get(1, "-"), found.get(8, "-")])
    return [["tokens", "k", "share", "predicted", "measured, batch 1", "batch 8"], *rows]


@table
def attention() -> Cells:
    """The attention beside PyTorch's, forward and with backward, its steps and its memory."""
    return _attention("attention_cpu")


@table
def attention_on_zen_4() -> Cells:
    """The same on the other processor."""
    return _attention("attention_zen4")


def _attention(name: str) -> Cells:
    heads = ["attention", "SDPA ms", "DG-Attention ms", "ratio", "with backward: SDPA", "DG", "ratio"]
    rows = []
    for row in read(name)["rows"]:
        cells = [row["case"], *(number(row[key], 2) for key in ("sdpa_ms", "dgt_ms")), bold(number(row["ratio"], 2))]
        cells += [number(row[key], 1) for key in ("sdpa_backward_ms", "dgt_backward_ms")]
        cells += [bold(number(row["ratio_backward"], 2)), ", ".join(number(ms, 2) for ms in row["steps_ms"].values())]
        rows.append([*cells, f"{number(row['peak_mib'], 1)} ({number(row['bool_mask_mib'], 1)})"])
    return [[*heads, "group, select, attend ms", "peak extra MiB (L x L mask)"], *rows]


def _models(*names: str) -> dict[str, list[dict[str, Any]]]:
    """For each model of the first file, in its order, its row in each file."""
    files = [{row["model"]: row for row in read(f"models_cpu_{name}")["rows"]} for name in names]
    return {model: [rows[model] for rows in files] for model in files[0]}


def _timed(row: dict[str, Any]) -> list[str]:
    return [number(row["ms_per_image"], 1), bold(number(row["relative_time"], 2))]


@table
def models() -> Cells:
    """Whole models at 224 px, eager, with the accuracy that their papers publish."""
    published = json.loads((ROOT / "benchmarks" / "published.json").read_text(encoding="utf-8"))
    rows = []
    for name, (one, eight) in _models("batch1", "batch8").items():
        if "+inference" in name:  # a form that is gone
            continue
        rows.append([name, number(published[name.partition("+")[0].partition("@")[0]]["top1"], 1)])
        rows[-1] += [*_timed(one), *_timed(eight)]
    heads = ["model, 224 px", "top-1, published", "batch 1: ms", "relative", "batch 8: ms per image", "relative"]
    return [heads, *rows]


def _runtimes(batch: int, name: str = "runtimes") -> Cells:
    """Every model in every runtime: milliseconds an image, and relative to Swin-T there; its best first."""
    models: dict[str, list[dict[str, Any]]] = {}
    for row in read(f"{name}_batch{batch}")["rows"]:
        models.setdefault(row["model"], []).append(row)
    swin = min(row["ms_per_image"] for row in models["swin_tiny_patch4_window7_224"])
    rows = []
    for model, found in models.items():
        best = min(found, key=lambda row: row["ms_per_image"])
        cells = {
            row["runtime"]: f"{row['ms_per_image']:.0f} ({bold(number(row['relative_time'], 2))})" for row in found
        }
        rows.append([NAMES.get(model, model), f"{best['runtime']}, {bold(number(best['ms_per_image'] / swin, 2))}"])
        rows[-1] += [cells.get(name, "-") for name in ("openvino", "onnxruntime", "compile", "eager")]
    heads = [f"224 px, batch {batch}; ms an image (times Swin-T's)", "best, beside Swin-T's best"]
    return [[*heads, "openvino", "onnxruntime", "compile", "eager"], *rows]


@table
def eager_by_threads() -> Cells:
    """DGT-T beside Swin-T in PyTorch as it comes, by threads and images."""
    models, rows = ["swin_tiny_patch4_window7_224", "dgt_tiny", "dgt_tiny+inference"], []
    for run in read("eager_threads"):
        times = {row["model"]: row["ms_per_image"] for row in run["rows"]}
        cells = [f"{times[model]:.0f} ({bold(number(times[model] / times[models[0]], 2))})" for model in models]
        threads = run["machine"]["threads"]
        rows.append([f"{threads} thread{'s' if threads > 1 else ''}, batch {run['batch']}", *cells])
    return [["224 px; ms an image (times Swin-T's)", *(NAMES.get(model, model) for model in models)], *rows]


@table
def attention_bound() -> Cells:
    """The operator against its bound by FLOPs, before its threads shared steps and since."""
    return _bound("before", "after")


@table
def attention_bound_on_zen_4() -> Cells:
    """The same on the other processor, before few of many keys were sorted and since."""
    return _bound("zen4_before", "zen4")


def _bound(before: str, after: str) -> Cells:
    found: dict[str, dict[tuple[int, str], str]] = {}
    for row in read("attention_bound"):
        if not row["busy"] and row["label"] in (before, after):
            cell = f"{number(row['ratio'], 1)} ({number(row['share'], 0, 100)} %)"
            found.setdefault(row["case"], {})[row["threads"], row["label"]] = cell
    columns = [(threads, label) for threads in (1, 2) for label in (before, after)]
    rows = []
    for case, cells in found.items():
        batch, heads, tokens, channels, top_k = re.split("[x:]", case)
        rows.append([f"B{batch} H{heads} L{tokens} D{channels} k{top_k}", *(cells[key] for key in columns)])
    return [["attention", "one thread, before", "now", "two threads, before", "now"], *rows]


@table
def runtimes_side_by_side() -> Cells:
    """Models and runtimes, one image at a time."""
    return _runtimes(1)


@table
def runtimes_with_eight_images() -> Cells:
    """The same, eight at a time."""
    return _runtimes(8)


@table
def runtimes_on_zen_4() -> Cells:
    """The same on the other processor, one image at a time."""
    return _runtimes(1, "runtimes_zen4")


@table
def runtimes_on_zen_4_with_eight_images() -> Cells:
    """And eight."""
    return _runtimes(8, "runtimes_zen4")


@table
def zen_4_before_and_since() -> Cells:
    """DGT-T's time relative to Swin-T's in every runtime, in two runs."""
    names = [f"runtimes_zen4{run}_batch{batch}" for batch in (1, 8) for run in ("_before", "")]
    found = [
        {row["runtime"]: row["relative_time"] for row in read(name)["rows"] if row["model"] == "dgt_tiny"}
        for name in names
    ]
    heads = ["DGT-T, relative to Swin-T", "batch 1, before", "since", "batch 8, before", "since"]
    return [heads, *([runtime, *(number(times[runtime], 2) for times in found)] for runtime in found[0])]


@table
def packed_by_hand() -> Cells:
    """What packing weights by hand was worth, beside runtimes: the lower quartiles, batch 8."""
    rows = read("inference_form_cpu")["batches"][1]["rows"]
    return [
        ["224 px, batch 8", "ms an image"],
        *([row["model"], number(row["ms_per_image"]["quartile"], 1)] for row in rows),
    ]


@table
def beside_global_attention() -> Cells:
    """DGT-T in parts of the time of itself with global attention in all stages, and what the products let expect."""
    rows = []
    for row in (row for row in read("runtimes_global")["rows"] if "time_of_global" in row):  # not its peers
        rows.append([str(row["image_size"]), row["runtime"], bold(number(row["time_of_global"], 2))])
        rows[-1].append(number(row["work_of_global"], 2))
        rows[-1].append(", ".join(number(share, 3) for share in row["eq7_by_stage"]))
    heads = ["pixels", "runtime", "share of the time", "share of all multiply-adds"]
    return [[*heads, "Eq. 7: of the attention's, by stage"], *rows]


@table
def larger_images() -> Cells:
    """Whole models at 512 and 1024 px."""
    found = [row for name in ("px512", "px1024") for (row,) in _models(name).values()]
    rows = [
        [row["model"], str(row["image_size"]), number(row["ms_per_image"], 0), bold(number(row["relative_time"], 2))]
        for row in found
        if "+inference" not in row["model"]  # a form that is gone
    ]
    return [["model", "pixels", "ms", "relative"], *rows]


@table
def training_steps() -> Cells:
    """Steps of training: time and peak of memory."""
    rows = []
    for name, (row,) in _models("training").items():
        memory = row["peak_mib"] / next(iter(_models("training").values()))[0]["peak_mib"]
        rows.append([name, number(row["ms_per_image"], 1), number(row["images_per_second"], 1)])
        rows[-1] += [bold(number(row["relative_time"], 2)), number(row["peak_mib"], 0), bold(number(memory, 2))]
    return [["training step, 224 px, batch 8", "ms per image", "images/s", "relative", "peak MiB", "relative"], *rows]


@table
def parts() -> Cells:
    """Where the time of DGT-T goes, part by part; a dash where a form has no such part of its own."""
    columns = []
    for batch in (1, 8):
        rows = read(f"models_cpu_profile{batch}")["rows"]
        columns.append({row["part"]: row["ms_per_image"] for row in rows if row["model"] == "dgt_tiny"})
    lines = [
        [part, *(number(column.get(part), 2) for column in columns)]
        for part in dict.fromkeys(part for column in columns for part in column)
    ]
    lines.append(["together", *(number(sum(column.values()), 1) for column in columns)])
    return [["part of DGT-T at 224 px, eager, ms per image", "batch 1", "batch 8"], *lines]


@table
def exported_models() -> Cells:
    """ONNX in onnxruntime beside eager PyTorch."""
    rows = []
    for row in read("exported_cpu")["rows"]:
        ms = row["ms_per_image"]
        rows.append([f"{row['side']} x {row['side']}", str(row["batch"])])
        rows[-1] += [number(ms["eager"], 1), number(ms["onnxruntime"], 1)]
        rows[-1].append(bold(number(ms["onnxruntime"] / ms["eager"], 2)))
    return [["pixels", "batch", "eager, ms per image", "onnxruntime, ms per image", "ratio"], *rows]


@table
def int8() -> Cells:
    """The same file with integers of 8 bits, at 224 px."""
    content = read("exported_cpu")
    one, eight = (row for row in content["rows"] if row["side"] == 224)
    rows = []
    names = {"onnxruntime": "float32", "int8 MatMul": "matrix products", "int8 MatMul, Conv": "and convolutions"}
    for key, name in names.items():
        rows.append([name, number(content["bytes"][key], 1, 1 / 2**20) + " MiB"])
        rows[-1] += [number(row["ms_per_image"][key], 1) for row in (one, eight)]
        rows[-1].append(one["agreement"][key].rpartition(" ")[2])
    heads = ["int8, 224 px", "file", "ms per image, batch 1", "batch 8"]
    return [[*heads, "largest difference of a logit, relative to the largest logit or 1"], *rows]


@table
def attention_in_short() -> Cells:
    """The attention beside PyTorch's, for those who have a minute."""
    heads = ["shape, groups, keys", "PyTorch's global attention, ms", "DG-Attention, ms", "times faster"]
    rows = []
    for row in read("attention_cpu")["rows"]:
        cells = [row["case"].removesuffix(" float32"), *(number(row[key], 1) for key in ("sdpa_ms", "dgt_ms"))]
        rows.append([*cells, *(bold(number(row[key], 1)) for key in ("ratio", "ratio_backward"))])
    return [[*heads, "with backward"], *rows]


@table
def large_models() -> Cells:
    """Large ViTs with random weights, accelerated as trained ones were, beside themselves."""
    heads = ["model", "pixels", "tokens", "groups of keys", "s", "in groups, s", "times as fast", "bound"]
    rows = []
    for row in read("accelerate_models")["rows"]:
        if row["part"] != "shapes":
            cells = [f"`{row['model']}`", "{} x {}".format(*row["size"]), str(row["tokens"])]
            cells += [f"{row['groups']} of {row['keys']}", number(row["before_ms"], 1, 1e-3)]
            cells += [number(row["after_ms"], 1, 1e-3), bold(number(row["speedup"], 1))]
            rows.append([*cells, number(row["bound"], 1)])
    return [heads, *rows]


@table
def shapes_of_all_kinds() -> Cells:
    """What `dgt.accelerate` decided for a hundred sampled shapes, beside PyTorch's attention."""
    rows = [row for row in read("accelerate_models")["rows"] if row["part"] == "shapes"]
    ratios = sorted(row["ratio"] for row in rows if row["choice"] == "groups")
    worst, middle, best = ratios[-1], ratios[len(ratios) // 2], ratios[0]
    heads = ["shapes", "left as they are", "in groups", "times SDPA's time: best", "median", "worst"]
    counts = [str(len(rows)), str(len(rows) - len(ratios)), str(len(ratios))]
    return [heads, [*counts, *(number(ratio, 3) for ratio in (best, middle, worst))]]


@table
def neighbours_of_a_plan() -> Cells:
    """A plan and two that nobody chose, on the images that chose it, on those kept aside, and on others."""
    found = read("accelerate_neighbours")
    heads = ["keys", *("{}: {} images".format(name, found["images"][name]) for name in ("chose", "aside", "others"))]
    rows = []
    for row in found["rows"]:
        pairs = [[number(row[name][key], 2, 100) for key in ("error", "half")] for name in found["images"]]
        keys = "as chosen" if row["times"] == 1 else f"times {row['times']:g}"
        rows.append([keys, *(f"{error} ± {half} %" for error, half in pairs)])
        rows[-1].append(f"{100 * (row['chose_by_others'] - 1):+.0f} %")
    return [[*heads, "chose by others"], *rows]


@table
def how_many_images() -> Cells:
    """How often draws of some of the unseen images have an error more than 20 % off that of all of them."""
    counts, rows = ("32", "64", "128", "256"), []
    for row in read("accelerate_imagenette")["rows"]:
        if row["unseen_error"] > 1e-5:
            shares = [number(row["missed"][count], 1, 100) + " %" for count in counts]
            cells = [f"{100 * row['asked_error']:.2g} %", str(row["unseen_images"]), number(row["varies"], 1)]
            rows.append([*cells, *shares])
    return [["error asked", "images", "spread", *(f"{count} drawn" for count in counts)], *rows]


@table
def predicted_by_more_images() -> Cells:
    """What reports of the ViT trained on Imagenette predict, by how many images they were given."""
    rows = []
    for found in (read("accelerate_imagenette"), read("accelerate_predicted")):
        for row in found["rows"]:
            cells = [f"{100 * row['asked_error']:.2g} %", str(found["calibrate"]), str(row["choosing_images"])]
            cells += [relative(row, name) for name in ("predicted", "measured", "unseen")]
            rows.append([*cells, str(row["unseen_images"]), off(row)])
    heads = ["error asked", "images given", "of which choose", "predicted", "on images kept aside", "on unseen images"]
    return [[*heads, "unseen", "prediction off by"], *sorted(rows, key=lambda cells: float(cells[0][:-2]))]
