"""Numbers of the text, each behind its name in the mark of a page."""

from __future__ import annotations

import re
import statistics
from typing import Any

import torch
from tables_shared import (
    TABLES,
    UNKNOWN,
    generations,
    number_of_text,
    numbers_in,
    read,
    span,
)

from dgt.training import load_recipe
from dgt.utils.records import interval, number

RETRIEVAL_RATE = 4e-3  # the largest learning rate of the retrieval task
IMAGES = 1_281_167  # ImageNet-1K's training images
BACKBONES = ("dgt_tiny", "dgt_small", "dgt_base")


def cell(table: str, row: str, column: str, which: str = "") -> str:
    """A cell of a table, by its row's first cell and its column's head; `which`: the first number in it, second..."""
    heads, *rows = TABLES[table]()
    found = next((cells for cells in rows if _plain(cells[0]) == row), None)
    if found is None or column not in heads:
        raise KeyError(f"{table} has no row {row!r} or no column {column!r}")
    text = _plain(found[heads.index(column)])
    return numbers_in(text)[int(which) - 1] if which else text


def value(file: str, path: str, places: str = "0", by: str = "1") -> str:
    """A number of a JSON, or several of a list, by its path."""
    found = _at(file, path)
    return ", ".join(
        number(one, int(places), float(by))
        for one in (found if isinstance(found, list) else [found])
    )


@number_of_text
def ran_on(*files: str) -> str:
    """The generation of processor that all of these raw results were measured on.

    Raises:
        ValueError: where they name several, or one does not say.
    """
    found = {one for file in files for one in generations(file)}
    if len(found) != 1 or UNKNOWN in found:
        raise ValueError(
            f"{', '.join(files)} ran on {', '.join(sorted(found)) or 'nothing recorded'}"
        )
    return found.pop()


@number_of_text
def bounds_by_products(*tokens: str) -> str:
    """How many times fewer products groups take than all keys, G 48 and k 98."""
    found = {
        int(re.split("[x:]", row["case"])[2]): row["bound"]
        for row in read("native_attention_zen4")["rows"]
        if row["case"].endswith(":98")
    }
    *first, last = (number(found[int(one)], 1) for one in tokens)
    return f"{', '.join(first)}, and {last}"


@number_of_text
def beside_swin(batch: str, runtime: str) -> str:
    """DGT-T's time in a runtime over that of Swin-T in its fastest: the range over runs."""
    found = []
    for file in (f"runtimes_zen4_batch{batch}", f"runtimes_zen4_repeat_batch{batch}"):
        rows = read(file)["rows"]
        swin = min(row["ms_per_image"] for row in rows if row["model"].startswith("swin"))
        found += [
            row["ms_per_image"] / swin
            for row in rows
            if row["model"] == "dgt_tiny" and row["runtime"] == runtime
        ]
    return span(found, 2)


@number_of_text
def eager_beside_swin(batch: str) -> str:
    """DGT-T's time over Swin-T's in eager PyTorch: the range over runs."""
    rows = [
        row
        for file in ("models_zen4", "runtimes_zen4")
        for row in read(f"{file}_batch{batch}")["rows"]
    ]
    found = [
        row["relative_time"]
        for row in rows
        if row["model"] == "dgt_tiny" and row["runtime"] == "eager"
    ]
    return span(found, 2)


@number_of_text
def training_beside_swin() -> str:
    """DGT-T's time of a training step over Swin-T's: the range over runs."""
    rows = [
        row
        for file in ("models_zen4_training", "models_zen4_training_repeat")
        for row in read(file)["rows"]
    ]
    return span([row["relative_time"] for row in rows if row["model"] == "dgt_tiny"], 2)


@number_of_text
def time_of_global(size: str) -> str:
    """DGT-T's time over that of itself with global attention, before the native kernels: the range
    over processors.
    """
    files = ("runtimes_global", "runtimes_zen4_since_global")
    rows = [row for file in files for row in read(file)["rows"]]
    return span([row["time_of_global"] for row in rows if row["model"] == f"dgt_tiny@{size}"], 2)


