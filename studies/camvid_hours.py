r"""What fewer products buy in training is time: all keys against groups, for the same CPU time on whole images.

    python -m studies.camvid_hours times --data CAMVID
    python -m studies.camvid_hours weights --data IMAGENETTE --out OUT
    python -m studies.camvid_hours train --data CAMVID --out OUT --seeds 0 1 2
    python -m studies.camvid_hours figure

DGT-Nano with UperNet learns CamVid from whole images of 480 x 360, two at a time. Its first two
stages attend to all keys, by the dense kernel of this library, or in groups with one residual key;
all else is the same. Each kind trains for as many steps as one quiet core takes in an hour (`STEPS`,
fixed beforehand by `times`): what else the machine does, and on which machine a run goes on, does
not change what is trained. Both kinds start from weights of their own kind, trained on Imagenette for
the same number of steps (`weights`).

Every sixth of the training images, 60, is held out; the curve of mIoU by minutes is measured on these.
The validation images are looked at once, after the last step. Runs of one seed see the same images in
the same order, as far as they come: all random choices are functions of (seed, step).

A run writes its record, `RECORDS/KIND-seed-N.json`, when it is finished; its state is in OUT after each of
`PARTS` parts of the training, where the same command goes on. A run that has a record is not made
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import dgt
from dgt.data.image_io import BrokenImage
from dgt.data.segmentation import LabelMaps, SegmentationData
from dgt.figures import save_figure
from dgt.figures.drawing import tidy
from dgt.runs import load_recipe
from dgt.runs.folder import RESULTS
from dgt.runs.model import initialize
from dgt.tasks.segment import SegmentationMetrics, build_segmenter, losses
from dgt.training import fit
from dgt.utils.atomic_write import replacing
from dgt.utils.errors import UserError
from dgt.utils.json_files import read_json
from dgt.utils.records import command_line, processor, write_record
from studies.residual_summary import COLORS
from studies.residual_times import recipe_of
from studies.residual_training import ALL_KEYS, commit, model_arguments, words

GROUPS = "groups, 1 residual key"
KINDS = (ALL_KEYS, GROUPS)
ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "camvid_hours"
FIGURE = ROOT / "docs" / "images" / "camvid-hours.png"
SIZE = (360, 480)
BATCH = 2
MINUTES = 60  # of a quiet core that the steps of each kind take
STEPS = {
    ALL_KEYS: 1260,
    GROUPS: 3360,
}  # 2.86 and 1.06 CPU seconds a step on a Zen 3, of which one hour
PARTS = 6  # of a training: after each the curve has a point, and the state is saved
HELD_OUT_EVERY = 6
HELD_OUT = 60
DIAGNOSED = 3  # images of a run whose groups and keys are looked at
WARMUP_STEPS = 50
RATE = 1e-3
CLASSES = 11
PRETRAINING = {  # recipe `imagenette_nano`, but for
    "data.image_size": 64,
    "schedule.epochs": 20,
}
PRETRAINING_KEYS = 32  # that a group selects at 64 pixels


class Sample(NamedTuple):
    """A whole image, uint8 (3, H, W), and its labels, (H, W)."""

    image: Tensor
    labels: Tensor


class CamVid(NamedTuple):
    """All images of the study, and the data module that normalizes them."""

    data: SegmentationData
    training: list[Sample]
    held_out: list[Sample]
    validation: list[Sample]


def read(root: Path) -> CamVid:
    """Read all images of CamVid into memory: 240 MB."""
    keys = {"data.root": root, "data.scale": json.dumps(SIZE[::-1])}
    recipe = load_recipe("camvid_cpu", words(keys))
    known = {"classes", "scale", "root"}
    data = SegmentationData(**{key: recipe.data[key] for key in known})
    parts = {}
    for part in ("train", "val"):
        _, reader = data.open_root(str(root), part)
        found = [reader[index] for index in range(len(reader))]
        broken = [image for image in found if isinstance(image, BrokenImage)]
        if broken:
            raise UserError(
                f"{len(broken)} images of {root} cannot be read, the first: {broken[0]}"
            )
        parts[part] = [Sample(*data.transform("val", sample)) for sample in found]
    for sample in itertools.chain(*parts.values()):
        if sample.labels.shape != SIZE:
            came = "x".join(map(str, sample.labels.shape[::-1]))
            size = "x".join(map(str, SIZE[::-1]))
            raise UserError(f"--data must hold images of {size}, got one of {came}")
    data.setup()
    train = parts["train"]
    held_out = train[::HELD_OUT_EVERY][:HELD_OUT]
    training = [image for index, image in enumerate(train) if index % HELD_OUT_EVERY]
    return CamVid(data, training, held_out, parts["val"])


def build(kind: str, weights: Path | None, class_names: Sequence[str], seed: int) -> Any:
    """The segmenter of a kind, with the first weights of its backbone if they are given."""
    torch.manual_seed(seed)
    recipe = recipe_of("camvid", kind)
    network = build_segmenter(recipe.model, CLASSES, SIZE[1])
    if weights is not None:
        initialize(network, weights, class_names, task="segment")
    return network


def batch_of(data: CamVid, seed: int, step: int) -> tuple[Tensor, LabelMaps]:
    """The images of a step, each half of the time mirrored, and brighter or darker by up to a fifth."""
    count = len(data.training)
    images, labels = [], []
    for place in range(BATCH * step, BATCH * (step + 1)):
        epoch, index = divmod(place, count)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1000 * epoch))
        sample = data.training[int(order[index])]
        drawn = torch.rand(2, generator=torch.Generator().manual_seed(1_000_000 * seed + place))
        is_mirrored, brightness = bool(drawn[0] < 0.5), 0.8 + 0.4 * drawn[1]
        image, label = sample
        if is_mirrored:
            image, label = image.flip(-1), label.flip(-1)
        images.append((image * brightness).clamp(0, 255).to(torch.uint8))
        labels.append(label)
    stacked = torch.stack(labels)
    targets = LabelMaps(
        labels=stacked,
        sizes=torch.tensor(SIZE).expand(BATCH, 2),
        present=torch.ones(BATCH, 256, dtype=torch.bool),
    )
    return data.data.normalize(torch.stack(images)), targets


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step: warmed up, then down to zero in a line."""
    return RATE * min((step + 1) / WARMUP_STEPS, 1 - step / steps)


