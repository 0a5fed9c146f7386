r"""Trained on small crops, tested on whole images: groups compared with all keys in segmentation.

    python -m studies.content_selection_camvid --data CAMVID --out runs/content_selection_camvid

The models of `studies.content_selection` as backbones of a UperNet, trained with the recipe
`camvid_cpu`: crops of 128 pixels, 1,024 tokens in stage one. Stages one and two use one of several
kinds of attention; everything else is the same. Groups and random keys have 64 keys. A Swin reduced
to the same size is a peer from outside: it trains for as many epochs, which take as long. Tests are
on whole validation images, scaled to 320 x 240 (4,800 tokens) and at their own 480 x 360 (10,800
tokens): does a fixed number of keys hold up where tokens grow? Models with groups are also tested
with the residual key and with all keys; one kind is trained with the residual key.

Runs with the same seed are paired. The confusion matrix of every image is kept.

    OUT/settings.json                           what must stay the same when the study is resumed
    OUT/runs/KIND/seed-N/                       a run, as `dgt train` writes it
    OUT/confusions/KIND/seed-N/WIDTH-TEST.npz   `confusions` (images, classes, classes), rows: true
    OUT/summary.json, summary.md

The command can be stopped at any time; the same command resumes where it stopped. If it is started
once per core, the processes share the work:

    for core in 0 1; do
        OMP_NUM_THREADS=1 taskset -c $core \
            python -m studies.content_selection_camvid --data CAMVID --out OUT &
    done; wait
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dgt.tasks.base import LoadedRun
from dgt.tasks.segment import SegmentationMetrics, segmentation_scores
from dgt.training import evaluate, fit, load_recipe, load_run
from dgt.utils.atomic_write import atomic_write, replacing, write_json
from dgt.utils.errors import UserError
from dgt.utils.records import command_line, interval, markdown_table, processor
from studies.content_selection_models import WITH_RESIDUAL_KEY, compared_layers
from studies.content_selection_summary import AS_TRAINED, slug
from studies.paired_study import (
    alone,
    check_settings,
    check_splits,
    parse_with_keys,
    study_parser,
)
from studies.replacement_pairs import pair, scores

PEER = "Swin of its size"
KINDS = ("groups", "all keys", WITH_RESIDUAL_KEY, "random keys", PEER)
BESIDE = "all keys"
TOP_K = 64
SCALES = {320: 240, 480: 360}  # width and height of the tested images
SWIN = {"embed_dim": 32, "depths": [1, 2, 5, 1], "num_heads": [1, 2, 4, 8], "window_size": 4}
TESTS: dict[str, dict[str, Any]] = {  # of models with groups: what their layers are set to
    "residual-key": {"residual_keys": 1},
    "all-keys": {"top_k": 1_000_000},
}


class Study(NamedTuple):
    """The options given on the command line."""

    data: Path
    out: Path
    seeds: int
    epochs: int
    kinds: tuple[str, ...]
    keys: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """The settings that must be the same in all processes that work in one folder."""
        return {
            "study": "content_selection_camvid",
            "epochs": self.epochs,
            "keys": list(self.keys),
        }


class Place(NamedTuple):
    """One test of the models of one kind: at an image width, with a name."""

    kind: str
    width: int
    test: str


class KeepConfusions(SegmentationMetrics):
    """Collects the confusion matrix of every image."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.by_image: list[Tensor] = []

    def update(self, network: nn.Module, images: list[Tensor], targets: list[Tensor]) -> None:
        """Add images (3, H, W) with their labels (H, W), one at a time."""
        for image, target in zip(images, targets, strict=True):
            self.confusion.reset()
            super().update(network, [image], [target])
            self.by_image.append(self.confusion.compute().cpu())

    def compute(self) -> dict[str, float]:
        """mIoU over all images."""
        return {"miou": float(segmentation_scores(torch.stack(self.by_image).sum(0))["miou"])}


def tests_of(kind: str) -> Iterator[Place]:
    """All tests of a trained model of this kind."""
    for width in SCALES:
        for test in (AS_TRAINED, *(TESTS if kind == "groups" else ())):
            yield Place(kind, width, test)


def file_of(study: Study, place: Place, seed: int) -> Path:
    """The file with the confusion matrices of one test."""
    folder = study.out / "confusions" / slug(place.kind) / f"seed-{seed}"
    return folder / f"{place.width}-{place.test}.npz"


