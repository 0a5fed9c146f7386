"""Which keys, at fixed weights? A trained DGT whose layers get k keys from their groups or another selector.

    python -m studies.key_choice --run RUN [--images N] [--top_k 1,4,16] [--data.KEY VALUE] [--seeds N] [--out DIR]

`studies.fixed_weights` describes what is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.models.inspect import attention_layers
from dgt.runs import load_run
from dgt.tasks import TASKS
from dgt.utils.errors import UserError
from studies import content_selection_models  # noqa: F401 (registers the models of that study)
from studies.command import run_study
from studies.figure_fixed_weights import figure_fixed_weights
from studies.fixed_weights import Answer, Subject, open_data, study
from studies.key_selectors import SELECTORS, Operands
from studies.report import read_words

NOT_FOR_DGT = ("random, remainder", "strided", "merged (ToMe)", "blocks")
FOR_DGT = [selector for selector in SELECTORS if selector not in NOT_FOR_DGT]
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def key_choice(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """Measure what is missing for all selectors, and write `key_choice.json` and `key_choice.md`.

    Args:
        words: `--run RUN`, a classifier or segmenter from `dgt train`; `--images N`, at most this
            many of its validation images (300); `--top_k 1,4,16`; `--data.KEY VALUE` of its recipe.
        seeds: how often random keys are drawn.
        out: the folder; None for runs/ablate-key_choice.

    Returns:
        The folder.

    Raises:
        UserError, OSError: If an option is wrong, the run or its data is missing, or the run is of
            another kind; also see `write_results`.
    """
    options, keys = read_words(words, run="", images=300, top_k=COUNTS)
    if not options["run"]:
        raise UserError("key_choice needs a trained model: give --run RUN")
    run = load_run(options["run"])
    attention_layers(run.network)
    task = TASKS[run.recipe.task]
    if task.outputs != ("logits",):
        raise UserError(
            f"--run must be a classifier or a segmenter, {run.source} is of task {task.name!r}"
        )
    counts = options.pop("top_k")
    data = open_data(run.recipe, keys, options["images"])
    subject = Subject(run.network, task, data, partial(swapped, run.network))
    settings = {"experiment": "key_choice", **options, "keys": keys, "seeds": seeds}
    folder = Path(out or "runs/ablate-key_choice")
    return study(folder, settings, subject, FOR_DGT, counts, seeds)


@contextmanager
def swapped(network: nn.Module, answer: Answer) -> Iterator[None]:
    """Context in which `answer` computes the attention of a network's DG-Attention layers."""

    def forward(name: str, layer: DGAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() != 4 or mask is not None:
            raise UserError(
                f"layer {name!r} must get a map (B, H, W, C) without padding, got {tuple(x.shape)}"
            )
        grid = (x.shape[1], x.shape[2])
        given = Operands(name, *layer.split_heads(x), layer.scale, grid, layer.unit_centroids())
        return layer.merge_heads(answer(given), x)

    with ExitStack() as stack:
        for name, layer in attention_layers(network).items():
            stack.enter_context(patch.object(layer, "forward", partial(forward, name, layer)))
        yield


if __name__ == "__main__":
    sys.exit(run_study("key_choice", str(__doc__), key_choice, figure_fixed_weights))
