"""A picture of groups of one photograph's keypoints, and of the keys that they select in its copy."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from matplotlib.figure import Figure

from dgt.figures import raster
from dgt.figures.drawing import PAIR_COLORS
from studies.matching.arms import Arm, capture_call, find_lists
from studies.matching.pairs import Array, Pair, describe, load_models, make_pair

PICTURE_POINTS = 2048
PICTURE_LAYER = 4
PICTURE_ARM = Arm("drawn", "groups", 64, 48)
PICTURE_INCHES = 10.0


@torch.inference_mode()
def draw_picture(options: argparse.Namespace) -> None:
    """Draw groups of one photograph's keypoints, and the keys that they select in its warped copy."""
    models = load_models(options.package)
    pair = make_pair(options.photograph, options.seed, True, options.side)
    described = describe(models.features, pair, PICTURE_POINTS)
    call = capture_call(models, described, PICTURE_LAYER)
    lists = find_lists(PICTURE_ARM, call.query, call.key, None)
    members = [lists.group_ids[0, 0] == group for group in options.groups]
    queries = [described.places[0][those].numpy() for those in members]
    keys = [described.places[1][lists.key_ids[0, 0, group]].numpy() for group in options.groups]
    images = (pair.images[0], on_white(pair))
    raster(figure_of_groups(images, queries, keys), dpi=150).save(options.out, quality=90)
    print(options.out, [len(those) for those in queries])


def on_white(pair: Pair) -> Array:
    """The copy of a photograph, white where the photograph does not reach."""
    import cv2

    height, width = pair.images[0].shape[:2]
    everywhere = np.ones((height, width), np.uint8)
    is_covered = cv2.warpPerspective(everywhere, pair.homography, (width, height)) > 0
    white: Array = np.where(is_covered[..., None], pair.images[1], 255)
    return white


def figure_of_groups(
    images: tuple[Array, Array], queries: list[Array], keys: list[Array]
) -> Figure:
    """Two photographs side by side: each group's queries in the first and its keys in the second, (N, 2) in
    pixels, in one color.
    """
    height, width = images[0].shape[:2]
    figure = Figure(figsize=(PICTURE_INCHES, PICTURE_INCHES / 2 * height / width + 0.3))
    for place, (image, sides, title) in enumerate(
        zip(
            images,
            (queries, keys),
            (f"{len(queries)} groups of queries", "their keys"),
            strict=True,
        )
    ):
        axes = figure.add_axes((place * 0.505, 0, 0.495, 1 - 0.3 / figure.get_figheight()))
        gray = image.mean(2, keepdims=True)
        axes.imshow((0.5 * image + 0.5 * gray) / 255)
        axes.set_title(title, fontsize=10, pad=4)
        axes.set_axis_off()
        for color, points in zip(PAIR_COLORS, sides, strict=False):
            axes.scatter(
                points[:, 0], points[:, 1], s=26, color=color, edgecolors="black", linewidths=0.5
            )
    return figure
