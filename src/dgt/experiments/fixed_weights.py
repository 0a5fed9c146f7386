"""A trained model whose attention gets other keys, nothing trained: what is left of its answers, choice by choice.

Measured on the same images: the task's headline metric, and beside the model with all keys (k = L) the share of labels
that agree, the KL divergence and the relative error of the logits, with 95 % intervals over images. Two subjects:
`key_choice`, a trained DGT, whose layers get k keys by their groups or by another choice; and `replacement`, the global
ViT of `benchmarks/accelerate_camvid.py train`, 4 blocks of 4 heads over the 2,700 tokens of CamVid's whole images. Its
groups have the centroids that `dgt.accelerate` finds: k-means over queries of training images, moved by one step to the
image at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.acceleration.sdpa import Call, watch_calls
from dgt.experiments.choices import CHOICES, Operands, attend_by
from dgt.experiments.report import interval, number, read_words, write_results
from dgt.layers import DGAttention
from dgt.models.inspect import attention_layers
from dgt.ops import find_centroids, seed_centroids
from dgt.tasks import TASKS
from dgt.tasks.base import Task
from dgt.training import load_run
from dgt.training.recipe import Recipe, build_data, load_recipe, parse_recipe
from dgt.utils.errors import LOGGER, UserError, check_range
from dgt.utils.records import markdown_table
from dgt.utils.seeding import seeded

Answer = Callable[[Operands], Tensor]
MEASURES = {  # key: heading, factor, digits
    "score": ("{metric}, %", 100, 1),
    "agreement": ("labels as with all keys, %", 100, 1),
    "divergence": ("KL divergence from all keys", 1, 4),
    "error": ("relative error of the logits, %", 100, 1),
}
FOR_DGT = [choice for choice in CHOICES if choice not in ("random, remainder", "strided", "merged (ToMe)", "blocks")]
GRID, GROUPS = (45, 60), 48
SHAPE: dict[str, Any] = {"img_size": (360, 480), "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}
SHAPE |= {"num_classes": 11, "class_token": False, "global_pool": ""}
KEYS = ("--data.scale=[480, 360]", "--data.mean=[0.45, 0.45, 0.45]", "--data.std=[0.25, 0.25, 0.25]")
CALIBRATION, SAMPLE = 8, 4096  # training images, and queries of each head among theirs, that are clustered


class Subject(NamedTuple):
    """A trained network, its task and data, set up; inside of ``swap(answer)`` its attention is answered by that."""

    network: Callable[[Tensor], Tensor]
    task: Task
    data: Any
    swap: Callable[[Answer], AbstractContextManager[None]]


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

    Random choices are drawn ``seeds`` times. UserError for numbers below 1, and as :func:`write_results`.
    """
    check_range(1, seeds=seeds, top_k=min(counts))
    tokens: dict[str, int] = {}

    def all_keys(given: Operands) -> Tensor:
        tokens[given.name] = given.query.shape[2]
        return attend_by("groups", given.query.shape[2], given)

    def find(content: dict[str, Any]) -> Iterator[None]:
        rows = content.setdefault("rows", [])
        if todo := [top_k for top_k in counts if top_k not in {row["top_k"] for row in rows}]:
            with subject.swap(all_keys):
                score, wanted = measure(subject)
            about = {"metric": next(iter(subject.task.headline.values())), "score": score, "tokens": tokens}
            content |= {**about, "images": sum(map(len, wanted))}
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
                    row[key], row[f"{key}_half"] = interval(values.tolist())
                rows.append(row)
                LOGGER.info("k %d, %s: %.1f %%", top_k, choice, 100 * row["score"])
            yield

    return write_results(folder / f"{settings['experiment']}.json", settings, find, markdown)


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
            of_k = [found[choice, k] for k in counts]
            table.append([choice, *(number(r[measure], digits, factor, r.get(f"{measure}_half")) for r in of_k)])
        heads = [heading.format(metric=content["metric"]), *(f"k {k}" for k in counts)]
        parts.append(markdown_table(heads, table))
    return "\n".join(parts)


