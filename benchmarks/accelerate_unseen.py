"""Errors of accelerated DINOv2-S on images that chose nothing, one by one: photographs enlarged and at
their native resolution, and pages of text.

    python benchmarks/accelerate_unseen.py --weights dinov2_small.safetensors --size 518 \
        --plan vit_small_patch14_dinov2.lvd142m@518-0.05 \
        --photographs coco=COCO/train2017 imagenette=IMAGENETTE/val \
        --native native=NATIVE --text docs --out accelerate_unseen_518.json

Photographs of `--photographs` are cropped to squares and resized; of those of `--native` squares are
cut out, with as many pixels as the model takes; `--text` renders files as pages. All sets take turns.
Every image is answered by the original attention, whose tokens are kept in `--references`, by the
accelerated model, and, where its guard acts, without the guard. Rows are written as they are done and
are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate_dinov2 import (
    ENDINGS,
    find_photographs,
    open_model,
    read_photograph,
    to_tensor,
    tokens_before,
)
from error_bound_campaign import named_folder, pairs_of
from PIL import Image, ImageDraw, ImageFont
from timm.models import VisionTransformer
from torch import Tensor, nn

import dgt
from dgt.acceleration import AttentionSite, GuardCounts
from dgt.acceleration.bound import relative_error, squares_between
from dgt.acceleration.grouped import take_counts
from dgt.acceleration.guard import MORE_KEYS, num_sampled
from dgt.acceleration.settings import scale_setting
from dgt.utils.records import write_record
from dgt_command.measures import machine

CROPS = 4  # of a photograph at its native resolution
LETTERS = 18  # pixels high


class Unseen(NamedTuple):
    """An image of a set."""

    kind: str
    name: str
    read: Callable[[], Tensor]


def read_native(path: Path, size: int, crop: int) -> Tensor:
    """A square of a photograph at its own resolution, (1, 3, size, size); crops lie in a row."""
    with Image.open(path) as image:
        width, height = image.size
        left = (width - size) * (2 * crop + 1) // (2 * CROPS)
        top = (height - size) // 2
        return to_tensor(image.convert("RGB").crop((left, top, left + size, top + size)))


def is_large(path: Path, size: int) -> bool:
    """Whether a photograph has as many pixels as are cut out."""
    with Image.open(path) as image:
        return min(image.size) >= size


def render_page(path: Path, size: int) -> Tensor:
    """A text file as a page, black on white, (1, 3, size, size)."""
    page = Image.new("RGB", (size, size), "white")
    font = ImageFont.load_default(LETTERS)
    text = path.read_text(encoding="utf-8")
    ImageDraw.Draw(page).multiline_text((LETTERS, LETTERS), text, "black", font, spacing=4)
    return to_tensor(page)


def list_images(options: argparse.Namespace, size: int) -> Iterator[Unseen]:
    """The images of all sets, in turns."""
    sets = []
    for kind, folder in options.photographs:
        paths = find_photographs(folder, options.count)
        sets.append(
            [Unseen(kind, path.stem, partial(read_photograph, path, size)) for path in paths]
        )
    for kind, folder in options.native:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
        paths = [path for path in files if is_large(path, size)]
        sets.append(
            [
                Unseen(kind, f"{path.stem}, {crop}", partial(read_native, path, size, crop))
                for crop in range(CROPS)
                for path in paths
            ]
        )
    if options.text is not None:
        paths = sorted(options.text.glob("*.md"))
        sets.append([Unseen("text", path.stem, partial(render_page, path, size)) for path in paths])
    for turn in itertools.zip_longest(*sets):
        yield from (image for image in turn if image is not None)


def products(
    model: nn.Module, sites: list[AttentionSite], counts: dict[str, GuardCounts]
) -> dict[str, float]:
    """Pairs of a query and a key that attention in groups and its guard took for an image, beside
    dense attention; and the products of all weights with all tokens, as pairs of the same cost.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = parameters * sites[0].tokens / (2 * sites[0].channels)
    taken = {"groups": 0.0, "dense": 0.0, "guard": 0.0, "weights": weights}
    for site in sites:
        done = counts.get(site.title, GuardCounts())
        dense = site.heads * site.tokens * site.key_tokens
        taken["dense"] += dense
        if not done.checked:
            taken["groups"] += dense
            continue
        harder = scale_setting(site.setting, MORE_KEYS, MORE_KEYS)
        looks = num_sampled(site.tokens)
        looks += (done.checked_closely > 0) * num_sampled(site.tokens, closely=True)
        looks += (done.acted > 0) * num_sampled(site.tokens, closely=True)
        taken["groups"] += site.heads * pairs_of(site, site.setting)
        taken["guard"] += site.heads * looks * site.key_tokens
        taken["guard"] += (done.acted > 0) * site.heads * pairs_of(site, harder)
        taken["guard"] += (done.dense > 0) * dense
    return taken


@torch.no_grad()
def measure_image(
    model: VisionTransformer,
    unguarded: VisionTransformer,
    sites: list[AttentionSite],
    image: Tensor,
    kept: Path,
) -> dict[str, Any]:
    """The error of all tokens with the guard and without it, and what the guard did."""
    take_counts(model)
    after = model.forward_features(image)
    counts = take_counts(model)
    before = tokens_before(model, image, kept)
    squares = squares_between([after], [before])
    error = relative_error(squares[None])
    acted = {
        title: "dense" if done.dense else "more keys"
        for title, done in counts.items()
        if done.acted
    }
    alone = error
    if acted:
        without = unguarded.forward_features(image)
        alone = relative_error(squares_between([without], [before])[None])
    return {
        "error": error,
        "squares": squares.tolist(),
        "error_without_guard": alone,
        "acted": acted,
        "checked_closely": sum(done.checked_closely > 0 for done in counts.values()),
        "estimates": [round(done.largest_error, 5) for done in counts.values()],
        "products": products(model, sites, counts),
    }


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="of DINOv2-S")
    parser.add_argument("--size", type=int, required=True, help="pixels per side")
    parser.add_argument("--plan", required=True, help="name or path")
    for name in ("--photographs", "--native"):
        parser.add_argument(name, type=named_folder, nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--text", type=Path, help="folder of Markdown files")
    parser.add_argument("--count", type=int, default=150, help="photographs of a folder")
    parser.add_argument("--out", type=Path, required=True)
    runs = Path("runs/accelerate_dinov2")
    parser.add_argument("--references", type=Path, default=runs, help="folder of original tokens")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Measure the images that are not in the file yet."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    model = open_model(options.weights, options.size)
    unguarded = open_model(options.weights, options.size)
    report = dgt.apply_plan(model, options.plan)
    dgt.apply_plan(unguarded, options.plan, guard=False)
    results = {**machine(), "size": options.size, "report": report.to_json(), "rows": []}
    if options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        if before["report"]["layers"] != results["report"]["layers"]:
            raise SystemExit(f"error: {options.out} was measured with another plan")
        results = before
    done = {(row["set"], row["image"]) for row in results["rows"]}
    for image in list_images(options, options.size):
        if (image.kind, image.name) not in done:
            kept = options.references / f"{options.size}-{image.kind}-{image.name}.pt"
            row = measure_image(model, unguarded, report.layers, image.read(), kept)
            results["rows"].append({"set": image.kind, "image": image.name, **row})
            write_record(options.out, results)
            print(image.kind, image.name, row["error"], row["acted"], flush=True)


if __name__ == "__main__":
    main()
