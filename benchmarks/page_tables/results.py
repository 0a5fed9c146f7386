"""Tables of docs/results.md, speed and trainings, of docs/training.md and docs/start.md."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dgt.utils.records import number, wilson

from .shared import NAMES, Cells, bold, files, generation, read, span, table

SWIN = "swin_tiny_patch4_window7_224"
IN_BFLOAT16 = "+bfloat16"  # at the end of a candidate of `benchmarks/models.py`
KEPT = "+kept"
RUNTIMES = ("openvino-extension", "openvino", "onnxruntime", "compile", "eager")  # columns


# Attention alone


def _attention(name: str, threads: int = 2, backward: bool = False) -> list[dict[str, Any]]:
    """Rows of a file of `benchmarks/attention.py`, measured with nothing else running."""
    rows: list[dict[str, Any]] = read(name)["rows"]
    return [
        row | _ratios(row["fastest_ms"])
        for row in rows
        if row["threads"] == threads and row["backward"] == backward and not row.get("busy")
    ]


def _ratios(fastest: dict[str, float]) -> dict[str, float]:
    """Ratios of times; a file's own are rounded already, and would be rounded twice."""
    pairs = (("sdpa", "grouped"), ("sdpa", "dense"), ("dense", "grouped"))
    return {f"{one}_to_{other}": fastest[one] / fastest[other] for one, other in pairs}


def _place(name: str) -> str:
    """The processor of such a file, and its instruction set where that is limited."""
    limited = read(name)["machine"].get("level") == "x86-64-v3"
    return generation(name) + ", AVX2 only" * limited


def _case(case: str) -> str:
    """`8x4x784x32:98` as B8 H4 L784 D32 k98."""
    images, heads, tokens, channels, top_k = re.split("[x:]", case)
    return f"B{images} H{heads} L{tokens} D{channels} k{top_k}"


def _times(row: dict[str, Any], digits: int = 1) -> str:
    return ", ".join(
        number(row["fastest_ms"][kind], digits) for kind in ("sdpa", "dense", "grouped")
    )


@table
def attention_in_all_runs() -> Cells:
    """Forward attention on two threads: the range over all raw files that have a shape."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in [*files("native_attention_"), *files("native_busy_")]:
        for row in _attention(name):
            found[row["case"]].append(row)
    rows = []
    for case, runs in found.items():
        times = [
            span([run[key] for run in runs], 1) for key in ("sdpa_to_grouped", "dense_to_grouped")
        ]
        rows.append([_case(case), str(len(runs)), *times, number(runs[0]["bound"], 1)])
    heads = ["attention, forward", "runs", "groups: times as fast as PyTorch's"]
    return [[*heads, "as our own dense attention", "the products alone would give"], *rows]


@table
def native_kernel() -> Cells:
    """The CPU kernels compared with PyTorch's attention, on two threads and on one."""
    rows = []
    for name in files("native_attention_"):
        singles = {row["case"]: row["sdpa_to_grouped"] for row in _attention(name, threads=1)}
        for row in _attention(name):
            share = (
                f"{number(row['dense_to_grouped'], 1)} ({number(row['share_of_bound'], 0, 100)} %)"
            )
            cells = [f"{_case(row['case'])}, {_place(name)}", _times(row, 2)]
            cells += [
                bold(number(row["sdpa_to_grouped"], 1)),
                number(row["sdpa_to_dense"], 1),
                share,
            ]
            rows.append([*cells, number(singles.get(row["case"]), 1)])
    heads = ["attention, processor", "PyTorch's, ours dense, grouped: ms", "grouped to PyTorch's"]
    heads += ["ours dense to PyTorch's", "grouped to ours dense (share of the bound)"]
    return [[*heads, "grouped to PyTorch's, one thread"], *rows]


