"""Held-out scenes as an image: the true objects above, those a trained detector finds below.

python benchmarks/scene_detections.py RUN docs/images/detections.jpg [--scenes 4] [--first 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dgt.data.detection import SceneObjects
from dgt.figures.detections import Detections, draw_detections
from dgt.runs import load_run
from dgt.tasks.detect import predict

SIDE, GAP = 400, 6


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenes", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Draw and write the image."""
    options = parse_arguments()
    run = load_run(options.run)
    scenes = SceneObjects("val", options.first + options.scenes, run.recipe.data.image_size)
    sheet = Image.new("RGB", (options.scenes * (SIDE + GAP) - GAP, 2 * SIDE + GAP), "white")
    for column in range(options.scenes):
        image = scenes[options.first + column][0]
        boxes, labels, masks = (
            part.numpy() for part in scenes.objects(options.first + column).values()
        )
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        truth = Detections(boxes, labels - 1, np.ones(len(labels)), masks.astype(bool))
        for row, detections in enumerate((truth, predict(run, pixels, 0).detections)):
            drawn = draw_detections(image, detections, run.class_names)
            place = (column * (SIDE + GAP), row * (SIDE + GAP))
            sheet.paste(drawn.resize((SIDE, SIDE), Image.Resampling.LANCZOS), place)
    sheet.save(options.out, quality=90)


if __name__ == "__main__":
    main()