class Run:
    """One training, whole steps of it at a time.

    Args:
        kind: what the first two stages attend to.
        seed: of everything random.
        weights: the run that the first weights are from, or None.
        data: all images.
    """

    def __init__(self, kind: str, seed: int, weights: Path | None, data: CamVid) -> None:
        self.kind, self.seed, self.data = kind, seed, data
        self.network = build(kind, weights, data.data.class_names, seed).train()
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.05
        )
        self.step = 0
        self.cpu_seconds = 0.0
        self.curve: list[dict[str, float]] = []

    def train(self, until: int, steps: int) -> None:
        """Take the steps up to one of a training of `steps`."""
        start = time.process_time()
        for step in range(self.step, until):
            torch.manual_seed(1_000_000 * self.seed + step)  # stochastic depth, dropout
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(step, steps)
            images, targets = batch_of(self.data, self.seed, step)
            loss = losses(self.network, images, targets)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step = until
        self.cpu_seconds += time.process_time() - start

    def test(self, images: Sequence[Sample]) -> dict[str, float]:
        """mIoU and the like of some images."""
        self.network.eval()
        metrics = SegmentationMetrics(self.data.data)
        with torch.inference_mode():
            for image, labels in images:
                metrics.update(self.network, [self.data.data.normalize(image)], [labels])
        self.network.train()
        return metrics.compute()

    def diagnose(self, images: Sequence[Sample]) -> list[dict[str, Any]]:
        """What the groups of the first two stages select in some images, as `dgt.diagnose`."""
        normalized = torch.stack([self.data.data.normalize(image) for image, _ in images])
        found = dgt.diagnose(self.network.eval(), normalized)
        self.network.train()
        return [block._asdict() for block in found]

    def save(self, path: Path) -> None:
        """Write what `load` reads, whole or not at all."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "cpu_seconds": self.cpu_seconds,
            "curve": self.curve,
        }
        with replacing(path) as partial:
            torch.save(state, partial)

    def load(self, path: Path) -> None:
        """Go on where `save` was called."""
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.cpu_seconds = state["step"], state["cpu_seconds"]
        self.curve = state["curve"]


def name_of(kind: str) -> str:
    """A kind as a part of a file's name."""
    return kind.replace(",", "").replace(" ", "-")


def measure_times(data: CamVid, rounds: int) -> dict[str, float]:
    """CPU seconds a step of every kind: medians of steps in turns, from random weights."""
    runs = {kind: Run(kind, 0, None, data) for kind in KINDS}
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(1, rounds + 2):
        for kind, run in runs.items():
            before = run.cpu_seconds
            run.train(index, 10 * rounds)
            taken[kind].append(run.cpu_seconds - before)
    return {kind: statistics.median(seconds[1:]) for kind, seconds in taken.items()}


def pretrain(root: Path, out: Path, kinds: Sequence[str]) -> None:
    """Train the classifier of some kinds on Imagenette, or go on with it."""
    for kind in kinds:
        keys = {
            "out": out / f"weights-{name_of(kind)}",
            "data.root": root,
            "model.args": json.dumps(model_arguments(kind, PRETRAINING_KEYS)),
            **PRETRAINING,
        }
        fit(load_recipe("imagenette_nano", words(keys)), resume=True)


