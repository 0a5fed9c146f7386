r"""What does selecting keys by content gain on real images? Six kinds of attention in one model.

    python -m studies.content_selection --data IMAGENETTE --out runs/content_selection

DGT-Nano is trained with the recipe `imagenette_nano`, shortened to 30 epochs at 96 pixels. Stages
one and two use one of six kinds of attention. Everything else is the same in all of them: the
position encoding, the feed-forward network, and the global attention of stages three and four.

| kind           | what a query in stages one and two attends to                         |
| -------------- | --------------------------------------------------------------------- |
| `groups`       | the 32 keys that its group selected (DG-Attention, 16 groups)         |
| `all keys`     | all tokens                                                            |
| `random keys`  | 32 tokens, drawn once for each number of tokens                       |
| `windows`      | the 36 tokens of its window of 6 x 6                                  |
| `reduced keys` | 36 keys, learned means of 4 x 4 (stage two: 2 x 2) tokens, as in CMT  |
| `nothing`      | nothing: only the position encoding and feed-forward network remain   |

Runs with the same seed are paired: they see the same images in the same order. Every trained model
is tested at several image sizes, smaller and larger than in training. Models with groups are also
tested with other numbers of keys, with and without the residual key; models with all keys also
with a temperature that grows with log L. The logits of every test image are saved.

    OUT/settings.json                       what must stay the same when the study is resumed
    OUT/runs/KIND/seed-N/                   a run, as `dgt train` writes it
    OUT/logits/KIND/seed-N/SIZE-TEST.npz    `logits` (images, classes) and `labels` (images,)
    OUT/summary.json, summary.md, summary.png

The command can be stopped at any time; the same command resumes where it stopped. A
study whose folder is on another machine is continued with `--earlier SUMMARY`, its `summary.json`:
the seeds in it are not trained again, and are part of the new summary. If the command is started
once per core, the processes share the work:

    for core in 0 1; do
        OMP_NUM_THREADS=1 taskset -c $core \
            python -m studies.content_selection --data IMAGENETTE --out OUT &
    done; wait
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dgt.tasks.base import LoadedRun, Metrics
from dgt.training import evaluate, fit, load_recipe, load_run
from dgt.utils.atomic_write import replacing, write_json
from dgt.utils.errors import UserError
from studies.content_selection_models import KINDS, compared_layers
from studies.content_selection_summary import (
    AS_TRAINED,
    STORED_SIZE,
    Results,
    read_earlier,
    slug,
    summarize,
)
from studies.paired_study import (
    StudyError,
    alone,
    check_settings,
    check_splits,
    parse_with_keys,
    study_parser,
    whole,
)

WARMUP_EPOCHS = 3
OTHER_KEYS = (4, 16, 64, 256)  # numbers of keys that models with groups are also tested with
WITH_REMAINDER = (4, 32)
LARGE_BATCH = 16  # images per batch from 192 pixels on


class KeepLogits(Metrics):
    """Collects the logits and labels of every test image."""

    def __init__(self, data: Any = None) -> None:
        self.logits: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, network: nn.Module, images: Tensor, targets: Tensor) -> None:
        """Add images (B, 3, H, W) with labels (B,)."""
        self.logits.append(network(images).float().cpu())
        self.labels.append(targets.cpu())

    def compute(self) -> dict[str, float]:
        """Fraction of images whose true class has the largest logit."""
        found = torch.cat(self.logits).argmax(dim=1) == torch.cat(self.labels)
        return {"top1": found.double().mean().item()}


class Test(NamedTuple):
    """One way to test a trained model at one image size.

    Attributes:
        size: side length of the images in pixels.
        name: part of the file's name.
        top_k: number of keys per group; None for that of the training.
        residual_keys: of each group.
        temperature: whether scores are multiplied by log L / log of the L in training.
    """

    size: int
    name: str = AS_TRAINED
    top_k: int | None = None
    residual_keys: int = 0
    temperature: bool = False

    @property
    def file(self) -> str:
        """Name of the file with the logits."""
        return f"{self.size}-{self.name}.npz"


def tests_of(kind: str, sizes: Sequence[int]) -> Iterator[Test]:
    """All tests of a trained model of this kind."""
    for size in sizes:
        yield Test(size)
        if kind == "all keys":
            yield Test(size, "temperature", temperature=True)
        if kind == "groups":
            for top_k in OTHER_KEYS:
                yield Test(size, f"k-{top_k}", top_k=top_k)
            for top_k in WITH_REMAINDER:
                yield Test(size, f"k-{top_k}-remainder", top_k=top_k, residual_keys=1)
            yield Test(size, "k-all", top_k=(size // 4) ** 2)


class Study(NamedTuple):
    """The options given on the command line."""

    data: Path
    out: Path
    seeds: int
    epochs: int
    train_size: int
    sizes: tuple[int, ...]
    keys: tuple[str, ...]
    earlier: Path | None

    def settings(self) -> dict[str, Any]:
        """The settings that must be the same in all processes that work in one folder."""
        return {
            "study": "content_selection",
            "epochs": self.epochs,
            "train_size": self.train_size,
            "keys": list(self.keys),
        }


def check(study: Study) -> None:
    """Raise StudyError for data or a folder that this study cannot work with."""
    expected = "a folder of images with train/CLASS/ and val/CLASS/"
    check_splits(study.data, ("train", "val"), expected)
    check_settings(study.out, study.settings())


def earlier_results(study: Study) -> Results:
    """What `--earlier` holds; nothing without it.

    Raises:
        StudyError: If it is no summary of this study, or one with other settings.
    """
    if study.earlier is None:
        return {}
    expected = "--earlier must be the summary.json of this study"
    try:
        found = json.loads(study.earlier.read_text(encoding="utf-8"))["settings"]
        results = read_earlier(study.earlier)
    except OSError as error:
        raise StudyError(f"{expected}; {study.earlier}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{expected}; {study.earlier} is something else") from error
    if found != study.settings():
        raise StudyError(f"{expected}; {study.earlier} has {found}, not {study.settings()}")
    return results


def logits_file(study: Study, kind: str, seed: int, test: Test) -> Path:
    """The file with the logits of one test."""
    return study.out / "logits" / slug(kind) / f"seed-{seed}" / test.file


def train(study: Study, kind: str, seed: int) -> Path:
    """Train one kind with one seed, unless that is done; returns the run's folder."""
    folder = study.out / "runs" / slug(kind) / f"seed-{seed}"
    keys = {
        "seed": seed,
        "out": folder,
        "model.name": "content_selection_nano",
        "model.args": json.dumps({"kind": kind}),
        "data.root": study.data,
        "data.image_size": study.train_size,
        "schedule.epochs": study.epochs,
        "schedule.warmup_epochs": min(WARMUP_EPOCHS, study.epochs // 10),
        "trainer.accelerator": "cpu",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    fit(load_recipe("imagenette_nano", [*words, *study.keys]), resume=True)
    return folder


@contextmanager
def changed(network: nn.Module, test: Test, train_size: int) -> Iterator[None]:
    """Context in which the compared stages attend as the test specifies."""
    changes = changes_of(network, test, train_size)
    before = [(layer, name, getattr(layer, name)) for layer, name, _ in changes]
    for layer, name, value in changes:
        setattr(layer, name, value)
    try:
        yield
    finally:
        for layer, name, value in before:
            setattr(layer, name, value)


def changes_of(network: nn.Module, test: Test, train_size: int) -> list[tuple[Any, str, Any]]:
    """What a test sets: layer, name of its attribute, value."""
    changes: list[tuple[Any, str, Any]] = []
    for stage, layer in enumerate(compared_layers(network)):
        if test.top_k is not None:
            changes.append((layer, "top_k", test.top_k))
            changes.append((layer, "residual_keys", test.residual_keys))
        if test.temperature:
            stride = 4 * 2**stage
            tokens, trained = (math.ceil(size / stride) ** 2 for size in (test.size, train_size))
            changes.append((layer, "scale", layer.scale * math.log(tokens) / math.log(trained)))
    return changes


def measure(study: Study, kind: str, seed: int, run: LoadedRun, test: Test) -> None:
    """Test a trained model once and save the logits, unless they exist."""
    path = logits_file(study, kind, seed, test)
    if path.is_file():
        return
    keys = {
        "data.root": study.data,
        "data.image_size": test.size,
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
    }
    if test.size > STORED_SIZE:
        keys["data.batch_size"] = LARGE_BATCH
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    kept = KeepLogits()
    with changed(run.network, test, study.train_size):
        evaluate(run, words, metrics=lambda data: kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, logits=torch.cat(kept.logits).numpy(), labels=torch.cat(kept.labels).numpy())


def work(study: Study, earlier: Results) -> None:
    """Train and test all kinds and seeds that no other process is working on, seed by seed."""
    write_json(study.out / "settings.json", study.settings())
    for seed, kind in itertools.product(range(study.seeds), KINDS):
        if not all(
            is_done(study, kind, seed, test, earlier) for test in tests_of(kind, study.sizes)
        ):
            work_on(study, kind, seed)
            summarize(study.out, study.settings(), earlier)


def is_done(study: Study, kind: str, seed: int, test: Test, earlier: Results) -> bool:
    """Whether the logits of a test are there, or its result is among the earlier ones."""
    if seed in earlier.get((kind, test.size, test.name), {}):
        return True
    return logits_file(study, kind, seed, test).is_file()


def work_on(study: Study, kind: str, seed: int) -> None:
    """Train and test one kind with one seed, unless another process is working on it."""
    with alone(
        study.out / "logits" / slug(kind) / f"seed-{seed}", f"{kind}, seed {seed}"
    ) as is_free:
        if not is_free:
            return
        run = load_run(train(study, kind, seed))
        for test in tests_of(kind, study.sizes):
            measure(study, kind, seed, run, test)


def parse(arguments: Sequence[str] | None = None) -> Study:
    """Parse the command line; further `--data.KEY VALUE` options change the recipe's data."""
    folder = "folder with train/CLASS/ and val/CLASS/"
    parser = study_parser("content_selection", __doc__, folder, epochs=30, seeds=5)
    parser.add_argument(
        "--train-size", type=whole, default=96, help="pixels (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes", type=whole, nargs="+", default=[64, 96, 128, 192, 256], help="pixels to test at"
    )
    parser.add_argument(
        "--earlier", type=Path, help="summary.json of seeds that were run in another folder"
    )
    options, keys = parse_with_keys(parser, arguments)
    sizes = tuple(sorted({*options.sizes, options.train_size}))
    return Study(
        options.data,
        options.out,
        options.seeds,
        options.epochs,
        options.train_size,
        sizes,
        keys,
        options.earlier,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left of the study, and summarize it."""
    study = parse(arguments)
    try:
        check(study)
        earlier = earlier_results(study)
        work(study, earlier)
        summarize(study.out, study.settings(), earlier)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
