"""How long the models of `studies.residual_training` take, by what their first two stages attend to.

    OMP_NUM_THREADS=1 python -m studies.residual_times

Predictions in float32 at the sizes of the study's tests, and training steps (forward and backward,
in the precision of the trainings) at the training size and at twice its side. Weights and images are
random. The kinds take turns, so that a row holds comparable times; run nothing else beside it.
Writes `residual_times.json` beside the records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dgt.data.segmentation import LabelMaps
from dgt.runs import load_recipe
from dgt.runs.recipe import Recipe
from dgt.tasks import TASKS
from dgt.training.fabric import has_bfloat16_units
from dgt.utils.errors import UserError
from dgt.utils.records import write_record
from dgt_command.measures import machine, medians, milliseconds
from studies.residual_summary import SIDE
from studies.residual_training import (
    DATA_SETS,
    KINDS,
    LARGE_BATCH,
    RANDOM_KEYS,
    RECORDS,
    model_arguments,
    whole,
    words,
)

CLASSES = {"imagenette": 10, "camvid": 11}
TESTED = {"imagenette": LARGE_BATCH, "camvid": 1}  # images of a prediction
COMPARED = tuple(kind for kind in KINDS if kind != RANDOM_KEYS)


class Timed(NamedTuple):
    """One row of times.

    Attributes:
        data_set: a name in `DATA_SETS`.
        what: "prediction" or "training step".
        size: as in a test; in a training step, the side of the images in pixels.
        images: how many at a time.
    """

    data_set: str
    what: str
    size: int
    images: int


def recipe_of(data_set: str, kind: str) -> Recipe:
    """The recipe that a kind is trained by."""
    about = DATA_SETS[data_set]
    keys = {
        "model.name": "dgt_nano",
        "model.args": json.dumps(model_arguments(kind, about.top_k)),
        **about.keys,
    }
    return load_recipe(about.recipe, words(keys))


def rows_of(data_set: str) -> list[Timed]:
    """What is timed of a data set."""
    data = recipe_of(data_set, KINDS[0]).data
    batch, side = data.batch_size, data.image_size
    return [
        *(
            Timed(data_set, "prediction", size, TESTED[data_set])
            for size in DATA_SETS[data_set].tests
        ),
        Timed(data_set, "training step", side, batch),
        Timed(data_set, "training step", 2 * side, batch // 4),
    ]


def call_of(timed: Timed, kind: str) -> Callable[[], object]:
    """A function that predicts, or makes a training step without the optimizer's part."""
    recipe = recipe_of(timed.data_set, kind)
    classes = CLASSES[timed.data_set]
    task = TASKS[recipe.task]
    network = task.build(recipe.model, classes, recipe.data.image_size)
    if timed.what == "prediction":
        height, width = SIDE[timed.data_set](timed.size)
        return partial(predict, network.eval(), torch.rand(timed.images, 3, height, width))
    images = torch.rand(timed.images, 3, timed.size, timed.size)
    targets: Any = torch.randint(classes, (timed.images,))
    if recipe.task == "segment":
        labels = torch.randint(classes, (timed.images, timed.size, timed.size))
        sizes = torch.full((timed.images, 2), timed.size)
        targets = LabelMaps(labels, sizes, torch.ones(timed.images, 256, dtype=torch.bool))
    is_half = recipe.trainer.precision == "bf16-mixed" and has_bfloat16_units()
    return partial(step, network.train(), task.losses, images, targets, is_half)


@torch.inference_mode()
def predict(network: nn.Module, images: Tensor) -> object:
    """Run a network."""
    return network(images)


def step(
    network: nn.Module,
    losses: Callable[..., dict[str, Tensor]],
    images: Tensor,
    targets: Any,
    is_half: bool,
) -> None:
    """Forward and backward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        loss = losses(network, images, targets)["loss"]
    loss.backward()
    network.zero_grad()


def measure(timed: Timed, rounds: int) -> dict[str, Any]:
    """Milliseconds an image of all kinds."""
    calls = {kind: call_of(timed, kind) for kind in COMPARED}
    found = medians(rounds, {kind: partial(milliseconds, call) for kind, call in calls.items()})
    return {
        **timed._asdict(),
        "ms": {kind: taken / timed.images for kind, taken in found.items()},
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.residual_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--json", type=Path, default=RECORDS.parent / "residual_times.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the times."""
    options = parse(arguments)
    rows = []
    try:
        for data_set in DATA_SETS:
            for timed in rows_of(data_set):
                rows.append(measure(timed, options.rounds))
                print(rows[-1], flush=True)
                write_record(options.json, {"machine": machine(), "rows": rows})
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