def train(study: Study, kind: str, seed: int) -> Path:
    """Train one kind with one seed, unless that is done; returns the run's folder."""
    folder = study.out / "runs" / slug(kind) / f"seed-{seed}"
    name = "swin_tiny_patch4_window7_224" if kind == PEER else "content_selection_nano"
    keys = {
        "seed": seed,
        "out": folder,
        "model.name": name,
        "model.args": json.dumps(SWIN if kind == PEER else {"kind": kind, "top_k": TOP_K}),
        "data.root": study.data,
        "schedule.epochs": study.epochs,
        "schedule.warmup_epochs": min(1, study.epochs // 2),
        "trainer.accelerator": "cpu",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    fit(load_recipe("camvid_cpu", [*words, *study.keys]), resume=True)
    return folder


@contextmanager
def changed(network: nn.Module, place: Place) -> Iterator[None]:
    """Context in which the compared stages attend as the test specifies."""
    values = TESTS.get(place.test, {})
    layers = compared_layers(network.backbone.model) if values else []  # type: ignore[union-attr, arg-type]
    before = [(layer, name, getattr(layer, name)) for layer in layers for name in values]
    for layer, name, _ in before:
        setattr(layer, name, values[name])
    try:
        yield
    finally:
        for layer, name, value in before:
            setattr(layer, name, value)


def measure(study: Study, place: Place, seed: int, run: LoadedRun) -> None:
    """Test a trained model once and save the confusion matrices, unless they exist."""
    path = file_of(study, place, seed)
    if path.is_file():
        return
    keys = {
        "data.root": study.data,
        "data.scale": json.dumps([place.width, SCALES[place.width]]),
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    kept: list[KeepConfusions] = []

    def metrics(data: Any) -> KeepConfusions:
        kept.append(KeepConfusions(data))
        return kept[0]

    with changed(run.network, place):
        evaluate(run, words, metrics=metrics)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, confusions=torch.stack(kept[0].by_image).numpy())


def work(study: Study) -> None:
    """Train and test all kinds and seeds that no other process is working on, seed by seed."""
    write_json(study.out / "settings.json", study.settings())
    for seed, kind in itertools.product(range(study.seeds), study.kinds):
        if not all(file_of(study, place, seed).is_file() for place in tests_of(kind)):
            work_on(study, kind, seed)
            summarize(study)


def work_on(study: Study, kind: str, seed: int) -> None:
    """Train and test one kind with one seed, unless another process is working on it."""
    folder = study.out / "confusions" / slug(kind) / f"seed-{seed}"
    with alone(folder, f"{kind}, seed {seed}") as is_free:
        if not is_free:
            return
        run = load_run(train(study, kind, seed))
        for place in tests_of(kind):
            measure(study, place, seed, run)


def summarize(study: Study) -> None:
    """Write the summary of the tests done so far: JSON and Markdown."""
    rows = [row for kind in KINDS for place in tests_of(kind) if (row := row_of(study, place))]
    content = {
        "command": command_line(),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": study.settings(),
        "rows": rows,
    }
    write_json(study.out / "summary.json", content)
    atomic_write(study.out / "summary.md", written(rows))


def row_of(study: Study, place: Place) -> dict[str, Any] | None:
    """mIoU of a test by seed, compared with all keys at the same size; None before the first seed."""
    found = by_seed_left_out(study, place)
    if not found:
        return None
    dense = by_seed_left_out(study, Place(BESIDE, place.width, AS_TRAINED))
    pairs = {seed: pair(found[seed], dense[seed]) for seed in found if seed in dense}
    miou = [float(values[0]) for values in found.values()]
    return {
        **place._asdict(),
        "seeds": list(found),
        "miou": miou,
        "half_over_seeds": interval(miou)[1],
        "beside all keys": {
            "seeds": list(pairs),
            "ahead": [one["ahead"] for one in pairs.values()],
            "half_over_images": [one["half"] for one in pairs.values()],
        },
    }


def by_seed_left_out(study: Study, place: Place) -> dict[int, Tensor]:
    """The seeds that were tested: (images + 1,), mIoU of all images, and with each of them left out."""
    found = {}
    for seed in range(study.seeds):
        path = file_of(study, place, seed)
        if path.is_file():
            with np.load(path) as content:
                found[seed] = scores(torch.from_numpy(content["confusions"]))
    return found


def written(rows: Sequence[dict[str, Any]]) -> str:
    """The summary in Markdown."""
    heads = ["attends to", "width", "test", "mIoU, % by seed", "points ahead of all keys, by seed"]
    lines = []
    for row in rows:
        miou = ", ".join(f"{100 * value:.1f}" for value in row["miou"])
        lines.append([row["kind"], str(row["width"]), row["test"], miou, by_seed(row)])
    told = "± half of the 95 % interval over images (a jackknife).\n\n"
    return told + markdown_table(heads, lines)


def by_seed(row: dict[str, Any]) -> str:
    """How many points of mIoU a row is ahead of all keys, seed by seed, with intervals over images."""
    beside = row["beside all keys"]
    pairs = zip(beside["ahead"], beside["half_over_images"], strict=True)
    return ", ".join(f"{100 * ahead:+.1f} ± {100 * half:.1f}" for ahead, half in pairs)


def parse(arguments: Sequence[str] | None = None) -> Study:
    """Parse the command line; further `--data.KEY VALUE` options change the recipe's data."""
    folder = "folder with images/ and labels/, each with train/ and val/"
    parser = study_parser("content_selection_camvid", __doc__, folder, epochs=30, seeds=3)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is trained (default: all)"
    )
    options, keys = parse_with_keys(parser, arguments)
    kinds = tuple(options.kinds)
    return Study(options.data, options.out, options.seeds, options.epochs, kinds, keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left of the study, and summarize it."""
    study = parse(arguments)
    try:
        splits = [f"{part}/{split}" for part in ("images", "labels") for split in ("train", "val")]
        check_splits(study.data, splits, "a folder of images with label maps")
        check_settings(study.out, study.settings())
        work(study)
        summarize(study)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