@table
def native_kernel_training() -> Cells:
    """Forward and backward of the CPU kernels compared with PyTorch's attention, two threads."""
    rows = []
    for name in files("native_attention_"):
        for row in _attention(name, backward=True):
            ratios = [bold(number(row["sdpa_to_grouped"], 1)), number(row["sdpa_to_dense"], 1)]
            ratios += _of_residual_keys(row)
            rows.append([f"{_case(row['case'])}, {_place(name)}", _times(row), *ratios])
    heads = ["forward and backward, processor", "PyTorch's, ours dense, grouped: ms"]
    heads += ["grouped to PyTorch's", "ours dense to PyTorch's"]
    return [[*heads, "time with 1 residual key, of grouped's", "with 16"], *rows]


def _of_residual_keys(row: dict[str, Any]) -> list[str]:
    """Times with one and sixteen residual keys over that without; dashes where not measured."""
    fastest = row["fastest_ms"]
    times = [fastest.get(kind) for kind in ("residual_1", "residual_16")]
    return [number(ms / fastest["grouped"] if ms else None, 2) for ms in times]


@table
def native_kernel_in_bfloat16() -> Cells:
    """The same in bfloat16, on two threads: forward, then forward and backward."""
    heads = ["bfloat16, processor"]
    for direction in ("forward", "forward and backward"):
        heads += [
            f"{direction}: PyTorch's, ours dense, grouped: ms",
            "grouped; ours dense to PyTorch's",
        ]
    rows = []
    for name in files("native_bfloat16_"):
        trained = {row["case"]: row for row in _attention(name, backward=True)}
        for row in _attention(name):
            cells = [f"{_case(row['case'])}, {_place(name)}"]
            for one in (row, trained.get(row["case"])):
                if one is None:
                    cells += ["", ""]
                    continue
                grouped, dense = (
                    number(one[f"sdpa_to_{kind}"], 1) for kind in ("grouped", "dense")
                )
                cells += [_times(one), f"{bold(grouped)}; {dense}"]
            of_residual_keys = (
                _of_residual_keys(trained[row["case"]]) if row["case"] in trained else []
            )
            rows.append([*cells, ", ".join(of_residual_keys)])
    return [[*heads, "time with 1, 16 residual keys, of grouped's"], *rows]


@table
def native_kernel_beside_zentorch() -> Cells:
    """Dense attention of PyTorch, of AMD's plugin, and ours, on two threads."""
    rows = []
    for name in files("native_zentorch_"):
        for row in read(name)["rows"]:
            fastest = row["fastest_ms"]
            times = [number(fastest[one], 1) for one in ("sdpa", "zentorch", "dense")]
            place = f"{_case(row['case']).rpartition(' ')[0]}, {row['dtype']}, {_place(name)}"
            ours = number(fastest["dense"] / fastest["zentorch"], 2)
            rows.append([place, ", ".join(times), bold(ours)])
    return [
        ["attention, type, processor", "PyTorch's, zentorch's, ours: ms", "ours to zentorch's"],
        *rows,
    ]


@table
def clustered_attention_in_bfloat16() -> Cells:
    """Clustered attention and what it replaces, each in both types."""
    rows = []
    for name in files("native_clustered_"):
        for row in read(name)["rows"]:
            fastest = row["fastest_ms"]
            *sizes, groups, residual_keys = row["case"].split(":")
            case = f"{_case(':'.join(sizes))} G{groups} M{residual_keys}"
            cells = [f"{case}, {_place(name)}, {row['threads']}"]
            for attention in ("sdpa", "dense", "clustered", "first_order"):
                times = [fastest[f"{attention}_{kind}"] for kind in ("float32", "bfloat16")]
                cells.append(", ".join(number(time, 1) for time in times))
            saved = 1 - fastest["clustered_bfloat16"] / fastest["clustered_float32"]
            rows.append([*cells, bold(number(saved, 0, 100))])
    heads = ["float32, bfloat16: ms; processor, threads", "PyTorch's", "ours dense", "clustered"]
    return [[*heads, "to first order", "clustered, what bfloat16 saves, %"], *rows]


