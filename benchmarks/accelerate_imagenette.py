"""What `dgt.accelerate` costs a classifier: the answers of a trained run, with its own attention and
accelerated.

    tools/make_weights.sh DATA OUT vit
    python benchmarks/accelerate_imagenette.py --run OUT/runs/vit256 --data.root DATA/imagenette128 --threads 1 \
        --errors 0.001 0.01 0.02 0.05 0.1 --out accelerate_imagenette.json

Settings are chosen, without training, with `--calibrate` validation images, drawn by seed: the model
was trained on none of them. Then, in one pass over `--images` others, each is answered by the
model's own attention and by every plan; times are those of the reports. Plans and the logits of
every image are kept beside the JSON, in a folder of its name. Run it again to continue: nothing is
measured twice, and more errors or images may be asked for then.

    python benchmarks/accelerate_imagenette.py --run OUT/runs/vit256 --data.root DATA/imagenette128 \
        --spread plan.json --images 48 --out accelerate_spread.json

With `--spread`: errors of single images under one plan, for augmented training images and for
validation images.

    python benchmarks/accelerate_imagenette.py --run OUT/runs/vit256 --data.root DATA/imagenette128 --calibrate 96 \
        --neighbors accelerate_imagenette/plan-0.01.safetensors --images 160 --out accelerate_neighbours.json

With `--neighbors`: whether choosing makes the predicted error too low. Errors of a plan, and of
others with more and fewer keys, on the images that chose it, on those held out, and on others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dgt
from dgt.acceleration.capture import split_inputs
from dgt.acceleration.grouped import grouped_calls
from dgt.acceleration.report import LayerReport, Report
from dgt.acceleration.statistics import half_interval, relative_error
from dgt.bench.measures import machine
from dgt.runs.recipe import build_data, parse_recipe
from dgt.training import load_run
from dgt.utils.atomic_write import replacing, write_json

OWN = "own"  # the model's attention, among the plans
KEPT = 50  # images between two writes
TIMES = (0.25, 1.0, 3.0)  # keys of a plan's neighbors by those of the plan
DRAWS = 4000  # of images, for how often an error is far off


class Images:
    """The run's validation images in an order drawn by seed, one at a time: (1, 3, H, W) and the
    label.
    """

    def __init__(self, run: Any, root: str) -> None:
        keys = [
            f"--data.root={root}",
            "--data.batch_size=1",
            "--data.num_workers=0",
            "--data.val_size=null",
        ]
        self.data = build_data(parse_recipe(run.recipe.to_dict(), keys))
        self.data.setup("validate")
        self.places = torch.randperm(
            len(self.data.datasets["val"]), generator=torch.Generator().manual_seed(0)
        ).tolist()

    def part(self, first: int, last: int) -> Iterator[tuple[Tensor, int]]:
        """The images from one place of the order to another, and their labels."""
        self.data.datasets["val"].indices = self.places[first:last]
        loader = self.data.val_dataloader()
        loader.device = torch.device("cpu")
        return ((image, int(label)) for image, label in loader)


def plan(
    error: float, options: argparse.Namespace, images: Images, folder: Path
) -> tuple[nn.Module, Report]:
    """The run accelerated within an error, and its report; by the plan of an earlier run if there
    is one.
    """
    network, path = load_run(options.run).network.eval(), folder / f"plan-{error:g}.safetensors"
    if path.exists():
        return network, dgt.apply_plan(network, path)
    report = dgt.accelerate(
        network, torch.cat([image for image, _ in images.part(0, options.calibrate)]), error
    )
    report.save(path)
    print(report, flush=True)
    return network, report


@torch.inference_mode()
def answer(
    networks: dict[str, nn.Module],
    images: Images,
    first: int,
    last: int,
    found: dict[str, Any],
    go_on: Callable[[], bool],
) -> Iterator[None]:
    """Answer every image that has no answers yet.

    Yields from time to time, when there are new answers to be kept.
    """
    names = [name for name in networks if len(found["logits"].setdefault(name, [])) < last - first]
    done = min((len(found["logits"][name]) for name in names), default=last - first)
    for place, (image, label) in enumerate(images.part(first + done, last), done):
        if not go_on():
            break
        found["labels"][place : place + 1] = [label]
        for name in names:
            if len(found["logits"][name]) == place:
                found["logits"][name].append(networks[name](image)[0].tolist())
        if place % KEPT == KEPT - 1:
            yield
    yield


def drawn(squares: Tensor, count: int) -> Tensor:
    """The errors of `DRAWS` random draws of ``count`` images."""
    places = torch.randint(len(squares), (DRAWS, count), generator=torch.Generator().manual_seed(0))
    sums = squares[places].sum(1)
    return (sums[:, 0] / sums[:, 1]).sqrt()


def missed(squares: Tensor, count: int) -> float:
    """The share of draws of ``count`` images whose error is more than 20 % off that of all."""
    ratios = drawn(squares, count) / relative_error(squares)
    return float(((ratios - 1).abs() > 0.2).double().mean())


def squares_of(after: Tensor, own: Tensor) -> Tensor:
    """(..., 2): the squared difference of logits, and the square of the model's own."""
    return torch.stack([(after - own).square().sum(-1), own.square().sum(-1)], dim=-1)


