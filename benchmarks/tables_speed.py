"""Tables of speed and memory: the attention, whole models, accelerated models."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from typing import Any

from tables_shared import (
    NAMES,
    RESULTS,
    UNKNOWN,
    Cells,
    bold,
    generations,
    read,
    span,
    table,
)

from dgt.models.cost import attention_share
from dgt.utils.records import number


@table
def equation_7() -> Cells:
    """The share of the products that Eq. 7 predicts, and how much faster that would be."""
    rows = []
    for tokens, top_k, heads in (
        (3136, 98, 2),
        (784, 98, 4),
        (196, 98, 8),
        (16384, 98, 2),
        (25600, 500, 2),
    ):
        share, side = attention_share(tokens, 32 * heads, top_k), math.isqrt(tokens)
        rows.append([f"{side} x {side}", str(top_k), number(share, 3), number(1 / share, 1)])
    return [
        ["tokens", "k", "share of the products", "speedup if time were proportional to products"],
        *rows,
    ]


NOWHERE = "none named: counts, sizes, accuracies"
RUNTIMES = (
    "openvino-extension",
    "openvino",
    "onnxruntime",
    "compile",
    "eager",
)  # columns, as far as they were timed


def runs_of(row: dict[str, Any], key: str) -> list[float]:
    """A ratio in every run that a row has, or in its one run."""
    runs: list[float] = row.get(
        {"ratio": "ratios", "ratio_backward": "ratios_backward"}[key], [row[key]]
    )
    return runs


def native_files() -> list[str]:
    """The raw files of `benchmarks/native_attention.py`, one a processor, by name."""
    return [path.stem for path in sorted(RESULTS.glob("native_attention_*.json"))]


def native_rows(name: str, threads: int, backward: bool) -> list[dict[str, Any]]:
    """Rows of one of these files."""
    rows: list[dict[str, Any]] = read(name)["rows"]
    return [row for row in rows if row["threads"] == threads and row["backward"] == backward]


def native_place(name: str) -> str:
    """The processor of such a file, and its instruction set where that is not AVX-512."""
    (where,) = generations(name)
    level = read(name)["machine"].get("level")
    return f"{where}, AVX2 only" if level == "x86-64-v3" else where


def case_in_words(case: str) -> str:
    """`8x4x784x32:98` as B8 H4 L784 D32 k98."""
    images, heads, tokens, channels, top_k = re.split("[x:]", case)
    return f"B{images} H{heads} L{tokens} D{channels} k{top_k}"


@table
def native_kernel() -> Cells:
    """The native kernels beside PyTorch's attention, on two threads and on one, one row a case."""
    heads = ["attention, processor", "PyTorch's, ours dense, grouped: ms", "grouped to PyTorch's"]
    heads += ["ours dense to PyTorch's", "grouped to ours dense (share of the bound)", "one thread"]
    rows = []
    for name in native_files():
        where = native_place(name)
        singles = {row["case"]: row for row in native_rows(name, 1, False)}
        for row in native_rows(name, 2, False):
            times = row["fastest_ms"]
            single = singles.get(row["case"])
            rows.append(
                [
                    f"{case_in_words(row['case'])}, {where}",
                    ", ".join(number(times[kind], 2) for kind in ("sdpa", "dense", "grouped")),
                    bold(number(row["sdpa_to_grouped"], 1)),
                    number(row["sdpa_to_dense"], 1),
                    f"{number(row['dense_to_grouped'], 1)} ({number(row['share_of_bound'], 0, 100)} %)",
                    number(single["sdpa_to_grouped"], 1) if single else "",
                ]
            )
    return [heads, *rows]


@table
def native_kernel_training() -> Cells:
    """Forward and backward of the native kernels beside PyTorch's attention, on two threads."""
    heads = ["forward and backward, processor", "PyTorch's, ours dense, grouped: ms"]
    heads += ["grouped to PyTorch's", "ours dense to PyTorch's"]
    rows = []
    for name in native_files():
        where = native_place(name)
        for row in native_rows(name, 2, True):
            times = row["fastest_ms"]
            rows.append(
                [
                    f"{case_in_words(row['case'])}, {where}",
                    ", ".join(number(times[kind], 1) for kind in ("sdpa", "dense", "grouped")),
                    bold(number(row["sdpa_to_grouped"], 1)),
                    number(row["sdpa_to_dense"], 1),
                ]
            )
    return [heads, *rows]


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
    for path in sorted(RESULTS.glob("native_bfloat16_*.json")):
        (where,) = generations(path.stem)
        trained = {row["case"]: row for row in native_rows(path.stem, 2, True)}
        for row in native_rows(path.stem, 2, False):
            cells = [f"{case_in_words(row['case'])}, {where}", *_times_and_ratios(row)]
            both = trained.get(row["case"])
            cells += _times_and_ratios(both) if both else ["", ""]
            rows.append(cells)
    return [heads, *rows]