def key_choice(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """Measure what is missing of all choices, and write `key_choice.json` and `.md` into the folder, which it returns.

    Args:
        words: `--run RUN`, a classifier or segmenter of `dgt train`; `--images N`, of its validation at most (300);
            `--top_k 1,4,16`; `--data.KEY VALUE` of its recipe.
        seeds: how often random keys are drawn.
        out: the folder; None for runs/ablate-key_choice.

    UserError, OSError for wrong words, no run or data there, a run of another kind; and as :func:`write_results`.
    """
    options, keys = read_words(words, run="", images=300, top_k=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    if not options["run"]:
        raise UserError("key_choice needs a trained model: give --run RUN")
    run = load_run(options["run"])
    attention_layers(run.network)
    task = TASKS[run.recipe.task]
    if task.outputs != ("logits",):
        raise UserError(f"--run must be a classifier or a segmenter, {run.source} is of task {task.name!r}")
    counts = options.pop("top_k")
    subject = Subject(run.network, task, open_data(run.recipe, keys, options["images"]), partial(swapped, run.network))
    settings = {"experiment": "key_choice", **options, "keys": keys, "seeds": seeds}
    return study(Path(out or "runs/ablate-key_choice"), settings, subject, FOR_DGT, counts, seeds)


@contextmanager
def swapped(network: nn.Module, answer: Answer) -> Iterator[None]:
    """Inside, what a network's DG-Attention layers attend to is ``answer``'s."""

    def forward(name: str, layer: DGAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() != 4 or mask is not None:
            raise UserError(f"layer {name!r} must get a map (B, H, W, C) without padding, got {tuple(x.shape)}")
        grid = (x.shape[1], x.shape[2])
        given = Operands(name, *layer.split_heads(x), layer.scale, grid, layer.unit_centroids())
        return layer.merge_heads(answer(given), x)

    with ExitStack() as stack:
        for name, layer in attention_layers(network).items():
            stack.enter_context(patch.object(layer, "forward", partial(forward, name, layer)))
        yield


def replacement(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """As :func:`key_choice`, but for its words: `--weights FILE` and `--data.root CAMVID` in place of `--run`;
    `--percent 2,5,10,25`, of the keys, in place of `--top_k`; `--images N` (101).
    """
    options, keys = read_words(words, weights="", images=101, percent=(2, 5, 10, 25))
    model = timm.models.VisionTransformer(**SHAPE).eval()
    parts = nn.ModuleDict({"vit": model})
    try:
        weights = torch.load(options["weights"], weights_only=True)
        model.load_state_dict({name.removeprefix("trunk."): weight for name, weight in weights.items()})
    except (OSError, RuntimeError, UnpicklingError, AttributeError, EOFError) as error:
        made = "benchmarks/accelerate_camvid.py train makes"
        raise UserError(f"--weights must be a file of the weights that {made}, got {options['weights']!r}") from error
    recipe = load_recipe("camvid_cpu", [*KEYS, *keys])
    centroids = cluster(parts, open_data(recipe, ["--data.val_split=train"], CALIBRATION))

    def network(images: Tensor) -> Tensor:
        return F.interpolate(model(images).mT.unflatten(2, GRID), size=images.shape[2:], mode="bilinear")

    @contextmanager
    def swap(answer: Answer) -> Iterator[None]:
        def attention(name: str, call: Call) -> Tensor:
            own = find_centroids(call.query, centroids[name], 1)
            return answer(Operands(name, call.query, call.key, call.value, call.scale, GRID, own))

        with watch_calls(parts, attention):
            yield

    counts = [round(GRID[0] * GRID[1] * share / 100) for share in options.pop("percent")]
    settings = {"experiment": "replacement", **options, "keys": keys, "seeds": seeds}
    subject = Subject(network, TASKS[recipe.task], open_data(recipe, [], options["images"]), swap)
    return study(Path(out or "runs/ablate-replacement"), settings, subject, list(CHOICES), counts, seeds)


@torch.no_grad()
def cluster(parts: nn.ModuleDict, data: Any) -> dict[str, Tensor]:
    """Centroids (H, G, D) of every attention, from its queries for images."""
    queries: dict[str, list[Tensor]] = {}
    with watch_calls(parts, lambda name, call: queries.setdefault(name, []).append(call.query)):
        for images, _ in data.val_dataloader():
            parts["vit"](torch.stack(images))
    found = {name: torch.cat(parts).transpose(0, 1).flatten(1, 2) for name, parts in queries.items()}
    return {name: seed_centroids(tokens[:, :: -(-tokens.shape[1] // SAMPLE)], GROUPS) for name, tokens in found.items()}