def train(kind: str, seed: int, data: CamVid, out: Path, records: Path, steps: int) -> None:
    """Make one run, or what is left of it, and write its record."""
    weights = out / f"weights-{name_of(kind)}"
    if not (weights / RESULTS).is_file():  # a training that is asked to stop ends without an error
        raise UserError(f"--out must hold finished weights of {kind!r}, {weights} has none")
    run = Run(kind, seed, weights, data)
    state = out / f"{name_of(kind)}-seed-{seed}.pt"
    if state.is_file():
        run.load(state)
    for part in range(len(run.curve) + 1, PARTS + 1):
        run.train(part * steps // PARTS, steps)
        held_out = run.test(data.held_out)["miou"]
        minutes = MINUTES * part / PARTS
        run.curve.append({"minutes": minutes, "step": run.step, "held_out_miou": held_out})
        run.save(state)
        print(f"{kind}, seed {seed}: {minutes:.0f} minutes, {100 * held_out:.1f} %", flush=True)
    record = {
        "study": "camvid_hours",
        "kind": kind,
        "seed": seed,
        "first_weights": read_json(weights / RESULTS)["metrics"],
        "steps": steps,
        "epochs": steps * BATCH / len(data.training),
        "cpu_seconds": run.cpu_seconds,
        "curve": run.curve,
        "validation": run.test(data.validation),
        "diagnosis": run.diagnose(data.validation[:DIAGNOSED]) if kind == GROUPS else [],
        "commit": commit(),
        "command": command_line(),
        "processor": processor(),
        "torch": torch.__version__,
    }
    write_record(records / f"{name_of(kind)}-seed-{seed}.json", record)


def read_records(folder: Path = RECORDS) -> dict[str, list[dict[str, Any]]]:
    """The records of each kind, by seed; of seeds of which both kinds have one."""
    found = [read_json(path) for path in folder.glob("*-seed-*.json")]
    found.sort(key=lambda record: int(record["seed"]))
    of_kind = {kind: [one for one in found if one["kind"] == kind] for kind in KINDS}
    seeds = set.intersection(*({one["seed"] for one in runs} for runs in of_kind.values()))
    if not seeds:
        raise UserError(f"--records must hold runs of both kinds with one seed, {folder} has none")
    return {kind: [one for one in runs if one["seed"] in seeds] for kind, runs in of_kind.items()}


def draw(records: dict[str, list[dict[str, Any]]]) -> Figure:
    """mIoU of the held-out images by minutes: the seeds of both kinds, thin, and their means."""
    figure = Figure(figsize=(5.4, 3.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for kind, runs in records.items():
        minutes = [point["minutes"] for point in runs[0]["curve"]]
        curves = [[100 * point["held_out_miou"] for point in run["curve"]] for run in runs]
        for curve in curves:
            axes.plot(minutes, curve, color=COLORS[kind], linewidth=0.8, alpha=0.5)
        means = [statistics.fmean(points) for points in zip(*curves, strict=True)]
        axes.plot(minutes, means, "o-", color=COLORS[kind], markersize=4, label=kind)
    axes.set_xlim(0, MINUTES + 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of training on one core")
    axes.set_ylabel(f"mIoU of {HELD_OUT} held-out images, %")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    tidy(axes, size=8)
    return figure


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.camvid_hours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("work", choices=("times", "weights", "train", "figure"))
    parser.add_argument("--data", type=Path, help="folder of the data set")
    parser.add_argument("--out", type=Path, help="folder of weights and unfinished runs")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the file that `figure` writes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="steps that `times` measures")
    options = parser.parse_args(arguments)
    if options.work != "figure" and options.data is None:
        parser.error(f"{options.work} needs --data")
    if options.work in ("weights", "train") and options.out is None:
        parser.error(f"{options.work} needs --out")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure times, train the first weights, make the runs that have no record yet, or draw them."""
    options = parse(arguments)
    try:
        if options.work == "times":
            taken = measure_times(read(options.data), options.rounds)
            steps = {kind: round(MINUTES * 60 / seconds) for kind, seconds in taken.items()}
            record = {
                "seconds_a_step": taken,
                "steps": steps,
                "processor": processor(),
                "torch": torch.__version__,
                "commit": commit(),
            }
            write_record(options.records / "times.json", record)
            print(json.dumps(record, indent=1))
        elif options.work == "weights":
            pretrain(options.data, options.out, options.kinds)
        elif options.work == "figure":
            save_figure(draw(read_records(options.records)), options.figure)
        else:
            data = read(options.data)
            for seed, kind in itertools.product(options.seeds, options.kinds):
                if not (options.records / f"{name_of(kind)}-seed-{seed}.json").is_file():
                    train(kind, seed, data, options.out, options.records, STEPS[kind])
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