def _times_and_ratios(row: dict[str, Any]) -> list[str]:
    times = ", ".join(number(row["fastest_ms"][kind], 1) for kind in ("sdpa", "dense", "grouped"))
    return [times, f"{bold(number(row['sdpa_to_grouped'], 1))}; {number(row['sdpa_to_dense'], 1)}"]


@table
def native_kernel_busy() -> Cells:
    """Medians alone and beside one busy process: what each loses."""
    rows = []
    for path in sorted(RESULTS.glob("native_busy_*.json")):
        (where,) = generations(path.stem)
        found = read(path.stem)["rows"]
        beside = {row["case"]: row["median_ms"] for row in found if row["busy"]}
        for row in found:
            if row["busy"]:
                continue
            cells = [f"{case_in_words(row['case'])}, {where}"]
            for kind in ("sdpa", "dense", "grouped"):
                alone = number(row["median_ms"][kind], 1)
                cells.append(f"{alone} to {number(beside[row['case']][kind], 1)}")
            rows.append(cells)
    return [
        ["median ms, idle to one busy process", "PyTorch's", "ours dense", "grouped"],
        *rows,
    ]


# of the path in Python, before the native kernels
EAGER_FILES = ("attention_cpu", "attention_zen4")


@table
def attention() -> Cells:
    """The eager attention beside PyTorch's on both processors, forward and with backward."""
    heads = ["attention"]
    found: dict[str, list[str]] = {}
    for name, runs in (("attention_cpu", "one run"), ("attention_zen4", "three runs")):
        (where,) = generations(name)
        heads += [f"{where}: SDPA, DG ms", f"{where}: speedup ({runs})", "with backward"]
        for row in read(name)["rows"]:
            cells = found.setdefault(row["case"].removesuffix(" float32"), [])
            cells.append(", ".join(number(row[key], 2) for key in ("sdpa_ms", "dgt_ms")))
            cells += [bold(span(runs_of(row, key), 1)) for key in ("ratio", "ratio_backward")]
    return [heads, *([case, *cells] for case, cells in found.items())]


@table
def attention_memory() -> Cells:
    """What a forward pass adds at its peak, beside a mask of all pairs."""
    names = ("attention_cpu", "attention_zen4")
    one, other = (read(name)["rows"] for name in names)
    where = [f"{place}, MiB" for name in names for place in generations(name)]
    rows = []
    for row, also in zip(one, other, strict=True):
        sizes = (row["peak_mib"], also["peak_mib"], row["bool_mask_mib"])
        rows.append([row["case"].removesuffix(" float32"), *(number(mib, 1) for mib in sizes)])
    return [["attention", *where, "bool mask of L x L for one head, MiB"], *rows]


@table
def three_numbers() -> Cells:
    """What the README shows: speed of the attention, what choosing keys is worth, an accelerated model."""
    return [
        ["", "DG-Attention", "baseline", "measured on"],
        _fast_row(),
        _retrieval_row(),
        _accelerated_row(),
    ]


def _fast_row() -> list[str]:
    ratios = [bold(span(_native_speedups(backward), 0)) for backward in (False, True)]
    where = " and ".join(sorted({one for name in native_files() for one in generations(name)}))
    limited = sum(native_place(name) != where for name in native_files())
    runs = len(native_files())
    return [
        "attention, 128 x 128 random tokens, k 98: speedup, forward; forward and backward",
        "; ".join(ratios),
        "PyTorch, all keys: 1",
        f"{where}, two cores, {runs} run{'s' if runs > 1 else ''}"
        + f", {limited} limited to AVX2" * bool(limited),
    ]


def _native_speedups(backward: bool) -> list[float]:
    """Groups beside PyTorch's attention at 16,384 tokens, on two threads, on every processor."""
    rows = [row for name in native_files() for row in native_rows(name, 2, backward)]
    return [row["sdpa_to_grouped"] for row in rows if "x16384x32:98" in row["case"]]


def _retrieval_row() -> list[str]:
    right: dict[str, list[float]] = {}
    for run in read("retrieval")["runs"]:
        right.setdefault(run["row"], []).append(run["accuracy"])
    means = {name: f"{statistics.fmean(values):.1f}" for name, values in right.items()}
    chance = number(100 / read("retrieval")["settings"]["values"], 1)
    (where,) = generations("retrieval")
    return [
        "synthetic retrieval from the other half of the map, 16 of 256 keys, trained for 600 steps: accuracy, %",
        bold(means["DG, G 48, k 16"]),
        f"all keys {means['global']}, windows {means['windows 4 x 4']}, chance {chance}",
        f"{where}, {len(right['global'])} seeds",
    ]