@number_of_text
def training_time() -> str:
    """DGT-T's time of a training step over Swin-T's: the range over processors."""
    rows = [
        row
        for file in ("models_cpu_training", "models_cpu_training_zen4")
        for row in read(file)["rows"]
    ]
    return span([row["relative_time"] for row in rows if row["model"] == "dgt_tiny"], 2)


@number_of_text
def printed_beyond(task: str, row: str, beside: str, key: str) -> str:
    """How many percent one row of the paper prints above another: `params` or `flops`."""
    found = {
        one["row"]: one[f"paper_{key}"]
        for one in read("comparators")["rows"]
        if one["task"] == task
    }
    return number(100 * (found[row] / found[beside] - 1), 0)


@number_of_text
def counted_off(task: str, *rows: str) -> str:
    """By how many percent the FLOPs of some rows differ from the paper's at most, either way."""
    found = [
        one for one in read("comparators")["rows"] if one["task"] == task and one["row"] in rows
    ]
    return number(max(100 * abs(one["flops"] / one["paper_flops"] - 1) for one in found), 0)


@number_of_text
def sum_of_rates(where: str) -> str:
    """The sum over all steps of tau = 0.1 lr: in the retrieval task, or in the paper's training of ImageNet."""
    if where == "retrieval":
        return number(sum(0.1 * rate for rate in retrieval_rates()), 2)
    recipe = load_recipe("imagenet_dgt_tiny")
    epochs, warm, steps = recipe.schedule.epochs, recipe.schedule.warmup_epochs, IMAGES // 1024
    rate, low, first = recipe.optimizer.lr, recipe.schedule.min_lr, recipe.schedule.warmup_lr
    return number(0.1 * steps * (warm * (rate + first) / 2 + (epochs - warm) * (rate + low) / 2), 1)


def retrieval_rates() -> list[float]:
    """The learning rate of every step of the retrieval task."""
    steps = read("retrieval")["settings"]["steps"]
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], RETRIEVAL_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RETRIEVAL_RATE, steps, pct_start=0.1)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@number_of_text
def score(file: str, choice: str, top_k: str) -> str:
    """Other keys at fixed weights: top-1 or mIoU, %."""
    (row,) = (
        row for row in read(file)["rows"] if row["choice"] == choice and row["top_k"] == int(top_k)
    )
    return number(row["score"], 1, 100)


@number_of_text
def right_of(file: str, choice: str, top_k: str) -> str:
    """Other keys at fixed weights: how many images are right, of how many."""
    content = read(file)
    (row,) = (
        row for row in content["rows"] if row["choice"] == choice and row["top_k"] == int(top_k)
    )
    return f"{round(row['score'] * content['images'])} of {content['images']}"


@number_of_text
def parameters_of(file: str) -> str:
    """The range of parameters of an ablation's rows, in M."""
    return span([row["parameters"] / 1e6 for row in read(file)["rows"]], 1)


@number_of_text
def best_epoch(file: str, path: str) -> str:
    """The largest value of a curve, %."""
    return number(max(_at(file, path)), 1, 100)


@number_of_text
def core_hours(model: str, hours: str) -> str:
    """How many hours of one core a training of `imagenette_cpu` took."""
    rows = [row for row in read("imagenette_cpu")["rows"] if row["model"] == model]
    (seconds,) = (row["seconds"] for row in rows if row["hours"] == int(hours))
    return number(seconds / 3600, 1)


@number_of_text
def p_value(file: str, row: str, beside: str) -> str:
    """An ablation's row beside another, in pairs of seeds: the two-sided p of Student's t."""
    differences = _pairs(file, row, beside)
    count = len(differences)
    statistic = statistics.fmean(differences) / (statistics.stdev(differences) / count**0.5)
    if count != 3:
        raise ValueError("the closed form below is of two degrees of freedom")
    return number(1 - abs(statistic) / (2 + statistic**2) ** 0.5, 3)


@number_of_text
def seconds_a_run(file: str, row: str) -> str:
    """The mean time of an ablation's runs in seconds."""
    (found,) = (one for one in read(file)["rows"] if one["name"] == row)
    return number(found["seconds"], 0)


@number_of_text
def objects(layer: str, measure: str) -> str:
    """A share, %, of COCO's queries that are no background, in one layer."""
    labels = read("like_to_like_coco")["rows"][int(layer)]["by_label"].items()
    found = [(row["share"], row[measure]) for label, row in labels if label != "background"]
    return number(
        100 * sum(share * one for share, one in found) / sum(share for share, _ in found), 1
    )


