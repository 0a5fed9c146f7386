"""Figure 3 of the paper for a trained model: `python benchmarks/photograph_figure.py RUN PHOTO ...`.

A row for each photograph: the photograph, then groups of queries, each in a dashed box with the keys
that it selected; a key is the brighter the more the group's queries attend to it. Photographs are
given to the model whole, `--size` pixels high or wide, whichever is less. Groups are chosen by size
and difference, or named, photograph by photograph: `--groups 3,7,12 0,4,9`. Writes
docs/images/photographs.jpg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from dgt.figures import GroupPanel, choose_groups, figure_groups, raster
from dgt.models import capture
from dgt.models.inspect import LayerInput
from dgt.ops.attention_mass import diagnose_selection, residual_share
from dgt.runs import LoadedRun, load_run

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "photographs.jpg"
STEP = 32  # pixels; sides that the model gets are multiples of it


def panel_of(run: LoadedRun, path: Path, size: int, block: int, head: int) -> GroupPanel:
    """Groups, keys and weights of one head of one block for a photograph."""
    photograph = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    least = min(photograph.size)
    width, height = (max(1, round(side * size / least / STEP)) * STEP for side in photograph.size)
    given = pil_to_tensor(ImageOps.fit(photograph, (width, height), Image.Resampling.BICUBIC))
    data = run.recipe.data
    images = data.normalize(given)[None]
    seen = capture(run.network, images, lambda found: found)[0][block]
    scale = max(1, least // min(width, height))  # the photograph as sharp as it is
    shown = ImageOps.fit(photograph, (scale * width, scale * height), Image.Resampling.BICUBIC)
    return _panel(seen, np.asarray(shown), head)


@torch.no_grad()
def _panel(seen: LayerInput, image: NDArray[np.uint8], head: int) -> GroupPanel:
    layer = seen.layer
    query, key, _ = (tensor[:, head, None] for tensor in layer.split_heads(seen.x))
    _, group_ids, key_ids = (ids[:, head, None] for ids in layer.inspect(seen.x))
    weights = diagnose_selection(query, key, group_ids, key_ids, layer.scale).weights[0, 0]
    members = torch.nn.functional.one_hot(group_ids[0, 0], key_ids.shape[2]).float()
    means = members.T @ weights / members.sum(0).clamp(min=1)[:, None]
    share: Tensor | None = None
    if layer.residual_keys:
        share = residual_share(query, key, group_ids, key_ids, layer.residual_keys, layer.scale)
        share = share[0, 0]
    return GroupPanel(
        image,
        seen.grid or (1, 1),
        group_ids[0, 0],
        key_ids[0, 0],
        key_weights=means.sqrt(),  # as bright as the eye tells apart
        residual_share=share,
    )


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="run folder, folder or name of weights")
    parser.add_argument("photographs", type=Path, nargs="+")
    parser.add_argument("--size", type=int, default=224, help="pixels of the shorter side")
    parser.add_argument("--block", type=int, default=0, help="from 0")
    parser.add_argument("--head", type=int, default=0, help="from 0")
    parser.add_argument("--groups", nargs="+", default=[], help="numbers for each photograph")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.groups and len(options.groups) != len(options.photographs):
        parser.error("--groups must name groups for every photograph, as in 3,7,12 0,4,9")
    return options


def main() -> None:
    """Draw the figure."""
    options = parse()
    run = load_run(options.run)
    panels = []
    for path in options.photographs:
        panels.append(panel_of(run, path, options.size, options.block, options.head))
    if options.groups:
        named = [[int(number) for number in words.split(",")] for words in options.groups]
    else:
        named = [
            choose_groups(panel.group_ids.reshape(panel.grid), panel.key_ids, 3) for panel in panels
        ]
    print(" ".join(",".join(map(str, row)) for row in named))
    raster(figure_groups(panels, named), dpi=230).save(options.out)


if __name__ == "__main__":
    main()