def _accelerated_row() -> list[str]:
    rows = read("accelerate_dinov2")["rows"]
    (row,) = (row for row in rows if (row["size"], row["asked_error"]) == (1036, 0.05))
    speeds = (number(row[key], 1) for key in ("attention_speedup", "model_speedup"))
    (where,) = generations("accelerate_dinov2")
    return [
        f"DINOv2-S with trained weights, {row['size']} px ({row['tokens']:,} tokens), `dgt.accelerate` with error "
        f"{number(row['asked_error'], 0, 100)} %: speedup of attention, of the model; "
        "error on other COCO photographs, %",
        f"{', '.join(map(bold, speeds))}; {number(row['unseen_error'], 1, 100)}",
        "PyTorch, all keys: 1, 1; 0",
        f"{where}, two cores, one run, {row['unseen']} images",
    ]


def _runtimes(batch: int, name: str = "runtimes") -> Cells:
    """Every model in every runtime: milliseconds per image, and the time relative to Swin-T's there.

    The best runtime of each comes first.
    """
    found = read(f"{name}_batch{batch}")["rows"]
    models: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in found:
        models[row["model"]][row["runtime"]] = row
    taken = {row["runtime"] for row in found}
    runtimes = [name for name in RUNTIMES if name in taken]
    swin = _fastest(models["swin_tiny_patch4_window7_224"])["ms_per_image"]
    rows = []
    for model, by_runtime in models.items():
        best = _fastest(by_runtime)
        ratio = bold(number(best["ms_per_image"] / swin, 2))
        cells = [_ms_and_ratio(by_runtime.get(name)) for name in runtimes]
        rows.append([NAMES.get(model, model), f"{best['runtime']}, {ratio}", *cells])
    heads = [
        f"224 px, batch {batch}; ms per image (times Swin-T's)",
        "best, relative to Swin-T's best",
    ]
    return [[*heads, *runtimes], *rows]


def _fastest(by_runtime: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The row of a model's fastest runtime."""
    return min(by_runtime.values(), key=lambda row: row["ms_per_image"])


def _ms_and_ratio(row: dict[str, Any] | None) -> str:
    """Milliseconds per image, and the time relative to Swin-T's; a dash for no row."""
    if row is None:
        return "-"
    return f"{row['ms_per_image']:.0f} ({bold(number(row['relative_time'], 2))})"


@table
def eager_by_threads() -> Cells:
    """DGT-T beside Swin-T in PyTorch as it comes, by threads and images."""
    models, rows = ["swin_tiny_patch4_window7_224", "dgt_tiny", "dgt_tiny+inference"], []
    for run in read("eager_threads"):
        times = {row["model"]: row["ms_per_image"] for row in run["rows"]}
        cells = [
            f"{times[model]:.0f} ({bold(number(times[model] / times[models[0]], 2))})"
            for model in models
        ]
        threads = run["machine"]["threads"]
        rows.append([f"{threads} thread{'s' if threads > 1 else ''}, batch {run['batch']}", *cells])
    return [
        ["224 px; ms per image (times Swin-T's)", *(NAMES.get(model, model) for model in models)],
        *rows,
    ]


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
def beside_global_attention() -> Cells:
    """DGT-T in parts of the time of itself with global attention in all stages, and what the
    products let expect.
    """
    rows = []
    for row in read("runtimes_zen4_global")["rows"]:
        if "time_of_global" not in row:  # the model with global attention
            continue
        cells = [str(row["image_size"]), row["runtime"], bold(number(row["time_of_global"], 2))]
        cells.append(number(row["work_of_global"], 2))
        cells.append(", ".join(number(share, 3) for share in row["eq7_by_stage"]))
        rows.append(cells)
    heads = ["pixels", "runtime", "share of the time", "share of all multiply-adds"]
    return [[*heads, "Eq. 7: of the attention's, by stage"], *rows]


@table
def training_steps() -> Cells:
    """Steps of training: time and peak of memory."""
    measured = read("models_zen4_training")["rows"]
    swin = measured[0]
    rows = []
    for row in measured:
        cells = [row["model"], number(row["ms_per_image"], 1), number(row["images_per_second"], 1)]
        cells.append(bold(number(row["relative_time"], 2)))
        cells.append(number(row["peak_mib"], 0))
        cells.append(bold(number(row["peak_mib"] / swin["peak_mib"], 2)))
        rows.append(cells)
    return [
        [
            "training step, 224 px, batch 8",
            "ms per image",
            "images/s",
            "relative",
            "peak MiB",
            "relative",
        ],
        *rows,
    ]


@table
def what_has_run_where() -> Cells:
    """Which raw result was measured on which processor."""
    found: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        where = generations(path.stem)
        name = where[0] if len(where) == 1 else f"several: {', '.join(where)}"
        found.setdefault(name if where else NOWHERE, []).append(f"`{path.stem}`")
    order = sorted(found, key=lambda where: (where == NOWHERE, UNKNOWN in where, where))
    return [["processor", "raw results"], *([where, ", ".join(found[where])] for where in order)]
