r"""Are groups that train with residual keys as accurate as attention to all keys? Paired runs.

    python -m studies.residual_training imagenette --data IMAGENETTE --out runs/residual_training
    python -m studies.residual_training camvid --data CAMVID --out runs/residual_training

The first two stages of DGT-Nano attend by one of several kinds; all else is the same in all runs:

| kind                      | what a query in stages one and two attends to                       |
| ------------------------- | ------------------------------------------------------------------- |
| `all keys`                | all tokens                                                          |
| `groups`                  | the keys that its group selected (DG-Attention)                     |
| `groups, 1 residual key`  | these, and one key that sums up all that its group did not select   |
| `groups, 16 residual keys`| these, and 16 keys, each of which sums up a part of the other tokens |
| `random keys`             | as many tokens as a group selects, drawn once (not by default)       |

On Imagenette (recipe `imagenette_nano`, 30 epochs at 96 pixels, 16 groups of 32 keys) a model is
tested at 64 to 256 pixels; on CamVid (recipe `camvid_cpu`, 30 epochs on crops of 128 pixels, 64
keys) on whole images, 320 and 480 pixels wide. Runs of one seed see the same images in the same
order: they are compared image by image.

A finished run leaves one record, `RECORDS/DATA-KIND-seed-N.json`: commit, processor, precision, and
for every test what was wrong in which image. A run whose record exists is not made again, so
records from several machines can be collected in one folder. Everything else is in OUT, where the
same command resumes a run that was interrupted. Started once a core, the processes share the work:

    for core in 0 1; do
        OMP_NUM_THREADS=1 taskset -c $core \
            python -m studies.residual_training imagenette --data IMAGENETTE --out OUT &
    done; wait

`python -m studies.residual_summary` compares the kinds from the records.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dgt.runs import load_recipe, load_run
from dgt.runs.folder import RESULTS
from dgt.tasks.base import LoadedRun, Metrics
from dgt.tasks.segment import SegmentationMetrics, segmentation_scores
from dgt.training import evaluate, fit
from dgt.utils.atomic_write import exclusive_lock
from dgt.utils.errors import UserError
from dgt.utils.json_files import read_json
from dgt.utils.records import command_line, processor, write_record

RESIDUAL_KEYS = {  # kind -> number of residual keys of each group
    "groups": 0,
    "groups, 1 residual key": 1,
    "groups, 16 residual keys": 16,
}
ALL_KEYS = "all keys"
RANDOM_KEYS = "random keys"
KINDS = (ALL_KEYS, *RESIDUAL_KEYS, RANDOM_KEYS)
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results" / "residual_training"
LARGE_BATCH = 16  # images per batch from 192 pixels on


class DataSet(NamedTuple):
    """What differs between the data sets.

    Attributes:
        recipe: of the trainings.
        splits: folders that the data must hold.
        keys: of the recipe, what this study changes.
        top_k: keys that a group selects.
        tests: size in pixels -> keys of the recipe for a test at this size.
        kept: makes the object that collects what a test finds.
        found: that object -> the part of a record that says it.
    """

    recipe: str
    splits: tuple[str, ...]
    keys: dict[str, Any]
    top_k: int
    tests: dict[int, dict[str, Any]]
    kept: Callable[[Any], Any]
    found: Callable[[Any], dict[str, Any]]


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


def wrong_images(kept: KeepLogits) -> dict[str, Any]:
    """How many images were tested, and the indices of those that were classified wrongly, as text."""
    labels = torch.cat(kept.labels)
    wrong = torch.cat(kept.logits).argmax(dim=1) != labels
    return {"images": len(labels), "wrong": numbers(wrong.nonzero())}


def confusions(kept: KeepConfusions) -> dict[str, Any]:
    """The confusion matrix of every image as text, row by row; a row is a true class."""
    return {"confusions": [numbers(matrix) for matrix in kept.by_image]}


def numbers(values: Tensor) -> str:
    """Integers as text, which takes one line of a record."""
    return " ".join(str(value) for value in values.flatten().tolist())


DATA_SETS = {
    "imagenette": DataSet(
        recipe="imagenette_nano",
        splits=("train", "val"),
        keys={"data.image_size": 96, "schedule.warmup_epochs": 3},
        top_k=32,
        tests={
            size: {"data.image_size": size}
            | ({"data.batch_size": LARGE_BATCH} if size >= 192 else {})
            for size in (64, 96, 128, 192, 256)
        },
        kept=KeepLogits,
        found=wrong_images,
    ),
    "camvid": DataSet(
        recipe="camvid_cpu",
        splits=("images/train", "images/val", "labels/train", "labels/val"),
        keys={"schedule.warmup_epochs": 1},
        top_k=64,
        tests={
            width: {"data.scale": json.dumps([width, height])}
            for width, height in ((320, 240), (480, 360))
        },
        kept=KeepConfusions,
        found=confusions,
    ),
}


class Run(NamedTuple):
    """One training and its tests.

    Attributes:
        data_set: a name in `DATA_SETS`.
        kind: one of `KINDS`.
        seed: of everything random.
        epochs: of the training.
    """

    data_set: str
    kind: str
    seed: int
    epochs: int

    @property
    def name(self) -> str:
        """Name of the run's folder and of its record."""
        kind = self.kind.replace(",", "").replace(" ", "-")
        return f"{self.data_set}-{kind}-seed-{self.seed}"