@torch.inference_mode()
def neighbors(options: argparse.Namespace, images: Images) -> None:
    """Write the errors of a plan and of others with more and fewer keys, by the role that the images
    had in choosing the plan.
    """
    own, network = (load_run(options.run).network.eval() for _ in range(2))
    dgt.apply_plan(network, options.neighbors)
    rows = {answer: answer.rows for answer in grouped_calls(network).values()}
    squares = []
    for image, _ in images.part(0, options.calibrate + (options.images or options.calibrate)):
        after = []
        for times in TIMES:
            for answer, own_rows in rows.items():
                answer.rows = {at: with_keys(row, times) for at, row in own_rows.items()}
            after.append(network(image)[0].double())
        squares.append(
            squares_of(torch.stack(after), own(image)[0].double().expand(len(TIMES), -1))
        )
    write_json(options.out, machine() | by_role(torch.stack(squares), options.calibrate))


def with_keys(row: LayerReport, times: float) -> LayerReport:
    """A row of a plan with more or fewer keys."""
    return replace(row, keys=max(1, round(times * row.keys)))


def by_role(squares: Tensor, calibrate: int) -> dict[str, Any]:
    """Errors of the images that chose a plan, of those held out, and of others, for each plan.

    Args:
        squares: (images, plans, 2).
        calibrate: how many of the images, the first, the plan was made with.
    """
    chose, aside = split_inputs(calibrate)
    roles = {"chose": chose, "aside": aside, "others": range(calibrate, len(squares))}
    rows = []
    for place, times in enumerate(TIMES):
        errors = {}
        for name, images in roles.items():
            own = squares[list(images), place]
            errors[name] = {"error": relative_error(own), "half": half_interval(own)}
        ratio = errors["chose"]["error"] / errors["others"]["error"]
        rows.append({"times": times, **errors, "chose_by_others": ratio})
    alike = torch.corrcoef(squares[:, :, 0].T)
    return {
        "calibrate": calibrate,
        "images": {name: len(images) for name, images in roles.items()},
        "correlation": float(alike.min()),
        "rows": rows,
    }


def changes_outputs(report: Report) -> bool:
    """Whether a plan has any attention in groups."""
    return any(layer.choice == "groups" for layer in report.layers)


