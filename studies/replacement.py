"""Other attentions in a trained global ViT; groups have centroids from training images.

    python -m studies.replacement --weights FILE --data.root CAMVID [--percent 2,5,10,25] [--images N]

The ViT is trained by `benchmarks/accelerate_camvid.py train`: 4 blocks of 4 heads over the 2,700
    tokens of CamVid's whole images. Centroids come from k-means over queries of training images and
    one further step on each image. `studies.fixed_weights` describes what is measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.ops import find_centroids, seed_centroids
from dgt.runs.recipe import load_recipe
from dgt.swap import Call, trace_sdpa
from dgt.tasks import TASKS
from dgt.utils.errors import UserError
from studies.command import run_study
from studies.figure_fixed_weights import figure_fixed_weights
from studies.fixed_weights import Answer, Subject, open_data, study
from studies.key_selectors import SELECTORS, Operands
from studies.report import read_words

GRID = (45, 60)
GROUPS = 48
SHAPE: dict[str, Any] = {
    "img_size": (360, 480),
    "patch_size": 8,
    "embed_dim": 128,
    "depth": 4,
    "num_heads": 4,
    "num_classes": 11,
    "class_token": False,
    "global_pool": "",
}
KEYS = (
    "--data.scale=[480, 360]",
    "--data.mean=[0.45, 0.45, 0.45]",
    "--data.std=[0.25, 0.25, 0.25]",
)
PERCENT = (2, 5, 10, 25)
CALIBRATION_IMAGES = 8  # training images whose queries are clustered
SAMPLE = 4096  # of their queries, per head


def replacement(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """Measure what is missing for all selectors, and write `replacement.json` and `replacement.md`.

    Args:
        words: `--weights FILE`; `--data.root CAMVID`; `--percent 2,5,10,25`, of the keys; `--images
            N` (101).
        seeds: how often random keys are drawn.
        out: the folder; None for runs/ablate-replacement.

    Returns:
        The folder.

    Raises:
        UserError, OSError: If an option is wrong, or the weights or data are missing; also see
            `write_results`.
    """
    options, keys = read_words(words, weights="", images=101, percent=PERCENT)
    subject = open_subject(options["weights"], options["images"], keys)
    tokens = GRID[0] * GRID[1]
    counts = [round(tokens * share / 100) for share in options.pop("percent")]
    settings = {"experiment": "replacement", **options, "keys": keys, "seeds": seeds}
    folder = Path(out or "runs/ablate-replacement")
    return study(folder, settings, subject, list(SELECTORS), counts, seeds)


def load_camvid_vit(weights: str | Path) -> nn.Module:
    """The ViT that `benchmarks/accelerate_camvid.py train` trains, in evaluation mode.

    Raises:
        UserError: If the file holds no such weights.
    """
    model = timm.models.VisionTransformer(**SHAPE).eval()
    try:
        stored = torch.load(weights, weights_only=True)
        model.load_state_dict(
            {name.removeprefix("trunk."): weight for name, weight in stored.items()}
        )
    except (OSError, RuntimeError, UnpicklingError, AttributeError, EOFError) as error:
        made = "benchmarks/accelerate_camvid.py train makes"
        raise UserError(
            f"--weights must be a file of the weights that {made}, got {str(weights)!r}"
        ) from error
    return model


def open_subject(weights: str, images: int, keys: Sequence[str]) -> Subject:
    """Open the trained ViT with its data.

    Args:
        weights: file of the weights.
        images: maximum number of validation images.
        keys: recipe keys of the data, `--data.KEY VALUE`.
    """
    model = load_camvid_vit(weights)
    parts = nn.ModuleDict({"vit": model})
    recipe = load_recipe("camvid_cpu", [*KEYS, *keys])
    centroids = cluster(parts, open_data(recipe, ["--data.val_split=train"], CALIBRATION_IMAGES))

    def network(images: Tensor) -> Tensor:
        logits = model(images).mT.unflatten(2, GRID)
        return F.interpolate(logits, size=images.shape[2:], mode="bilinear")

    @contextmanager
    def swap(answer: Answer) -> Iterator[None]:
        def attention(name: str, call: Call) -> Tensor:
            own = find_centroids(call.query, centroids[name], 1)
            return answer(Operands(name, call.query, call.key, call.value, call.scale, GRID, own))

        with trace_sdpa(parts, attention):
            yield

    return Subject(network, TASKS[recipe.task], open_data(recipe, [], images), swap)


@torch.no_grad()
def cluster(parts: nn.ModuleDict, data: Any) -> dict[str, Tensor]:
    """Centroids (H, G, D) of every attention module, from its queries for some images."""
    queries: dict[str, list[Tensor]] = {}
    with trace_sdpa(parts, lambda name, call: queries.setdefault(name, []).append(call.query)):
        for images, _ in data.val_dataloader():
            parts["vit"](torch.stack(images))
    centroids = {}
    for name, of_batches in queries.items():
        tokens = torch.cat(of_batches).transpose(0, 1).flatten(1, 2)
        step = math.ceil(tokens.shape[1] / SAMPLE)
        centroids[name] = seed_centroids(tokens[:, ::step], GROUPS)
    return centroids


if __name__ == "__main__":
    sys.exit(run_study("replacement", str(__doc__), replacement, figure_fixed_weights))