@table
def native_kernel_busy() -> Cells:
    """Medians with nothing else running, and with one busy process."""
    rows = []
    for name in files("native_busy_"):
        found = read(name)["rows"]
        busy = {row["case"]: row["median_ms"] for row in found if row["busy"]}
        for row in found:
            if not row["busy"]:
                cells = [
                    f"{number(row['median_ms'][kind], 1)} to {number(busy[row['case']][kind], 1)}"
                    for kind in ("sdpa", "dense", "grouped")
                ]
                rows.append([f"{_case(row['case'])}, {_place(name)}", *cells])
    return [["median ms, idle to one busy process", "PyTorch's", "ours dense", "grouped"], *rows]


# Whole models


@table
def whole_models() -> Cells:
    """Every model in every runtime: milliseconds per image, and the time relative to Swin-T's there."""
    rows = []
    for batch in (1, 8):
        for name in files(f"models_*_batch{batch}"):
            runs: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
            for row in read(name)["rows"]:
                runs[row["model"]][row["runtime"]] = row
            for model, own in runs.items():
                swin = runs[_swin_beside(model)]
                ran_everywhere = swin.keys() >= set(RUNTIMES[1:])
                ratio = bold(number(_fastest(own) / _fastest(swin), 2)) if ran_everywhere else "-"
                cells = [f"{_model(model)}, batch {batch}, {_place(name)}", ratio]
                rows.append([*cells, *(_ms_and_ratio(own.get(runtime)) for runtime in RUNTIMES)])
    heads = ["ms per image (times Swin-T's)", "fastest to Swin-T's fastest"]
    return [[*heads, *RUNTIMES], *rows]


def _machine(name: str) -> str:
    """`Zen 5, one thread, 2026-11-25`: where and when `benchmarks/models.py` wrote a file."""
    machine = read(name)["machine"]
    threads = "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{generation(name)}, {threads}, {machine['date']}"


def _model(name: str) -> str:
    """A candidate of `benchmarks/models.py`, for people."""
    plain = name.removesuffix(IN_BFLOAT16)
    return NAMES[plain] if plain == name else f"{NAMES[plain]}, bfloat16"


def _swin_beside(model: str) -> str:
    """The candidate that a model's time is relative to."""
    return SWIN + IN_BFLOAT16 if model.endswith(IN_BFLOAT16) else SWIN


def _fastest(runs: dict[str, dict[str, Any]]) -> float:
    """The time of a model in its fastest runtime."""
    return min(float(row["ms_per_image"]) for row in runs.values())


def _ms_and_ratio(row: dict[str, Any] | None) -> str:
    """Milliseconds per image, and the time relative to Swin-T's; a dash for none."""
    if row is None:
        return "-"
    return f"{number(row['ms_per_image'], 0)} ({number(row['relative_time'], 2)})"


@table
def training_steps() -> Cells:
    """Training steps: time and peak memory; in parentheses relative to Swin-T."""
    rows = []
    for name in files("models_*_training"):
        found = {re.sub("@[0-9]+", "", row["model"]): row for row in read(name)["rows"]}
        for model, row in found.items():
            swin = found[_swin_beside(model)]
            cells = [f"{_model(model)}, {_training_place(name)}"]
            for key in ("ms_per_image", "peak_mib"):
                ratio = row[key] and number(row[key] / swin[key], 2)
                cells.append(f"{number(row[key], 0)} ({ratio})" if ratio else "-")
            rows.append(cells)
    return [["training step", "ms per image (times Swin-T's)", "peak MiB"], *rows]


def _training_place(name: str) -> str:
    """The processor of such a file, and what differs from eight images of 224 px on two threads."""
    found = read(name)
    row = found["rows"][0]
    place = generation(name)
    if found["machine"]["threads"] == 1:
        place += ", one thread"
    if row["batch_size"] == 1:
        place += f", one image of {row['image_size']} px"
    if "allocator" in found["machine"]:
        place += ", memory kept"
    return place


