"""Write the tables of the documentation from the raw results: `python benchmarks/tables.py`; `--check` only compares.

A page holds `<!-- table: NAME -->`, the table, `<!-- end -->`, which neither GitHub nor the site shows; NAME is that of
a function below, made a table by `@table`, which reads files of `benchmarks/results` and returns lists of cells, the
heads first. Nobody types such a table: change the JSON, then run this. `tests/test_tables.py` fails where they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dgt.experiments.report import interval, markdown_table, number
from dgt.models.cost import attention_share

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"<!-- table: ([\w -]+) -->\n\n(.*?)<!-- end -->", re.DOTALL)
Cells = list[list[str]]
TABLES: dict[str, Callable[[], Cells]] = {}
NAMES = {"dgt_tiny": "DGT-T", "dgt_small": "DGT-S", "dgt_base": "DGT-B", "dgt_nano": "DGT-Nano"}
NAMES |= {"resnet50": "ResNet-50", "swin_tiny_patch4_window7_224": "Swin-T"}
ABLATED = {  # key of the measures in a table's JSON: head, decimals and factor
    **{"selected": ("mass on selected keys, %", 1, 100), "random": ("random", 1, 100), "window": ("window", 1, 100)},
    **{"best_for_all": ("best for all", 1, 100), "best_for_group": ("for each group", 1, 100)},
    **{"best_for_query": ("for each query", 1, 100), "perplexity": ("perplexity of groups", 1, 1)},
}


def table(make: Callable[[], Cells]) -> Callable[[], Cells]:
    """Register a table under its function's name, with blanks for underscores."""
    TABLES[make.__name__.replace("_", " ").strip()] = make
    return make


def read(name: str) -> Any:
    """The content of `benchmarks/results/NAME.json`."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def written(text: str) -> str:
    """A page with all its tables as they should be. Raises KeyError for a name that no table has."""
    return MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{render(found[1])}\n<!-- end -->", text)


def render(name: str) -> str:
    """A table in Markdown."""
    heads, *rows = TABLES[name]()
    return markdown_table(heads, rows)


def bold(text: str) -> str:
    """Text in bold face."""
    return f"**{text}**"


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


def _like(name: str) -> Cells:
    shares = {"pure": "pure groups, %", "random_pure": "drawn at random", "like": "like keys: the group's, %"}
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
def comparators() -> Cells:
    """Parameters and FLOPs of every row of Tables 2, 3 and 4 (a), beside the paper's."""
    rows = []
    for row in read("comparators")["rows"]:
        printed = [f"{row['paper_params'] / 1e6:g}", f"{row['paper_flops'] / 1e9:g}"]
        more = None if row["flops"] is None else 100 * (row["flops"] / row["paper_flops"] - 1)
        cells = [{"classify": "2", "segment": "3"}.get(row["task"], "4 (a)"), row["row"], row["model"] or "-"]
        cells += [number(row["params"], 1, 1e-6), printed[0], number(row["flops"], 1, 1e-9), printed[1]]
        rows.append([*cells, "-" if more is None else f"{more:+.1f}"])
    return [["table", "row", "model", "parameters, M", "paper", "FLOPs, G", "paper", "more, %"], *rows]


@table
def attention() -> Cells:
    """The attention beside PyTorch's, forward and with backward, its steps and its memory."""
    heads = ["attention", "SDPA ms", "DG-Attention ms", "ratio", "with backward: SDPA", "DG", "ratio"]
    rows = []
    for row in read("attention_cpu")["rows"]:
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


def _runtimes(batch: int) -> Cells:
    """Every model in every runtime: milliseconds an image, and relative to Swin-T there; its best first."""
    models: dict[str, list[dict[str, Any]]] = {}
    for row in read(f"runtimes_batch{batch}")["rows"]:
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
    heads = [f"224 px, batch {batch}", "best, beside Swin-T's best", "openvino", "onnxruntime", "compile", "eager"]
    return [heads, *rows]


