"""Another attention in a global ViT that was trained with 2,700 tokens, nothing trained: whose output stays nearest?

The ViT is the one that `benchmarks/accelerate_camvid.py train` makes: 4 blocks, 4 heads, patches of 8 pixels, a linear
classifier of tokens, on whole images of CamVid. Choices by groups get the centroids that `dgt.accelerate` finds:
k-means over queries of training images, moved by one step to the image at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.acceleration.sdpa import Call, watch_calls
from dgt.experiments.choices import CHOICES, Operands
from dgt.experiments.fixed_weights import Subject, open_data, study
from dgt.experiments.report import read_words
from dgt.ops import find_centroids, seed_centroids
from dgt.tasks import TASKS
from dgt.training.recipe import load_recipe
from dgt.utils.errors import UserError

GRID, GROUPS = (45, 60), 48
SHAPE: dict[str, Any] = {"img_size": (360, 480), "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}
SHAPE |= {"num_classes": 11, "class_token": False, "global_pool": ""}
KEYS = ("--data.scale=[480, 360]", "--data.mean=[0.45, 0.45, 0.45]", "--data.std=[0.25, 0.25, 0.25]")
CALIBRATION, SAMPLE = 8, 4096  # training images, and queries of each head among theirs, that are clustered


def replacement(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """As `dgt.experiments.key_choice.key_choice`, but for the words: `--weights FILE` and `--data.root CAMVID` in place
    of `--run`; `--percent 2,5,10,25`, of the keys, in place of `--top_k`; `--images N` (101).
    """
    options, keys = read_words(words, weights="", images=101, percent=(2, 5, 10, 25))
    model = timm.models.VisionTransformer(**SHAPE).eval()
    try:
        weights = torch.load(options["weights"], weights_only=True)
        model.load_state_dict({name.removeprefix("trunk."): weight for name, weight in weights.items()})
    except (OSError, RuntimeError, UnpicklingError, AttributeError, EOFError) as error:
        made = "benchmarks/accelerate_camvid.py train makes"
        raise UserError(f"--weights must be a file of the weights that {made}, got {options['weights']!r}") from error
    recipe = load_recipe("camvid_cpu", [*KEYS, *keys])
    centroids = cluster(model, open_data(recipe, ["--data.val_split=train"], CALIBRATION))

    def network(images: Tensor) -> Tensor:
        return F.interpolate(model(images).mT.unflatten(2, GRID), size=images.shape[2:], mode="bilinear")

    @contextmanager
    def swap(answer: Callable[[Operands], Tensor]) -> Iterator[None]:
        def attention(name: str, call: Call) -> Tensor:
            own = find_centroids(call.query, centroids[name], 1)
            return answer(Operands(name, call.query, call.key, call.value, call.scale, GRID, own))

        with watch_calls(torch.nn.ModuleDict({"vit": model}), attention):
            yield

    counts = [round(GRID[0] * GRID[1] * share / 100) for share in options.pop("percent")]
    settings = {"experiment": "replacement", **options, "keys": keys, "seeds": seeds}
    subject = Subject(network, TASKS[recipe.task], open_data(recipe, [], options["images"]), swap)
    return study(Path(out or "runs/ablate-replacement"), settings, subject, tuple(CHOICES), counts, seeds)


@torch.no_grad()
def cluster(model: torch.nn.Module, data: Any) -> dict[str, Tensor]:
    """Centroids (H, G, D) of every attention, from its queries for images."""
    queries: dict[str, list[Tensor]] = {}
    with watch_calls(
        torch.nn.ModuleDict({"vit": model}), lambda name, call: queries.setdefault(name, []).append(call.query)
    ):
        for images, _ in data.val_dataloader():
            model(torch.stack(images))
    found = {name: torch.cat(parts).transpose(0, 1).flatten(1, 2) for name, parts in queries.items()}
    return {name: seed_centroids(tokens[:, :: -(-tokens.shape[1] // SAMPLE)], GROUPS) for name, tokens in found.items()}