@table
def kept_memory() -> Cells:
    """One image with glibc's memory as it is and kept: the times of every run, and their ratios."""
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    names = files("kept_memory")
    for name in names:
        times = {row["model"]: float(row["ms_per_image"]) for row in read(name)["rows"]}
        for model, time in times.items():
            if not model.endswith(KEPT):
                runs[model].append((time, times[model + KEPT]))
    rows = []
    for model, pairs in runs.items():
        plain, _, size = model.removesuffix(IN_BFLOAT16).partition("@")
        half = ", bfloat16" if model.endswith(IN_BFLOAT16) else ""
        as_it_is = ", ".join(number(before, 0) for before, _ in pairs)
        kept = ", ".join(number(after, 0) for _, after in pairs)
        ratios = ", ".join(number(after / before, 2) for before, after in pairs)
        rows.append([f"{NAMES[plain]}{half}", size, as_it_is, kept, bold(ratios)])
    return [[f"one image; {_machine(names[0])}", "px", "ms, by run", "kept", "ratios"], *rows]


@table
def beside_global_attention() -> Cells:
    """DGT-T's share of the time that it takes with global attention in all stages."""
    (name,) = files("models_*_global")
    rows = []
    for row in read(name)["rows"]:
        if "time_of_global" in row:
            time = bold(number(row["time_of_global"], 2))
            rows.append([str(row["image_size"]), time, number(row["work_of_global"], 2)])
    heads = [f"pixels; {_machine(name)}", "share of the time, eager", "share of all multiply-adds"]
    return [heads, *rows]


# Trainings


def _interval(low: float, high: float) -> str:
    return f"({number(low, 1, 100)} to {number(high, 1, 100)})"


@table
def imagenette_in_hours() -> Cells:
    """Imagenette from random weights, in hours of two cores."""
    rows = []
    for row in read("imagenette_cpu")["rows"]:
        top1, top5, images = (row["at_128"][key] for key in ("top1", "top5", "images"))
        cells = [str(row["hours"]), f"`{row['model']}`", number(row["parameters"], 2, 1e-6)]
        cells += [str(row["epochs"]), number(row["seconds"], 0, 1 / 60)]
        cells += [number(row["at_96"]["top1"], 1, 100), number(max(row["curve"]), 1, 100)]
        cells.append(f"{bold(number(top1, 1, 100))} {_interval(*wilson(top1, images))}")
        rows.append([*cells, number(top5, 1, 100)])
    heads = ["hours of two cores", "model", "parameters, M", "epochs", "minutes of one core"]
    heads += ["top-1 at 96 px, %", "its best epoch", "top-1 at 128 px, % (95 % interval)"]
    return [[*heads, "top-5"], *rows]


@table
def imagenette_peers() -> Cells:
    """Models of one size given the same minutes of a core, with up to three learning rates each."""
    found = read("imagenette_peers")["rows"]
    rates = sorted({row["rate"] for row in found})
    rows = []
    for model in sorted({row["model"] for row in found}):
        own = {row["rate"]: row for row in found if row["model"] == model}
        first = next(iter(own.values()))
        cells = [f"`{model}`", number(first["parameters"], 2, 1e-6), str(first["epochs"])]
        cells.append(span([row["seconds"] / 60 for row in own.values()], 0))
        by_rate = [own.get(rate) for rate in rates]
        rows.append([*cells, *_best_in_bold(by_rate, "at_96"), *_best_in_bold(by_rate, "at_128")])
    heads = ["model", "parameters, M", "epochs", "minutes it took"]
    heads += [f"{size} px, rate {rate:g}" for size in (96, 128) for rate in rates]
    return [heads, *rows]