def row(report: Report, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A row of the results: what a plan changes in the answers to images.

    Only images that both the plan and the model's own attention have answered count.
    """
    count = min(len(found["logits"][OWN]), len(found["logits"][name]))
    own, after = (
        torch.tensor(found["logits"][key][:count], dtype=torch.float64) for key in (OWN, name)
    )
    squares = squares_of(after, own)
    labels = torch.tensor(found["labels"][:count])
    right = [(logits.argmax(1) == labels).double() for logits in (own, after)]
    error, chose = relative_error(squares), len(split_inputs(found["calibrate"])[0])
    return report.to_json() | {
        "choosing_images": chose,
        "missed": {
            str(images): missed(squares, images)
            for images in sorted({32, 64, 128, 256, chose})
            if error
        },
        "as_low": float((drawn(squares, chose) <= report.predicted_error).double().mean()),
        "varies": described(squares)["varies"] if error else None,
        "unseen_images": count,
        "unseen_error": error,
        "unseen_half": half_interval(squares),
        "predicted_by_unseen": report.predicted_error / error if error else None,
        "top1_before": float(right[0].mean()),
        "top1": float(right[1].mean()),
        "top1_gain": float((right[1] - right[0]).mean()),
        "top1_gain_half": 1.96 * float((right[1] - right[0]).std()) / count**0.5,
        "agreement": float((own.argmax(1) == after.argmax(1)).double().mean()),
    }


@torch.inference_mode()
def spread(options: argparse.Namespace) -> None:
    """Write how errors of single images differ, and those of the two halves of the data."""
    run, plan_of = load_run(options.run), load_run(options.run).network
    sizes = [f"--data.{part}_size={options.images}" for part in ("train", "val")]
    keys = [f"--data.root={options.root}", "--data.batch_size=1", "--data.num_workers=0", *sizes]
    data = build_data(parse_recipe(run.recipe.to_dict(), keys))
    data.setup()
    dgt.apply_plan(plan_of, options.spread)
    content = machine()
    for part, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader())):
        loader.device = torch.device("cpu")
        pairs = [
            (run.network(image)[0].double(), plan_of(image)[0].double()) for image, _ in loader
        ]
        own, after = (torch.stack(logits) for logits in zip(*pairs, strict=True))
        content[part] = described(squares_of(after, own))
    write_json(options.out, content)


def described(squares: Tensor) -> dict[str, Any]:
    """The error of some images, how much the squared errors of single ones vary, and how many images
    are needed to know the error to 20 %.
    """
    error, each = relative_error(squares), (squares[:, 0] / squares[:, 1]).sqrt()
    varies = float((squares[:, 0] - error**2 * squares[:, 1]).std() / squares[:, 0].mean())
    return {
        "images": len(squares),
        "error": error,
        "half": half_interval(squares),
        "varies": varies,
        # whose mean squared error is within 40 %
        "needed": math.ceil((1.96 * varies / 2 / 0.2) ** 2),
        "least": float(each.min()),
        "most": float(each.max()),
        "each": each.tolist(),
    }


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data.root", dest="root", required=True)
    parser.add_argument(
        "--calibrate", type=int, default=96, help="validation images to choose with (default: 96)"
    )
    parser.add_argument(
        "--images", type=int, help="other validation images to measure on (default: all)"
    )
    parser.add_argument("--errors", type=float, nargs="+", default=[0.001, 0.01, 0.02, 0.05, 0.1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="no plan or image is started later (default: no limit)",
    )
    parser.add_argument("--out", type=Path, default=Path("accelerate_imagenette.json"))
    parser.add_argument(
        "--spread", type=Path, metavar="PLAN", help="errors of single images under a plan instead"
    )
    parser.add_argument(
        "--neighbors",
        type=Path,
        metavar="PLAN",
        help="errors of a plan and others like it instead",
    )
    return parser.parse_args()


def main() -> None:
    """Choose, measure, and write the rows as they are done."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    if options.spread:
        spread(options)
    elif options.neighbors:
        neighbors(options, Images(load_run(options.run), options.root))
    else:
        measure(options)


def read_answers(path: Path, calibrate: int) -> dict[str, Any]:
    """The answers of an earlier run, whose plans must have been made with as many images."""
    found = json.loads(path.read_text()) if path.exists() else {"labels": [], "logits": {}}
    earlier = found.setdefault("calibrate", calibrate)
    if earlier != calibrate:
        sys.exit(f"error: --calibrate must be {earlier}, as of the plans in {path.parent}")
    return found


def measure(options: argparse.Namespace) -> None:
    """Choose a plan for each error, let all networks answer, and write the rows as images are done."""
    start = time.monotonic()

    def has_time() -> bool:
        return time.monotonic() - start < options.seconds

    folder = options.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "answers.json"
    found = read_answers(kept, options.calibrate)
    images = Images(load_run(options.run), options.root)
    networks = {OWN: load_run(options.run).network.eval()}
    reports: dict[str, Report] = {}
    for error in takewhile(lambda _: has_time(), options.errors):
        name = f"{error:g}"
        network, reports[name] = plan(error, options, images, folder)
        if changes_outputs(reports[name]):
            networks[name] = network
    last = len(images.places)
    if options.images:
        last = min(last, options.calibrate + options.images)
    rows: list[dict[str, Any]] = []
    for _ in answer(networks, images, options.calibrate, last, found, has_time):
        with replacing(kept) as partial:
            partial.write_text(json.dumps(found))
        if found["logits"][OWN]:
            rows = rows_of(reports, found)
            write_rows(options.out, rows, found)
    for one in rows:
        print({name: value for name, value in one.items() if name != "layers"}, flush=True)


def rows_of(reports: dict[str, Report], found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each plan; one that changes nothing has the answers of the model's own attention."""
    answered = {name: name if changes_outputs(report) else OWN for name, report in reports.items()}
    return [row(report, answered[name], found) for name, report in reports.items()]


def write_rows(path: Path, rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Write the rows, with the accuracy of the model's own attention on the most images."""
    most = max(rows, key=lambda one: one["unseen_images"])
    content = {
        **machine(),
        "calibrate": found["calibrate"],
        "images": len(found["logits"][OWN]),
        "top1": most["top1_before"],
        "rows": rows,
    }
    write_json(path, content)


if __name__ == "__main__":
    main()
