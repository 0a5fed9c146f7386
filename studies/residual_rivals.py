r"""Approximations of DINOv2-S's attention at equal measured time, on the same queries, keys, and
values.

    python -m studies.residual_rivals --weights dinov2_small.safetensors \
        --photographs A.jpg,B.jpg,C.jpg --out DIR

The model runs on every photograph and size. The inputs of its attention layers are given to
residual keys (`dgt.clustered_attention`) and to eight other methods, each with several settings.
`--what` is one of:

- errors: the relative error of the output of individual layers;
- model: the relative error of the model's tokens, with the same method in all layers, on the first
  photograph at up to 784 px;
- times: the times of individual layers on the first photograph, interleaved, fastest of three;
  needs an idle machine. "ready" is logged when everything has been compiled and called once.
  Nothing else measures time.

Results are saved in DIR; a second call resumes where the first one stopped.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dgt.acceleration.settings import split_budget
from dgt.utils.errors import UserError
from studies import rival_attentions, rival_blocks
from studies.captured_attention import (
    EXACT,
    PATCH,
    Captured,
    attention_as,
    capture,
    load_dinov2,
    middle_of,
    read_photograph,
    to_tensor,
)
from studies.command import read_words, run_study, write_results
from studies.figure_rivals import figure_rivals
from studies.rival_summary import summary

LOGGER = logging.getLogger(__name__)
TURNS = 3
SIZES = (518, 784, 1036)  # sides of the images in pixels
LAYERS = (0, 4, 8, 11)  # whose attention is measured by itself
GLOBAL_LAYERS = (2, 5, 8, 11)  # that stay dense with windows, one in three as in ViTDet
MODEL_SIZE = 784  # px at most, where the whole model is run, on one photograph
WHAT = ("errors", "model", "times")
Content = dict[str, Any]
Setting = dict[str, Any]
Run = tuple[str, Setting, Callable[[], Tensor]]


class Method(NamedTuple):
    """A method, its settings for a number of patches, and whether its time depends on values."""

    attend: Callable[..., Tensor]
    settings: Callable[[int], list[Setting]]
    depends: bool


class Place(NamedTuple):
    """Where something is measured: side of the image in pixels, layer, photograph."""

    size: int
    layer: int
    image: int


def grid_of(**values: tuple[Any, ...]) -> Callable[[int], list[Setting]]:
    """Every combination of the given values, for any number of patches."""
    combinations = [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]
    return lambda _: combinations


def several_budgets(tokens: int) -> list[Setting]:
    """Several budgets split as `dgt.accelerate` does, without and with the first order."""
    found = []
    for share in (0.02, 0.03, 0.05, 0.08, 0.12, 0.2):
        split = split_budget(share, tokens, tokens, has_residual=True)
        counts = {"groups": split.groups, "keys": split.keys, "residual": split.residual_keys}
        found += [{**counts, "first_order": first_order} for first_order in (False, True)]
    return found


ENGINES = ("torch", "native")
RECTANGLES = ([1, 2], [2, 2], [2, 3], [3, 3], [3, 4], [4, 4])  # of patches that one key stands for
METHODS = {  # twelve settings each
    "dense": Method(rival_attentions.dense, grid_of(engine=ENGINES), False),
    "residual keys": Method(rival_attentions.residual_keys, several_budgets, True),
    "one residual key": Method(
        rival_attentions.single_residual_key,
        grid_of(groups=(32, 64, 128, 256), keys=(32, 96, 256)),
        True,
    ),
    "pooled keys": Method(
        rival_attentions.pooled,
        grid_of(
            factor=([2, 1], [1, 3], [3, 2], [5, 5], [6, 6], [8, 8], *RECTANGLES), engine=ENGINES
        ),
        False,
    ),
    "strided keys": Method(
        rival_attentions.strided,
        grid_of(step=RECTANGLES, mean=(False, True), engine=ENGINES),
        False,
    ),
    "merged tokens (ToMe)": Method(
        rival_attentions.merged,
        grid_of(share=(0.75, 0.5, 0.35, 0.25, 0.18, 0.125), queries=(False, True), engine=ENGINES),
        False,
    ),
    "windows": Method(
        rival_attentions.windows,
        grid_of(side=(5, 7, 9, 10, 12, 14, 16, 19, 22, 25, 28, 32), engine=ENGINES),
        False,
    ),
    "blocks (SpargeAttn)": Method(
        rival_blocks.sparge,
        grid_of(mass=(0.1, 0.2, 0.4, 0.6, 0.8, 0.95), likeness=(-1.0, 0.6)),
        True,
    ),
    "blocks of clusters (SVG 2)": Method(
        rival_blocks.clustered_blocks,
        grid_of(clusters=(32, 64), mass=(0.1, 0.2, 0.3, 0.4, 0.6, 0.8)),
        True,
    ),
    "with compensation (SVG-EAR)": Method(
        rival_blocks.compensated_blocks,
        grid_of(clusters=(32, 64), share=(0.05, 0.1, 0.15, 0.2, 0.3, 0.4)),
        True,
    ),
}


def residual_rivals(
    words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None
) -> Path:
    """Measure what is missing; write `residual_rivals.json` and `residual_rivals.md`.

    Args:
        words: `--weights FILE`, `--photographs FILE,FILE`, `--sizes 518,1036` (sides in pixels,
            multiples of a patch), `--layers 0,4`, `--what errors`, `model`, or `times` (all by
            default).
        seeds: unused, since nothing is random.
        out: the folder; None for runs/residual_rivals.

    Returns:
        The folder.

    Raises:
        UserError, OSError: If an option is wrong or a file is missing; also see `write_results`.
    """
    options, keys = read_words(
        words, weights="", photographs="", sizes=SIZES, layers=LAYERS, what=",".join(WHAT)
    )
    check_options(options, keys)
    photographs = [Path(name) for name in options["photographs"].split(",")]
    model = load_dinov2(options["weights"])
    images = [read_photograph(path) for path in photographs]
    settings = {
        "experiment": "residual_rivals",
        "model": "dinov2_small",
        "photographs": [path.name for path in photographs],
        "sizes": list(options["sizes"]),
        "layers": list(options["layers"]),
    }
    find = partial(find_all, model, images, options["what"].split(","), settings)
    folder = Path(out or "runs/residual_rivals")
    return write_results(folder / "residual_rivals.json", settings, find, summary)


def check_options(options: Setting, keys: list[str]) -> None:
    """Raise UserError for invalid options."""
    if keys:
        raise UserError(f"residual_rivals takes no {keys[0]}")
    if not options["photographs"]:
        raise UserError("--photographs must name at least one file, got none")
    if unknown := set(options["what"].split(",")) - set(WHAT):
        raise UserError(f"--what must be of {', '.join(WHAT)}, got {min(unknown)!r}")
    for size in options["sizes"]:
        if size < PATCH or size % PATCH:
            raise UserError(f"--sizes must be multiples of {PATCH}, got {size}")


@torch.inference_mode()
def find_all(
    model: nn.Module, images: list[Any], what: list[str], settings: Setting, content: Content
) -> Iterator[None]:
    """Add the rows that are missing, and yield after each part."""
    for name in WHAT:
        content.setdefault(name, [])
    pixels = {
        (size, number): to_tensor(middle_of(image, size, size))
        for size in settings["sizes"]
        for number, image in enumerate(images)
    }
    layers = tuple(settings["layers"])
    calls = partial(capture_all, model, layers)
    if "errors" in what:
        for (size, number), layer, call in calls(pixels):
            yield from add_errors(content["errors"], Place(size, layer, number), call)
    if "model" in what:
        for (size, number), image in pixels.items():
            if number == 0 and size <= MODEL_SIZE:
                yield from add_model_errors(content["model"], model, image, (size, number))
    if "times" in what:
        first = {place: image for place, image in pixels.items() if place[1] == 0}
        timed = {(size, layer): call for (size, _), layer, call in calls(first)}
        yield from add_times(content["times"], timed)


def capture_all(
    model: nn.Module, layers: tuple[int, ...], images: dict[tuple[int, int], Tensor]
) -> Iterator[tuple[tuple[int, int], int, Captured]]:
    """The attention calls of these layers for all images: place of the image, layer, and call."""
    for place, image in images.items():
        for layer, call in capture(model, image, layers).items():
            yield place, layer, call


def without_engine(settings: list[Setting]) -> list[Setting]:
    """Settings without those that differ only in the engine, which does not affect the error."""
    kept: dict[str, Setting] = {}
    for setting in settings:
        plain = {name: value for name, value in setting.items() if name != "engine"}
        kept.setdefault(json.dumps(plain), plain)
    return list(kept.values())


def runnable(setting: Setting, method: Method, tokens: int) -> Setting:
    """A setting with an engine, if the method has several."""
    engines = any("engine" in one for one in method.settings(tokens))
    return {**setting, "engine": "native"} if engines else setting


def relative_error(found: Tensor, right: Tensor) -> float:
    """|found - right| / |right|."""
    return float((found - right).norm() / right.norm())


def add_errors(rows: list[Setting], place: Place, call: Captured) -> Iterator[None]:
    """The errors of all methods in one layer."""
    tokens = call.grid[0] * call.grid[1]
    here = place._asdict()
    known = {
        json.dumps([row["method"], row["setting"]])
        for row in rows
        if all(row[name] == value for name, value in here.items())
    }
    right = EXACT(call.query, call.key, call.value)
    for name, method in METHODS.items():
        for setting in without_engine(method.settings(tokens)):
            if json.dumps([name, setting]) in known:
                continue
            found = method.attend(call, **runnable(setting, method, tokens))
            error = relative_error(found, right)
            rows.append({**here, "method": name, "setting": setting, "error": error})
    LOGGER.info("errors: %s", place)
    yield


def add_model_errors(
    rows: list[Setting], model: nn.Module, image: Tensor, place: tuple[int, int]
) -> Iterator[None]:
    """The errors of the model's tokens with each method in all layers."""
    features: Callable[[Tensor], Tensor] = model.forward_features  # type: ignore[assignment]
    right = features(image)
    grid = (image.shape[2] // PATCH, image.shape[3] // PATCH)
    tokens, prefix = grid[0] * grid[1], right.shape[1] - grid[0] * grid[1]
    done = {
        json.dumps([row["method"], row["setting"]])
        for row in rows
        if (row["size"], row["image"]) == place
    }
    for name, method in METHODS.items():
        for setting in without_engine(method.settings(tokens)):
            if json.dumps([name, setting]) in done:
                continue
            options = runnable(setting, method, tokens)

            def answer(
                layer: int,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                method: Method = method,
                options: Setting = options,
            ) -> Tensor:
                if method is METHODS["windows"] and layer in GLOBAL_LAYERS:
                    return EXACT(query, key, value)
                return method.attend(Captured(query, key, value, grid, prefix), **options)

            with attention_as(answer):
                error = relative_error(features(image), right)
            size, number = place
            rows.append(
                {"size": size, "image": number, "method": name, "setting": setting, "error": error}
            )
        LOGGER.info("model: %d px, photograph %d, %s", *place, name)
        yield


def add_times(rows: list[Setting], calls: dict[tuple[int, int], Captured]) -> Iterator[None]:
    """Milliseconds of all methods, interleaved, in all layers or, if values do not matter, the first."""
    done = {(row["size"], row["layer"]) for row in rows}
    first = min(layer for _, layer in calls)
    runs = {
        place: runs_of(call, place[1] == first)
        for place, call in calls.items()
        if place not in done
    }
    for called in runs.values():
        warm_up(called)
    LOGGER.info("ready")
    for (size, layer), called in runs.items():
        fastest = [float("inf")] * len(called)
        for _ in range(TURNS):
            for number, (_, _, run) in enumerate(called):
                fastest[number] = min(fastest[number], milliseconds(run))
        for (name, setting, _), ms in zip(called, fastest, strict=True):
            rows.append(
                {"size": size, "layer": layer, "method": name, "setting": setting, "ms": ms}
            )
        LOGGER.info("times: %d px, layer %d", size, layer)
        yield


def runs_of(call: Captured, in_first_layer: bool) -> list[Run]:
    """Every method and setting to time on a call."""
    return [
        (name, setting, partial(method.attend, call, **setting))
        for name, method in METHODS.items()
        if method.depends or in_first_layer
        for setting in method.settings(call.grid[0] * call.grid[1])
    ]


def warm_up(called: list[Run]) -> None:
    """Call every method once so that it is compiled for these shapes."""
    first = {name: run for name, _, run in reversed(called)}
    for run in first.values():
        run()


def milliseconds(run: Callable[[], Any]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(run_study("residual_rivals", str(__doc__), residual_rivals, figure_rivals))