def _best_in_bold(rows: Sequence[dict[str, Any] | None], size: str) -> list[str]:
    """Top-1 in % at one size, by learning rate; "-" where there is no run."""
    shares = [row[size]["top1"] if row else None for row in rows]
    best = max(share for share in shares if share is not None)
    return [
        bold(number(share, 1, 100)) if share == best else number(share, 1, 100) for share in shares
    ]


@table
def segmentation() -> Cells:
    """Short trainings of segmenters from random weights, and from the demo's classifier."""
    rows = []
    for name, run in read("segmentation_cpu")["runs"].items():
        shares = [run["metrics"].get(key) for key in ("miou", "accuracy", "mean_accuracy")]
        three = run.get("at_three_scales", {}).get("miou")
        cells = [NAMES.get(name, name), number(run["parameters"], 2, 1e-6), str(run["epochs"])]
        cells += [number(run["seconds"], 0, 1 / 60), *(number(share, 1, 100) for share in shares)]
        rows.append([*cells, number(three, 1, 100)])
    heads = ["run", "parameters, M", "epochs", "minutes", "mIoU, %", "pixel accuracy"]
    return [[*heads, "mean accuracy", "mIoU, flipped and at three scales"], *rows]


@table
def camvid_by_class() -> Cells:
    """IoU of each class of CamVid after the longer training."""
    metrics = read("segmentation_cpu")["runs"]["camvid_nano"]["metrics"]
    shares = {
        key[4:]: number(value, 1, 100) for key, value in metrics.items() if key.startswith("iou/")
    }
    return [["", *shares], ["IoU, %", *shares.values()]]


@table
def weights() -> Cells:
    """What `tools/make_weights.sh` trains and packs: each metric with its 95 % interval."""
    rows = []
    for name, run in read("weights").items():
        metrics = [
            f"{row['label']} {number(row['value'], 1, 100)} {_interval(row['low'], row['high'])}"
            for row in run["evaluation"]["metrics"].values()
        ]
        cells = [f"`{name}`", number(run["parameters"], 2, 1e-6), "; ".join(metrics)]
        seconds = run["seconds"] + (run.get("first_weights") or {}).get("seconds", 0)
        rows.append([*cells, str(run["evaluation"]["images"]), number(seconds, 0, 1 / 60)])
    return [["weights", "parameters, M", "% (95 % interval)", "on images", "minutes"], *rows]


@table
def stops_and_kills() -> Cells:
    """What was stopped, killed, or damaged, and what came of it."""
    found = read("resume_campaign")
    stops, kills, damage = found["stops"], found["kills"], found["damage"]
    harmless = damage["bits_without_meaning"]
    return [
        ["what", "times", "outcome"],
        [
            "stopped at a random moment, resumed once",
            str(stops["count"]),
            f"{stops['bit_equal']} bit-equal at the end",
        ],
        [
            "killed right after a step that saves",
            str(kills["kills"]),
            f"{kills['opened']} newest or previous checkpoints opened",
        ],
        ["a checkpoint cut short", str(damage["each"]), f"{damage['truncated_refused']} rejected"],
        [
            "one bit of it flipped",
            str(damage["each"]),
            f"{damage['bits_refused']} rejected, {harmless} in padding of the file: loaded correctly",
        ],
    ]


@table
def environments() -> Cells:
    """Sizes of environments with one extra each."""
    found = read("environments")["environments"]
    names = {"core": "`pip install .`", **{name: f"`{name}`" for name in found if name != "core"}}
    rows = [
        [
            names[name],
            str(row["packages"]),
            str(row["megabytes"] - row["of_pytorch"]),
            str(row["megabytes"]),
        ]
        for name, row in sorted(found.items(), key=lambda item: item[1]["megabytes"])
        if not name.startswith("before-")
    ]
    heads = ["installed alone", "packages", "MB beyond PyTorch", "MB with PyTorch, for GPUs, too"]
    return [heads, *rows]
