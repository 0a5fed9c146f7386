"""Which keys, at fixed weights: a trained DGT's layers get k keys by its groups, or by another choice; no training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from dgt.experiments.choices import Operands
from dgt.experiments.fixed_weights import Subject, open_data, study
from dgt.experiments.report import read_words
from dgt.layers import DGAttention
from dgt.models.inspect import attention_layers
from dgt.tasks import TASKS
from dgt.training.load import load_run
from dgt.utils.errors import UserError

CHOICES = "groups", "groups, remainder", "best of each query", "best one for all", "window", "pooled"
RANDOM = "random, each query", "random, one for all"


def key_choice(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """Measure what is missing of all choices, and write `key_choice.json` and `.md` into the folder, which it returns.

    Args:
        words: `--run RUN`, a classifier or segmenter of `dgt train`; `--images N`, of its validation at most (300);
            `--top_k 1,4,16`; `--data.KEY VALUE` of its recipe.
        seeds: how often random keys are drawn.
        out: the folder; None for runs/ablate-key_choice. A k that it has is not measured again.

    Raises:
        UserError: wrong words, a run without DG-Attention or of another task, other settings than the folder's.
        OSError: no run or no data there; another process is at work in the folder.
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
    data = open_data(run.recipe, keys, options["images"])
    subject = Subject(run.network, task, data, partial(swapped, run.network))
    settings = {"experiment": "key_choice", **options, "keys": keys, "seeds": seeds}
    return study(Path(out or "runs/ablate-key_choice"), settings, subject, (*CHOICES, *RANDOM), counts, seeds)


@contextmanager
def swapped(network: nn.Module, answer: Callable[[Operands], Tensor]) -> Iterator[None]:
    """Inside, what a network's DG-Attention layers attend to is ``answer``'s."""
    layers = attention_layers(network)
    for name, layer in layers.items():
        layer.forward = partial(_answered, name, layer, answer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def _answered(
    name: str, layer: DGAttention, answer: Callable[[Operands], Tensor], x: Tensor, mask: Tensor | None = None
) -> Tensor:
    if x.dim() != 4 or mask is not None:
        raise UserError(f"layer {name!r} must get a map (B, H, W, C) without padding, got {tuple(x.shape)}")
    grid = (x.shape[1], x.shape[2])
    return layer.merge_heads(
        answer(Operands(name, *layer.split_heads(x), layer.scale, grid, layer.unit_centroids())), x
    )