@table
def attention_bound() -> Cells:
    """The operator against its bound by FLOPs, before its threads shared steps and since."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    for row in read("attention_bound"):
        if not row["busy"]:
            cell = f"{number(row['ratio'], 1)} ({number(row['share'], 0, 100)} %)"
            found.setdefault(row["case"], {})[row["threads"], row["label"]] = cell
    columns = [(1, "before"), (1, "after"), (2, "before"), (2, "after")]
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
    for row in read("runtimes_global")["rows"]:
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
def accelerated() -> Cells:
    """A ViT trained on CamVid, accelerated within several errors."""
    heads = ["error asked", "predicted", "on images kept aside", "on validation images", "same class", "mIoU"]
    rows = []
    for row in read("accelerate_camvid")["rows"]:
        if "asked_error" in row:
            errors = [row[key] for key in ("asked_error", "predicted_error", "measured_error", "unseen_error")]
            cells = [f"{100 * error:.2g} %" if error else "0" for error in errors]
            cells += [number(row["agreement"], 1, 100) + " %", number(row["miou"], 1, 100)]
            rows.append([*cells, *(number(row[key], 2) for key in ("attention_speedup", "model_speedup"))])
            rows[-1].append(number(row["bound"], 1))
    return [[*heads, "attention", "model", "bound"], *rows]


@table
def camvid() -> Cells:
    """Segmentation of CamVid from random weights."""
    rows = []
    for name, run in read("segmentation_cpu")["runs"].items():
        if "scenes" not in name:
            shares = [number(run["metrics"][key], 1, 100) + " %" for key in ("miou", "accuracy", "mean_accuracy")]
            rows.append([name, number(run["parameters"], 3, 1e-6) + " M", *shares])
    return [["backbone", "parameters", "mIoU", "pixel accuracy", "mean accuracy"], *rows]


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
def replacement() -> Cells:
    """A trained ViT with other attention: labels as before, the divergence, and mIoU."""
    keys = (("agreement", 1, 100), ("divergence", 4, 1), ("score", 1, 100))
    return _choices("replacement", lambda row: " / ".join(number(row[key], *how) for key, *how in keys))


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
def attention_in_short() -> Cells:
    """The attention beside PyTorch's, for those who have a minute."""
    heads = ["shape, groups, keys", "PyTorch's global attention, ms", "DG-Attention, ms", "times faster"]
    rows = []
    for row in read("attention_cpu")["rows"]:
        cells = [row["case"].removesuffix(" float32"), *(number(row[key], 1) for key in ("sdpa_ms", "dgt_ms"))]
        rows.append([*cells, *(bold(number(row[key], 1)) for key in ("ratio", "ratio_backward"))])
    return [[*heads, "with backward"], *rows]


@table
def three_numbers() -> Cells:
    """What the README shows: speed of the attention, what choosing keys is worth, a model accelerated."""
    fast = next(row for row in read("attention_cpu")["rows"] if "L16384 k98" in row["case"])
    right = {name: statistics.fmean(run["accuracy"] for run in runs) for name, runs in _retrieval().items()}
    found = read("accelerate_camvid")["rows"]
    before, at = found[0], next(row for row in found if row.get("asked_error") == 0.03)
    ratio, backward = (bold(number(fast[key], 1)) for key in ("ratio", "ratio_backward"))
    groups = bold(number(right["DG, G 48, k 16"], 1))
    return [
        ["", "DG-Attention", "beside it"],
        ["attention over 128 x 128 tokens, forward; with backward: times as fast", f"{ratio}; {backward}", "global: 1"],
        [
            *("a source in the other half of the map is found, %, with 16 of 256 keys", groups),
            f"global {right['global']:.1f}, windows {right['windows 4 x 4']:.1f}, chance 12.5",
        ],
        [
            "a trained ViT accelerated, no training, error asked 3 %: attention, model times as fast; mIoU",
            f"{bold(number(at['attention_speedup'], 1))}, {number(at['model_speedup'], 1)}; {at['miou']:.1%}",
            f"1, 1; {before['miou']:.1%}",
        ],
    ]


def main() -> int:
    """Write the pages, or tell which are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page differs")
    check, wrong = parser.parse_args().check, 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            wrong += 1
            print(f"{page.relative_to(ROOT)}: {'differs' if check else 'written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return int(check and wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