@number_of_text
def right(row: str) -> str:
    """Retrieval: right answers in %, mean and half of the 95 % interval over seeds."""
    mean, half = interval([run["accuracy"] for run in _runs(row)])
    return f"{mean:.1f} ± {half:.1f}"


@number_of_text
def last_batch(row: str, maps: str) -> str:
    """Retrieval: points won in evaluation by the means of the last batch, of so many maps."""
    won = [
        accuracy - run["accuracy"]
        for run in _runs(row)
        for found in run["last_batch"]
        if found["maps"] == int(maps)
        for accuracy in found["accuracies"]
    ]
    mean, half = interval(won)
    return f"{mean:+.1f} ± {half:.1f}"


@number_of_text
def labels(file: str, choice: str, top_k: str) -> str:
    """Other keys at fixed weights: labels as with all keys in %, and half of the 95 % interval over images."""
    (row,) = (
        row for row in read(file)["rows"] if row["choice"] == choice and row["top_k"] == int(top_k)
    )
    return f"{number(row['agreement'], 1, 100)} ± {number(row['agreement_half'], 1, 100)}"


@number_of_text
def times_lower(file: str, key: str, low: str, high: str) -> str:
    """Other keys at fixed weights: how many times lower a measure is with a choice than with another, over all k."""
    found = {(row["choice"], row["top_k"]): row[key] for row in read(file)["rows"]}
    ratios = [
        found[high, top_k] / value for (choice, top_k), value in found.items() if choice == low
    ]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


@number_of_text
def points(file: str, row: str, beside: str) -> str:
    """An ablation's row beside another, in pairs of seeds: points of top-1 more, and the 95 % interval."""
    mean, half = interval(_pairs(file, row, beside))
    return f"{mean:+.1f} ± {half:.1f}"


def _pairs(file: str, row: str, beside: str) -> list[float]:
    runs = {found["name"]: found["runs"] for found in read(file)["rows"]}
    first, second = (
        {run["seed"]: run["metrics"]["top1"] for run in runs[name]} for name in (row, beside)
    )
    return [100 * (first[seed] - second[seed]) for seed in first if seed in second]


@number_of_text
def within(file: str) -> str:
    """An ablation: points from its worst to its best row."""
    means = [row["mean"] for row in read(file)["rows"]]
    return number(max(means) - min(means), 1, 100)


@number_of_text
def curve(run: str, key: str, *epochs: str) -> str:
    """Segmentation of CamVid or scenes, in %: a measure after epochs of validation; the training loss after any."""
    found = read("segmentation_cpu")["runs"][run]
    if key == "loss":
        return ", ".join(number(found["training_loss"][int(epoch) - 1], 2) for epoch in epochs)
    return ", ".join(number(row[key], 1, 100) for row in found["validation"])


@number_of_text
def sizes_of(task: str, key: str, places: str, *models: str) -> str:
    """Parameters in M, or FLOPs in G, of DGT-T, -S and -B, or of other models of `sizes.json`."""
    rows = {row["model"]: row for row in read("sizes")["rows"] if row["task"] == task}
    return ", ".join(
        number(rows[name][key], int(places), 1e-9 if key == "flops" else 1e-6)
        for name in models or BACKBONES
    )


def _runs(row: str) -> list[dict[str, Any]]:
    return [run for run in read("retrieval")["runs"] if run["row"] == row]


def _at(file: str, path: str) -> Any:
    """What a path leads to: keys of objects, and of lists the place, or KEY=VALUE&... of one row, with / between."""
    found: Any = read(file)
    for step in path.split("/"):
        if isinstance(found, dict):
            found = found[step]
        elif step.isdigit():
            found = found[int(step)]
        else:
            wanted = dict(part.split("=", 1) for part in step.split("&"))
            rows = [
                row
                for row in found
                if all(str(row.get(key)) == text for key, text in wanted.items())
            ]
            if len(rows) != 1:
                raise KeyError(f"{file}.json has {len(rows)} rows with {step}")
            found = rows[0]
    return found


def _plain(text: str) -> str:
    return text.strip("*`")
