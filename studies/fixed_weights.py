"""A trained model attends to other keys without further training: how its answers change, by selector.

Measured on the same images: the task's headline metric and, compared with the model with all keys
    (k = L), the fraction of equal labels, the KL divergence, and the relative error of the logits,
    with 95 % intervals over images. For a classifier the correct images are recorded, one string
    per draw with "1" or "0" per image, so that selectors can be compared on paired images. The
    models are those of `studies.key_choice` and `studies.replacement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dgt.runs.recipe import Recipe, build_data, parse_recipe
from dgt.tasks.base import Task
from dgt.utils.errors import LOGGER, check_range
from dgt.utils.records import interval, markdown_table, number
from dgt.utils.seeding import seeded
from studies.key_selectors import Operands, attend_by
from studies.report import write_results

Answer = Callable[[Operands], Tensor]
"""A function that computes attention: operands -> output."""


class Measure(NamedTuple):
    """How a measure is displayed in the table."""

    heading: str
    factor: float
    digits: int


MEASURES = {
    "score": Measure("{metric}, %", 100, 1),
    "agreement": Measure("labels as with all keys, %", 100, 1),
    "divergence": Measure("KL divergence from all keys", 1, 4),
    "error": Measure("relative error of the logits, %", 100, 1),
}
COMPARED = ("agreement", "divergence", "error")  # the rows of what `compare` returns
BESIDE = "random, each query"  # the baseline for paired comparisons of correct answers


class Subject(NamedTuple):
    """A trained network with its task and data, ready to run.

    Inside the context ``swap(answer)``, `answer` computes its attention.
    """

    network: Callable[[Tensor], Tensor]
    task: Task
    data: Any
    swap: Callable[[Answer], AbstractContextManager[None]]


class Measured(NamedTuple):
    """The outputs of a network for all images.

    Attributes:
        score: the task's headline metric.
        logits: of each call, (B, classes, ...).
        right: for a classifier, "1" or "0" per image; otherwise empty.
    """

    score: float
    logits: list[Tensor]
    right: str


@torch.no_grad()
def measure(subject: Subject) -> Measured:
    """Run the network on all validation images."""
    metrics = subject.task.metrics(subject.data)
    kept: list[Tensor] = []
    right = ""

    def recorded(images: Tensor) -> Tensor:
        logits = subject.network(images)
        kept.append(logits)
        return logits

    for images, targets in subject.data.val_dataloader():
        metrics.update(cast(nn.Module, recorded), images, targets)
        if isinstance(targets, Tensor) and targets.dim() == 1:
            found = kept[-1].argmax(1) == targets
            right += "".join(str(int(one)) for one in found.tolist())
    headline = next(iter(subject.task.headline))
    return Measured(metrics.compute()[headline], kept, right)


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """(3, images): agreement, divergence, and error of logits, lists of (B, classes, ...)."""
    calls = []
    for own, full in zip(found, wanted, strict=True):
        agreement = (own.argmax(1) == full.argmax(1)).float()
        divergence = (full.softmax(1) * (full.log_softmax(1) - own.log_softmax(1))).sum(1)
        error = (own - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1)
        means = [part.reshape(len(own), -1).mean(1) for part in (agreement, divergence, error)]
        calls.append(torch.stack(means))
    return torch.cat(calls, dim=1)


def study(
    folder: Path,
    settings: dict[str, Any],
    subject: Subject,
    selectors: Sequence[str],
    counts: Sequence[int],
    seeds: int,
) -> Path:
    """Measure what is missing for all selectors, k by k; write `NAME.json` and `NAME.md`.

    Args:
        folder: the output folder, which is returned.
        settings: settings of the study; its "experiment" is NAME.
        subject: the trained model.
        selectors: names among `SELECTORS`.
        counts: values of k.
        seeds: how often random selectors are drawn.

    Raises:
        UserError: If a number is below 1; also see `write_results`.
    """
    check_range(1, seeds=seeds, top_k=min(counts))
    tokens: dict[str, int] = {}

    def all_keys(given: Operands) -> Tensor:
        tokens[given.name] = given.query.shape[2]
        return attend_by("groups", given.query.shape[2], given)

    def find(content: dict[str, Any]) -> Iterator[None]:
        rows = content.setdefault("rows", [])
        done = {row["top_k"] for row in rows}
        missing = [top_k for top_k in counts if top_k not in done]
        if not missing:
            return
        with subject.swap(all_keys):
            score, wanted, right = measure(subject)
        content["metric"] = next(iter(subject.task.headline.values()))
        content["score"] = score
        if right:
            content["right"] = [right]
        content["tokens"] = tokens
        content["images"] = sum(len(logits) for logits in wanted)
        for top_k in missing:
            for selector in selectors:
                row = _measure_selector(subject, selector, top_k, seeds, wanted)
                rows.append(row)
                LOGGER.info("k %d, %s: %.1f %%", top_k, selector, 100 * row["score"])
            yield

    return write_results(folder / f"{settings['experiment']}.json", settings, find, markdown)


def _measure_selector(
    subject: Subject, selector: str, top_k: int, seeds: int, wanted: Sequence[Tensor]
) -> dict[str, Any]:
    """One row: means over draws, with intervals over images."""
    scores = []
    draws = []
    rights = []
    for seed in range(seeds if selector.startswith("random") else 1):
        with (
            seeded("choices", selector, top_k, seed),
            subject.swap(partial(attend_by, selector, top_k)),
        ):
            score, found, right = measure(subject)
        scores.append(score)
        draws.append(compare(found, wanted))
        rights.append(right)
    row: dict[str, Any] = {"choice": selector, "top_k": top_k, "score": sum(scores) / len(scores)}
    if all(rights):
        row["right"] = rights
        row["score_half"] = interval(shares_right(rights))[1]
    for key, values in zip(COMPARED, torch.stack(draws).mean(0), strict=True):
        mean, half = interval(values.tolist())
        row[key] = mean
        row[f"{key}_half"] = half
    return row


def shares_right(draws: Sequence[str]) -> list[float]:
    """For every image, the fraction of draws in which it was correct."""
    return [sum(map(int, image)) / len(draws) for image in zip(*draws, strict=True)]


def ahead(row: dict[str, Any], beside: dict[str, Any]) -> tuple[float, float | None]:
    """How much larger the fraction of correct images is in one row than in another.

    Args:
        row: a row of a classifier, with its correct images.
        beside: another row, with the same images in the same order.

    Returns:
        The mean over images of the paired difference and half of its 95 % interval; None for one
        image.
    """
    pairs = zip(shares_right(row["right"]), shares_right(beside["right"]), strict=True)
    return interval([own - other for own, other in pairs])


def open_data(recipe: Recipe, keys: Sequence[str], images: int) -> Any:
    """The data of a recipe with some keys changed, set up for validation on at most `images` images."""
    check_range(1, images=images)
    keys = ["--data.num_workers=0", "--data.batch_size=4", *keys]
    data = _set_up(recipe, keys)
    if len(data.datasets["val"]) > images:
        data = _set_up(recipe, [*keys, f"--data.val_size={images}"])
    return data


def _set_up(recipe: Recipe, keys: Sequence[str]) -> Any:
    data = build_data(parse_recipe(recipe.to_dict(), keys))
    data.setup("validate")
    return data


def markdown(content: dict[str, Any]) -> str:
    """One table per entry of `MEASURES`, selectors by k.

    It also gives the tokens of the layers: once k reaches them, all selectors agree.
    """
    rows = content["rows"]
    by_selector_and_k = {(row["choice"], row["top_k"]): row for row in rows}
    counts = sorted({row["top_k"] for row in rows})
    tokens = ", ".join(f"{name} {count}" for name, count in content["tokens"].items())
    parts = [
        f"{content['images']} images. Tokens of the layers, from which k on choices do not differ: {tokens}.\n"
    ]
    for key, shown in MEASURES.items():
        table = _table_of(key, by_selector_and_k, counts)
        heads = [shown.heading.format(metric=content["metric"]), *(f"k {k}" for k in counts)]
        parts.append(markdown_table(heads, table))
    if all("right" in row for row in rows) and any(row["choice"] == BESIDE for row in rows):
        parts.append(_ahead_of_random(by_selector_and_k, counts))
    return "\n".join(parts)


def _table_of(
    key: str, rows: dict[tuple[str, int], dict[str, Any]], counts: Sequence[int]
) -> list[list[str]]:
    """The cells of one of `MEASURES`: one row per selector."""
    shown = MEASURES[key]
    table = []
    for selector in dict.fromkeys(selector for selector, _ in rows):
        cells = [selector]
        for top_k in counts:
            row = rows[selector, top_k]
            cells.append(number(row[key], shown.digits, shown.factor, row.get(f"{key}_half")))
        table.append(cells)
    return table


def _ahead_of_random(rows: dict[tuple[str, int], dict[str, Any]], counts: Sequence[int]) -> str:
    """The table of paired differences from random keys, points."""
    table = []
    for selector in dict.fromkeys(selector for selector, _ in rows if selector != BESIDE):
        cells = [selector]
        for top_k in counts:
            mean, half = ahead(rows[selector, top_k], rows[BESIDE, top_k])
            cells.append(f"{'+' if mean >= 0 else ''}{number(mean, 1, 100, half)}")
        table.append(cells)
    heads = [f"points of right images ahead of {BESIDE!r}, in pairs", *(f"k {k}" for k in counts)]
    return markdown_table(heads, table)
