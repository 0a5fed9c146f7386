"""A trained model whose attention gets other keys, nothing trained: what is left of its answers, choice by choice.

Measured on the same images: the task's headline metric, and beside the model with all keys (k = L) the share of labels
that agree, the KL divergence and the relative error of the logits, with 95 % intervals over images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dgt.experiments.choices import Operands, attend_by
from dgt.experiments.report import alone, markdown_table, number, stored
from dgt.tasks.base import Task
from dgt.training.recipe import Recipe, build_data, parse_recipe
from dgt.training.run import environment
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import LOGGER, check_range
from dgt.utils.seeding import seeded

MEASURES = {  # key: heading, factor, digits
    "score": ("{metric}, %", 100, 1),
    "agreement": ("labels as with all keys, %", 100, 1),
    "divergence": ("KL divergence from all keys", 1, 4),
    "error": ("relative error of the logits, %", 100, 1),
}


class Subject(NamedTuple):
    """A trained network, its task and data, set up; inside of ``swap(answer)`` its attention is answered by that."""

    network: Callable[[Tensor], Tensor]
    task: Task
    data: Any
    swap: Callable[[Callable[[Operands], Tensor]], AbstractContextManager[None]]


@torch.no_grad()
def measure(subject: Subject) -> tuple[float, list[Tensor]]:
    """The headline metric, and the logits of every call of the network."""
    metrics, kept = subject.task.metrics(subject.data), list[Tensor]()

    def recorded(images: Tensor) -> Tensor:
        kept.append(subject.network(images))
        return kept[-1]

    for images, targets in subject.data.val_dataloader():
        metrics.update(cast(nn.Module, recorded), images, targets)
    return metrics.compute()[next(iter(subject.task.headline))], kept


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """(3, images): agreement, divergence and error of logits, calls of (B, classes, ...)."""
    calls = []
    for own, full in zip(found, wanted, strict=True):
        divergence = (full.softmax(1) * (full.log_softmax(1) - own.log_softmax(1))).sum(1)
        error = (own - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1)
        parts = ((own.argmax(1) == full.argmax(1)).float(), divergence, error)
        calls.append(torch.stack([part.reshape(len(own), -1).mean(1) for part in parts]))
    return torch.cat(calls, dim=1)


def study(
    folder: Path, settings: dict[str, Any], subject: Subject, choices: Sequence[str], counts: Sequence[int], seeds: int
) -> Path:
    """Measure what is missing of all choices, k by k, and write `NAME.json` and `NAME.md` of the folder.

    Random choices are drawn ``seeds`` times. Raises UserError for numbers below 1, and as :func:`stored`.
    """
    check_range(1, seeds=seeds, top_k=min(counts))
    name = settings["experiment"]
    with alone(folder):
        content = stored(folder / f"{name}.json", settings) or {"settings": settings, "rows": []}
        todo = [top_k for top_k in counts if top_k not in {row["top_k"] for row in content["rows"]}]
        if todo:
            tokens: dict[str, int] = {}

            def all_keys(given: Operands) -> Tensor:
                tokens[given.name] = given.query.shape[2]
                return attend_by("groups", given.query.shape[2], given)

            with subject.swap(all_keys):
                score, wanted = measure(subject)
            about = {"metric": next(iter(subject.task.headline.values())), "score": score, "tokens": tokens}
            content = {**environment(), **content, **about, "images": sum(map(len, wanted))}
        for top_k in todo:
            for choice in choices:
                scores, draws = [], []
                for seed in range(seeds if choice.startswith("random") else 1):
                    with seeded("choices", choice, top_k, seed), subject.swap(partial(attend_by, choice, top_k)):
                        score, found = measure(subject)
                    scores.append(score)
                    draws.append(compare(found, wanted))
                row: dict[str, Any] = {"choice": choice, "top_k": top_k, "score": sum(scores) / len(scores)}
                for key, values in zip(list(MEASURES)[1:], torch.stack(draws).mean(0), strict=True):
                    half = 1.96 * values.std(correction=0) / len(values) ** 0.5
                    row |= {key: float(values.mean()), f"{key}_half": float(half)}
                content["rows"].append(row)
                LOGGER.info("k %d, %s: %.1f %%", top_k, choice, 100 * row["score"])
            write_json(folder / f"{name}.json", content)
        atomic_write(folder / f"{name}.md", markdown(content))
    return folder


def open_data(recipe: Recipe, keys: Sequence[str], images: int) -> Any:
    """The data of a recipe with some keys changed, set up for validation, of at most so many images."""
    check_range(1, images=images)
    keys = ["--data.num_workers=0", "--data.batch_size=4", *keys]
    for size in ([], [f"--data.val_size={images}"]):
        data = build_data(parse_recipe(recipe.to_dict(), [*keys, *size]))
        data.setup("validate")
        if len(data.datasets["val"]) <= images:
            break
    return data


def markdown(content: dict[str, Any]) -> str:
    """A table of each of ``MEASURES``, choices by k; and the layers' tokens: where k reaches them all choices agree."""
    rows, tokens = content["rows"], ", ".join(f"{name} {count}" for name, count in content["tokens"].items())
    found, counts = {(row["choice"], row["top_k"]): row for row in rows}, sorted({row["top_k"] for row in rows})
    parts = [f"{content['images']} images. Tokens of the layers, from which k on choices do not differ: {tokens}.\n"]
    for measure, (heading, factor, digits) in MEASURES.items():
        table = []
        for choice in dict.fromkeys(row["choice"] for row in rows):
            cells = [(found[choice, k][measure], found[choice, k].get(f"{measure}_half")) for k in counts]
            halves = ["" if half is None else f" ± {number(half, digits, factor)}" for _, half in cells]
            table.append(
                [
                    choice,
                    *(number(value, digits, factor) + half for (value, _), half in zip(cells, halves, strict=True)),
                ]
            )
        heads = [heading.format(metric=content["metric"]), *(f"k {k}" for k in counts)]
        parts.append(markdown_table(heads, table))
    return "\n".join(parts)
