"""What the attention of the first two stages is worth, for the same CPU time on whole images.

    OMP_NUM_THREADS=1 python -m studies.camvid_hours times --data CAMVID
    OMP_NUM_THREADS=1 python -m studies.camvid_hours train --data CAMVID --out OUT
    python -m studies.camvid_hours figure

DGT-Nano with UperNet learns CamVid from whole images of 480 x 360, two at a time, on one thread. Its
arms differ in what the first two stages attend to (`ARMS`), from nothing to all keys. Each trains for
as many steps as `MINUTES` of a quiet core are enough for, by the seconds a step in
`RECORDS/times.json`, which `times` measures in turns on one processor: what else the machine does, and
on which machine a run goes on, does not change what is trained.

**All arms of a seed begin as the same function**: with the weights `dgt_nano.imagenette` and one random
head, but for the attention of the first two stages, which is random, and whose output projection is
zero. They see the same images in the same order, as far as they come: all random choices are functions
of (seed, step).

Two more rows: all keys for as many steps as groups with a residual key; and all keys on crops, by the
recipe of the weights `dgt_nano.camvid`, which this study does not shape: it trains on all training
images, in bfloat16, with an average of weights, and keeps the attention that it starts with.

Every sixth of the training images, 60, is held out; the curve of mIoU by minutes is measured on these.
The validation images are looked at once, after the last step.

A run writes its record, `RECORDS/KIND-seed-N.json`, when it is finished; its state is in OUT after each
of `PARTS` parts of the training, where the same command goes on. A run that has a record is not made
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import timm
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
from dgt.runs.recipe import Recipe, build_data
from dgt.runs.status import STATUS
from dgt.tasks.segment import SegmentationMetrics, build_segmenter, losses
from dgt.training import fit
from dgt.utils.atomic_write import replacing
from dgt.utils.errors import UserError
from dgt.utils.json_files import read_json
from dgt.utils.records import write_record
from dgt_command.measures import machine
from studies.residual_training import ALL_KEYS, commit, words


class NoAttention(nn.Module):
    """In the place of an attention: it adds nothing to any token."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Zeros of the shape of (B, H, W, C)."""
        return torch.zeros_like(x)


class MeanKey(nn.Module):
    """In the place of an attention: every token gets the mean of all values, without any scores."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C), without padding, to the same shape."""
        mean = self.value(x).mean(dim=(1, 2), keepdim=True)
        return self.proj(mean).expand_as(x)


class Arm(NamedTuple):
    """What the first two stages attend to.

    Attributes:
        attention: a kind of `dgt.models.compared`.
        arguments: of `dgt_nano`, what differs from `MODEL`.
        layer: what is then put in the place of their attention; None for nothing.
    """

    attention: str
    arguments: Mapping[str, Any] = MappingProxyType({})
    layer: Callable[[int], nn.Module] | None = None


NOTHING = "no attention"
GROUPS = "groups, 1 residual key"
LONGER = "all keys, as many steps as groups"
CROPS = "all keys, on crops"
ARMS = {  # in the order of the runs
    NOTHING: Arm("global", layer=NoAttention),
    GROUPS: Arm("group", {"residual_keys": 1}),
    "pooled keys": Arm("reduced", {"extents": [8, 4, 0, 0]}),
    "one list for all": Arm("group", {"residual_keys": 1, "num_groups": 1}),
    "mean key": Arm("global", layer=MeanKey),
    "windows of 7": Arm("window", {"extents": [7, 7, 0, 0]}),
    "groups": Arm("group"),
    ALL_KEYS: Arm("global"),
    LONGER: Arm("global"),
}
KINDS = (*ARMS, CROPS)
MODEL = {"extents": [0, 0, 0, 0], "top_k": 64, "residual_keys": 0}
WEIGHTS = "dgt_nano.imagenette"
FREE = re.compile(r"stages\.[01]\.blocks\.\d+\.attn\.")  # what no arm takes from these weights
LARGE_STAGES = 2
ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "camvid_hours"
TIMES = "times.json"
FIGURE = ROOT / "docs" / "images" / "camvid-hours.png"
SIZE = (360, 480)
BATCH = 2
MINUTES = 30  # of a quiet core that the steps of each kind take
PARTS = 6  # of a training: after each the curve has a point, and the state is saved
HELD_OUT_EVERY = 6
HELD_OUT = 60
DIAGNOSED = 3  # images of a run whose groups and keys are looked at
WARMUP_STEPS = 50
RATE = 1e-3
CLASSES = 11
CROPS_BATCH = 8


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
    data = build_data(recipe)
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