def words(keys: dict[str, Any]) -> list[str]:
    """Keys of a recipe as words of a command line."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def model_arguments(kind: str, top_k: int) -> dict[str, Any]:
    """Arguments of `dgt_nano` that let its first two stages attend by a kind, and the others globally."""
    attention = {ALL_KEYS: "global", RANDOM_KEYS: "random"}.get(kind, "group")
    return {
        "attention": [attention, attention, "global", "global"],
        "extents": [top_k, top_k, 0, 0],  # numbers of random keys
        "top_k": top_k,
        "residual_keys": RESIDUAL_KEYS.get(kind, 0),
    }


def commit() -> str:
    """The commit of this checkout; with "-dirty" behind it if files have been changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError("records hold the commit: run this in a git checkout, with git") from error


def make(run: Run, data: Path, out: Path, records: Path, accelerator: str) -> None:
    """Train and test one model, and write the record."""
    about = DATA_SETS[run.data_set]
    keys = {
        "seed": run.seed,
        "out": out / "runs" / run.name,
        "model.name": "dgt_nano",
        "model.args": json.dumps(model_arguments(run.kind, about.top_k)),
        "data.root": data,
        "schedule.epochs": run.epochs,
        "trainer.accelerator": accelerator,
        **about.keys,
    }
    keys["schedule.warmup_epochs"] = min(keys["schedule.warmup_epochs"], run.epochs // 2)
    recipe = load_recipe(about.recipe, words(keys))
    at = commit()
    folder = fit(recipe, resume=True).folder
    loaded = load_run(folder)
    record = {
        "study": "residual_training",
        **run._asdict(),
        "commit": at,
        "command": command_line(),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        # the one used, also where the recipe says "auto"
        "precision": read_json(folder / RESULTS)["precision"],
        "tests": {str(size): test(loaded, about, size, data, accelerator) for size in about.tests},
    }
    write_record(records / f"{run.name}.json", record)


def test(run: LoadedRun, about: DataSet, size: int, data: Path, accelerator: str) -> dict[str, Any]:
    """Test a trained model at one size, in float32."""
    keys = {
        "data.root": data,
        "trainer.accelerator": accelerator,
        "trainer.precision": "32-true",
        **about.tests[size],
    }
    kept: list[Any] = []

    def metrics(loaded: Any) -> Any:
        kept.append(about.kept(loaded))
        return kept[0]

    evaluate(run, words(keys), metrics=metrics)
    return about.found(kept[0])


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Context in which no other process works in a folder; False if one does already."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(folder))
            is_free = True
        except FileExistsError:
            is_free = False
        yield is_free


def whole(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.residual_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("data_set", choices=DATA_SETS)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--records",
        type=Path,
        default=RECORDS,
        help="folder of the records (default: in the checkout)",
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != RANDOM_KEYS]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=whole, default=30)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that have no record yet, seed by seed."""
    options = parse(arguments)
    try:
        for split in DATA_SETS[options.data_set].splits:
            if not (options.data / split).is_dir():
                raise UserError(f"--data must hold the folder {split}, {options.data} does not")
        for seed, kind in itertools.product(options.seeds, options.kinds):
            run = Run(options.data_set, kind, seed, options.epochs)
            if (options.records / f"{run.name}.json").is_file():
                continue
            with alone(options.out / run.name) as is_free:
                print(run.name, "" if is_free else "is made by another process", flush=True)
                if is_free:
                    make(run, options.data, options.out, options.records, options.accelerator)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
