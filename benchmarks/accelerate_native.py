"""The promise of `dgt.accelerate` on photographs at their own resolution: DINOv2-S, fresh searches.

    apt-get download enlightenment-data lxqt-themes palapeli-data plasma-workspace-wallpapers
    for package in *.deb; do dpkg-deb -x $package PACKAGES; done
    python benchmarks/accelerate_native.py --weights dinov2_small.safetensors --packages PACKAGES \
        --size 1036 --error 0.05 --out accelerate_native_1036.json

The weights are those of `accelerate_dinov2.py`. Of 37 photographs in Debian's packages, none of which
has chosen a constant or a plan, a dozen drawn at random choose settings, through `dgt.accelerate`
itself; of each of the others squares are cut out with as many pixels as the model takes, nothing is
scaled, and the error of each square is measured. The search is kept beside the results, so the same
command goes on where it was ended; with `--squares 0` it ends after the search.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from accelerate_dinov2 import open_model, to_tensor
from accelerate_unseen import measure_image
from PIL import Image
from torch import Tensor

import dgt
from dgt.acceleration.bound import relative_error
from dgt.utils.records import write_record
from dgt_command.measures import machine

PLASMA = "usr/share/wallpapers/{}/contents/images/2560x1600.jpg"
PHOTOGRAPHS = {  # of Debian 12, by where a package has them
    PLASMA: (
        *("BytheWater", "ColdRipple", "ColorfulCups", "DarkestHour", "EveningGlow"),
        *("FallenLeaf", "Grey", "Kite", "OneStandsOut", "summer_1am"),
    ),
    "usr/share/lxqt/wallpapers/{}": (
        *("Butterfly-Kenneth-Wimer.jpg", "Valendas.png", "after-the-rain.jpg", "appleflower.png"),
        *("beam.png", "butterfly.png", "cloud.png", "drop.png", "flowers.png", "fog.jpg"),
        "this-is-not-windows.jpg",
    ),
    "usr/share/palapeli/collection/{}.jpg": ("european-honey-bee", "panther-chameleon-female"),
    "usr/share/enlightenment/data/backgrounds/{}.edj": (
        *("Bamboo", "Foggy-Trees", "God-Rays", "Green-Maple", "Lichen-Branches", "Mountain"),
        *("Peaks", "Red-Maple", "Sea-of-Lanterns", "Snow-Trees", "Spruce-Needles"),
        *("Sunset-Clouds", "White-Flower", "Yellow-Flower"),
    ),
}
CHOOSING = 12
START_OF_JPEG = b"\xff\xd8\xff"


def open_photograph(path: Path) -> Image.Image:
    """A photograph in RGB; of a theme of Enlightenment, which holds one in several sizes, the largest."""
    if path.suffix != ".edj":
        return Image.open(path).convert("RGB")
    content = path.read_bytes()
    found = []
    start = content.find(START_OF_JPEG)
    while start >= 0:
        with contextlib.suppress(OSError):  # three bytes that start no image
            found.append(Image.open(io.BytesIO(content[start:])))
        start = content.find(START_OF_JPEG, start + 1)
    return max(found, key=lambda image: image.width).convert("RGB")


def cut(photograph: Image.Image, size: int, square: int, squares: int) -> Tensor:
    """One of some squares of a photograph that lie in a row, (1, 3, size, size), without scaling."""
    left = (photograph.width - size) * (2 * square + 1) // (2 * squares)
    top = (photograph.height - size) // 2
    return to_tensor(photograph.crop((left, top, left + size, top + size)))


def draw(packages: Path, seed: int) -> tuple[list[Path], list[Path]]:
    """The photographs that choose settings, and the others."""
    paths = [
        packages / place.format(name) for place, names in PHOTOGRAPHS.items() for name in names
    ]
    random.Random(seed).shuffle(paths)
    return paths[:CHOOSING], paths[CHOOSING:]


def search(options: argparse.Namespace, plan: Path) -> dict[str, Any]:
    """Choose settings and keep them; what the results begin with."""
    choosing, _ = draw(options.packages, options.seed)
    model = open_model(options.weights, options.size)
    images = [cut(open_photograph(path), options.size, 0, 1) for path in choosing]
    report = dgt.accelerate(model, torch.cat(images), error=options.error)
    report.save(plan)
    print(report, flush=True)
    return {
        **machine(),
        "size": options.size,
        "seed": options.seed,
        "chosen_by": [path.relative_to(options.packages).as_posix() for path in choosing],
        "report": report.to_json(),
        "rows": [],
    }


def summary(rows: list[dict[str, Any]], report: dict[str, Any]) -> dict[str, Any]:
    """What all squares together and single ones have, beside what was told."""
    errors = [row["error"] for row in rows]
    return {
        "together": relative_error(torch.tensor([row["squares"] for row in rows])),
        "largest": max(errors),
        "above": sum(error > report["asked_error"] for error in errors),
        "above_single_error_95": sum(error > report["single_error_95"] for error in errors),
    }


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="of DINOv2-S")
    parser.add_argument("--packages", type=Path, required=True, help="folder of unpacked packages")
    parser.add_argument("--size", type=int, required=True, help="pixels per side")
    parser.add_argument("--error", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--squares", type=int, default=2, help="of each photograph")
    parser.add_argument("--out", type=Path, required=True)
    runs = Path("runs/accelerate_native")
    parser.add_argument("--kept", type=Path, default=runs, help="folder of plans and tokens")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Search, unless that was done, and measure the squares that are not in the file yet."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    options.kept.mkdir(parents=True, exist_ok=True)
    plan = options.kept / f"{options.out.stem}.plan.json"
    if options.out.is_file():
        results = json.loads(options.out.read_text(encoding="utf-8"))
    else:
        results = search(options, plan)
        write_record(options.out, results)
    model = open_model(options.weights, options.size)
    unguarded = open_model(options.weights, options.size)
    report = dgt.apply_plan(model, plan)
    dgt.apply_plan(unguarded, plan, guard=False)
    done = {(row["photograph"], row["square"]) for row in results["rows"]}
    _, others = draw(options.packages, options.seed)
    for place, path in enumerate(others):
        name = path.relative_to(options.packages).as_posix()
        for square in range(options.squares):
            if (name, square) in done:
                continue
            image = cut(open_photograph(path), options.size, square, options.squares)
            tokens = options.kept / f"{options.size}-{place}-{square}.pt"
            found = measure_image(model, unguarded, report.layers, image, tokens)
            results["rows"].append({"photograph": name, "square": square, **found})
            results["found"] = summary(results["rows"], results["report"])
            write_record(options.out, results)
            print(name, square, found["error"], found["acted"], flush=True)


if __name__ == "__main__":
    main()