def recipe_of(kind: str) -> Recipe:
    """The recipe whose model, but not whose training, is that of an arm."""
    attention = ARMS[kind].attention
    arguments = {
        **MODEL,
        "attention": [attention, attention, "global", "global"],
        **ARMS[kind].arguments,
    }
    return load_recipe("camvid_cpu", words({"model.args": json.dumps(arguments)}))


def segmenter(kind: str) -> Any:
    """The segmenter of an arm, with random weights."""
    network: Any = build_segmenter(recipe_of(kind).model, CLASSES, SIZE[1])
    layer = ARMS[kind].layer
    if layer is not None:
        for stage in network.backbone.model.stages[:LARGE_STAGES]:
            for block in stage.blocks:
                block.attn = layer(block.attn.dim)
    return network


def first_weights(seed: int) -> dict[str, Tensor]:
    """The weights that all arms of a seed begin with, as far as they have them."""
    torch.manual_seed(seed)
    network = segmenter(ALL_KEYS)
    for stage in network.backbone.model.stages[:LARGE_STAGES]:
        for block in stage.blocks:
            nn.init.zeros_(block.attn.proj.weight)
            nn.init.zeros_(block.attn.proj.bias)
    weights = network.state_dict()
    trained = timm.create_model(WEIGHTS, pretrained=True).state_dict()
    for name, value in trained.items():
        own = f"backbone.model.{name}"
        if own in weights and not FREE.match(name):
            weights[own] = value
    return weights


def build(kind: str, seed: int) -> Any:
    """The segmenter of an arm as its training begins."""
    common = first_weights(seed)
    network = segmenter(kind)
    weights = network.state_dict()
    for name, value in common.items():
        if name in weights:
            weights[name] = value
    network.load_state_dict(weights)
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
        data: all images.
    """

    def __init__(self, kind: str, seed: int, data: CamVid) -> None:
        self.kind, self.seed, self.data = kind, seed, data
        self.network = build(kind, seed).train()
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


def measure_times(data: CamVid, kinds: Sequence[str], rounds: int) -> dict[str, float]:
    """CPU seconds a step of some arms: medians of steps in turns."""
    runs = {kind: Run(kind, 0, data) for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in range(1, rounds + 2):
        for kind, run in runs.items():
            before = run.cpu_seconds
            run.train(index, 10 * rounds)
            taken[kind].append(run.cpu_seconds - before)
    return {kind: statistics.median(seconds[1:]) for kind, seconds in taken.items()}


def crops_recipe(root: Path, out: Path, seed: int, epochs: int) -> Recipe:
    """The recipe of the weights `dgt_nano.camvid`, but with all keys, and for other epochs."""
    arguments = {**MODEL, "attention": ["global"] * 4}
    keys = {
        "seed": seed,
        "out": out,
        "data.root": root,
        "data.batch_size": CROPS_BATCH,
        "model.init_from": WEIGHTS,
        "model.args": json.dumps(arguments),
        "schedule.epochs": epochs,
        "schedule.warmup_epochs": 1 if epochs > 1 else 0,
        "trainer.check_val_every": epochs,
        "trainer.accelerator": "cpu",
    }
    return load_recipe("camvid_nano", words(keys))


def time_of_crops(root: Path) -> float:
    """Seconds a step of the training on crops, in an epoch of it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "crops"
        fit(crops_recipe(root, out, 0, 1))
        return CROPS_BATCH / read_json(out / STATUS)["images_per_second"]


def write_times(data: CamVid, root: Path, kinds: Sequence[str], rounds: int, path: Path) -> None:
    """Measure the seconds a step of some kinds, and write them beside those of the others."""
    earlier = read_json(path)["seconds_a_step"] if path.is_file() else {}
    taken = measure_times(data, [kind for kind in kinds if kind in ARMS], rounds)
    if CROPS in kinds:
        taken[CROPS] = time_of_crops(root)
    seconds = {kind: (earlier | taken)[kind] for kind in KINDS if kind in earlier | taken}
    write_record(path, {"seconds_a_step": seconds, **machine(), "commit": commit()})


def steps_of(kind: str, seconds: dict[str, float]) -> int:
    """The steps of a kind, by the seconds a step of all."""
    return round(MINUTES * 60 / seconds[GROUPS if kind == LONGER else kind])


def train(kind: str, seed: int, data: CamVid, out: Path, steps: int) -> dict[str, Any]:
    """Make one run, or what is left of it; what its record holds."""
    run = Run(kind, seed, data)
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
    return {
        "epochs": steps * BATCH / len(data.training),
        "cpu_seconds": run.cpu_seconds,
        "curve": run.curve,
        "validation": run.test(data.validation),
        "diagnosis": run.diagnose(data.validation[:DIAGNOSED]) if kind == GROUPS else [],
    }


def train_on_crops(root: Path, seed: int, data: CamVid, out: Path, steps: int) -> dict[str, Any]:
    """Make the run on crops, or what is left of it; what its record holds."""
    folder = out / f"{name_of(CROPS)}-seed-{seed}"
    images = len(data.training) + len(data.held_out)
    epochs = max(1, round(steps * CROPS_BATCH / images))
    fit(crops_recipe(root, folder, seed, epochs), resume=True)
    results = read_json(folder / RESULTS)
    return {
        "steps": results["steps"],
        "epochs": epochs,
        "cpu_seconds": results["seconds"],  # of a clock, on one thread
        "curve": [],
        "validation": results["metrics"],
    }


def make(kind: str, seed: int, data: CamVid, options: argparse.Namespace) -> None:
    """Make one run and write its record."""
    steps = steps_of(kind, read_json(options.records / TIMES)["seconds_a_step"])
    at = commit()
    if kind == CROPS:
        found = train_on_crops(options.data, seed, data, options.out, steps)
    else:
        found = train(kind, seed, data, options.out, steps)
    record = {
        "study": "camvid_hours",
        "kind": kind,
        "seed": seed,
        "steps": steps,
        **found,
        **machine(),
        "commit": at,
    }
    write_record(options.records / f"{name_of(kind)}-seed-{seed}.json", record)


def read_records(folder: Path = RECORDS) -> dict[str, list[dict[str, Any]]]:
    """The records of each kind, by seed; of kinds without any an empty list."""
    found = [read_json(path) for path in folder.glob("*-seed-*.json")]
    found.sort(key=lambda record: int(record["seed"]))
    return {kind: [one for one in found if one["kind"] == kind] for kind in KINDS}


def draw(records: dict[str, list[dict[str, Any]]]) -> Figure:
    """mIoU of the held-out images by minutes: the seeds of each arm, thin, and their means."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for index, kind in enumerate(ARMS):
        runs = records[kind]
        if not runs or kind == LONGER:  # which takes another time
            continue
        color = f"C{index}"
        minutes = [point["minutes"] for point in runs[0]["curve"]]
        curves = [[100 * point["held_out_miou"] for point in run["curve"]] for run in runs]
        for curve in curves:
            axes.plot(minutes, curve, color=color, linewidth=0.8, alpha=0.5)
        means = [statistics.fmean(points) for points in zip(*curves, strict=True)]
        axes.plot(minutes, means, "o-", color=color, markersize=4, label=kind)
    axes.set_xlim(0, MINUTES + 1)
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
    parser.add_argument("work", choices=("times", "train", "figure"))
    parser.add_argument("--data", type=Path, help="folder of the data set")
    parser.add_argument("--out", type=Path, help="folder of unfinished runs")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the file that `figure` writes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="steps that `times` measures")
    options = parser.parse_args(arguments)
    if options.work != "figure" and options.data is None:
        parser.error(f"{options.work} needs --data")
    if options.work == "train" and options.out is None:
        parser.error(f"{options.work} needs --out")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure times, make the runs that have no record yet, or draw them."""
    options = parse(arguments)
    try:
        if options.work == "figure":
            save_figure(draw(read_records(options.records)), options.figure)
            return 0
        data = read(options.data)
        times = options.records / TIMES
        if options.work == "times":
            write_times(data, options.data, options.kinds, options.rounds, times)
            return 0
        if not times.is_file():
            raise UserError(
                f"--records must hold {TIMES}, which `times` writes, {times} is missing"
            )
        for seed, kind in itertools.product(options.seeds, options.kinds):
            if not (options.records / f"{name_of(kind)}-seed-{seed}.json").is_file():
                make(kind, seed, data, options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
