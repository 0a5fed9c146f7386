"""Do like attend to like? The paper's Figure 3 shows one picture; this measures it for a trained model.

The figure's groups hold the queries of a bird, of branches, and of the background, and are said to
attend to the keys of the bird, the branches, and the background. A token's label is that of most of
its pixels. For every DG-Attention layer, as fractions of its labeled queries:

- pure: those with the majority label of their group (one of them if labels tie); the same for
  random groups of the same sizes, and for patches of neighbors, about as many as groups (a square
  number);
- like: the fraction of a query's labeled keys that have its own label: among its group's keys, as
  many in a window around it, all keys weighted by global attention, and as many at random;

and far: the mean distance in tokens from a query to its group's keys, compared with that to any
    token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from dgt.data.coco import CocoImages, draw_masks
from dgt.data.image_io import BrokenImage
from dgt.data.scenes import Scenes
from dgt.data.segmentation import fitting_size
from dgt.data.transforms import Normalize
from dgt.models.inspect import LayerInput, capture
from dgt.runs import load_run
from dgt.runs.recipe import parse_recipe
from dgt.tasks import TASKS
from dgt.utils.errors import UserError, check_range
from dgt.utils.records import markdown_table, number
from studies.command import run_study
from studies.fixed_weights import open_data
from studies.key_selectors import nearest
from studies.report import read_words, write_results

NAME = "like_to_like"
AT_ONCE = 512  # queries whose attention to all tokens is held in memory at once
Labeled = tuple[list[str], Iterator[tuple[Tensor, Tensor]]]
SHARES = {  # of queries, or of their keys: table headers
    "pure": "pure groups, %",
    "random_pure": "drawn groups",
    "patch_pure": "patches",
    "like": "like among the group's keys, %",
    "window": "in a window",
    "attention": "by global attention",
    "random": "at random",
}


def like_to_like(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """Measure, unless the folder has the results, and write `like_to_like.json` and `like_to_like.md`.

    Args:
        words: `--run RUN`, a classifier of scenes, a segmenter, or with `--coco DIR` any
            classifier, on COCO's validation images cut to `--size` pixels (224); `--images N` at
            most (256); `--data.KEY VALUE`.
        seeds: how often groups of random queries are drawn.
        out: the folder, which is returned; None for runs/ablate-like_to_like.

    Raises UserError or OSError for wrong options, a missing run or data, a run without
    DG-Attention, or images without label maps; also see `CocoImages` and :func:`write_results`.
    """
    options, keys = read_words(words, run="", images=256, coco="", size=224)
    if not options["run"]:
        raise UserError(f"{NAME} needs a trained model: give --run RUN")
    check_range(1, seeds=seeds, images=options["images"], size=options["size"])

    def find(content: dict[str, Any]) -> Iterator[None]:
        if "rows" not in content:
            content["rows"] = _measure_run(options, keys, seeds)
            yield

    path = Path(out or f"runs/ablate-{NAME}", f"{NAME}.json")
    settings = {"keys": keys, "seeds": seeds}
    return write_results(path, {"experiment": NAME, **options, **settings}, find, markdown)


def _measure_run(options: dict[str, Any], keys: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """One row per layer of a run, over its images."""
    run = load_run(options["run"])
    if options["coco"]:
        names, pairs = _coco(options["coco"], options["size"], run.recipe, keys, options["images"])
    else:
        names, pairs = _labeled(run.recipe, keys, options["images"])
    layers: dict[str, dict[str, Any]] = {}
    for image, labels in pairs:
        look = partial(measure, labels=labels, count=len(names), seeds=seeds)
        for name, found in capture(run.network, image, look)[0]:
            _add_to(layers.setdefault(name, {}), found)
    return [_row(name, sums, names) for name, sums in layers.items()]


def _add_to(sums: dict[str, Any], found: dict[str, Any]) -> None:
    """Add tensors to the previous sums; everything else is the same for every image."""
    for name, value in found.items():
        sums[name] = sums.get(name, 0) + value if isinstance(value, Tensor) else value


def _labeled(recipe: Any, keys: Sequence[str], images: int) -> Labeled:
    """Names of labels, and normalized images (1, 3, H, W) with label maps (H', W'), 255 for no label."""
    data = parse_recipe(recipe.to_dict(), keys).data
    task = TASKS[recipe.task]
    # for a classifier, whose data has no label maps
    if not task.has_backbone and data["dataset"] == "scenes":
        scenes, normalize = (
            Scenes("val", images, data["image_size"]),
            Normalize(data["mean"], data["std"]),
        )
        drawn = (scenes[i] for i in range(images))
        return ["background", "object"], (
            (normalize(s.image)[None], (s.label_map > 0).long()) for s in drawn
        )
    if not task.has_label_maps:
        expected = "a classifier of scenes or a segmenter, or --coco DIR be given"
        raise UserError(f"--run must be {expected}, got one of task {recipe.task!r}")
    module = open_data(recipe, keys, images)
    return list(module.class_names), _scaled(module.val_dataloader(), tuple(data["scale"]))


def _scaled(
    batches: Iterable[tuple[Tensor, Tensor]], scale: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of batches, one by one, scaled to fit, with their label maps."""
    for batch, maps in batches:
        for image, labels in zip(batch, maps, strict=True):
            size = fitting_size((image.shape[1], image.shape[2]), scale)
            scaled = F.interpolate(image[None], size, mode="bilinear", antialias=True)
            yield scaled, labels.long()


def _coco(root: str, size: int, recipe: Any, keys: Sequence[str], images: int) -> Labeled:
    """The same for COCO's validation images, cropped to squares; the smallest object gives the label."""
    if TASKS[recipe.task].has_backbone or keys:
        raise UserError(
            f"--coco is for a classifier, and takes no --data keys; got task {recipe.task!r}, keys {keys}"
        )
    coco = CocoImages(Path(root, "annotations", "instances_val2017.json"), Path(root, "val2017"))
    cut = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
    normalize = Normalize(recipe.data["mean"], recipe.data["std"])

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(min(images, len(coco))):
            sample = coco[index]
            if isinstance(sample, BrokenImage):
                continue
            label_map = _label_map(coco, sample[1], sample[0].size[::-1])
            image, labels = cut(tv_tensors.Image(sample[0]), tv_tensors.Mask(label_map))
            yield normalize(image.as_subclass(Tensor))[None], labels[0].as_subclass(Tensor).long()

    return ["background", *coco.class_names], pairs()


def _label_map(coco: CocoImages, image_id: int, size: tuple[int, ...]) -> Tensor:
    """(1, H, W): 0, the number of an object's category, 255 in a crowd; the smallest object wins."""
    labels = torch.zeros(1, *size)
    entries = sorted(coco.by_image[image_id], key=lambda entry: -entry["area"])
    masks = torch.from_numpy(draw_masks(entries, *size))
    for entry, mask in zip(entries, masks, strict=True):
        category = 1 + coco.category_ids.index(entry["category_id"])
        labels[:, mask > 0] = 255 if entry["iscrowd"] else category
    return labels


def measure(seen: LayerInput, labels: Tensor, count: int, seeds: int) -> tuple[str, dict[str, Any]]:
    """For one layer and image: sums over queries and heads by label, (count,), distances, and sizes.

    ``labels`` is int64 (H, W), ``count`` or above for no label. Raises UserError if the tokens are
    not on a grid.
    """
    if seen.grid is None or seen.prefix:
        raise UserError(
            f"the tokens of layer {seen.name!r} must lie on a grid, got {tuple(seen.x.shape)}"
        )
    pixels = F.one_hot(labels.clamp(max=count), count + 1).permute(2, 0, 1).float()
    token = F.one_hot(F.adaptive_avg_pool2d(pixels, seen.grid).flatten(1).argmax(0), count + 1)[
        :, :count
    ].float()
    _, group_ids, key_ids = (part[0] for part in seen.layer.inspect(seen.x))
    query, key, _ = (part[0] for part in seen.layer.split_heads(seen.x))  # (H, L, D)
    heads, tokens = group_ids.shape
    of_group = _shares(token, key_ids).gather(1, group_ids[..., None].expand(-1, -1, count))
    mixed = [
        group_ids[:, torch.randperm(tokens, generator=torch.Generator().manual_seed(s))]
        for s in range(seeds)
    ]
    sums: dict[str, Any] = {"queries": heads * token.sum(0), "like": (of_group * token).sum((0, 1))}
    sums |= {
        "pure": _pure(token, group_ids),
        "random_pure": sum(_pure(token, ids) for ids in mixed) / seeds,
    }
    sums["patch_pure"] = heads * _pure(token, _patches(seen.grid, key_ids.shape[1])[None])
    sums["random"] = token.mean(0) / token.mean(0).sum().clamp(min=1e-9) * sums["queries"]
    sums["window"] = heads * (_shares(token, nearest(seen.grid, key_ids.shape[2])) * token).sum(0)
    attend = partial(
        F.scaled_dot_product_attention,
        key=key,
        value=token.expand(heads, -1, -1),
        scale=seen.layer.scale,
    )
    mass = torch.cat([attend(part) for part in query.split(AT_ONCE, 1)], 1)
    sums["attention"] = (F.normalize(mass, 1, -1) * token).sum((0, 1))
    places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float32) for side in seen.grid))
    between = torch.cdist(places, places)
    sums["far"] = torch.stack(
        [between.gather(1, k[g]).mean() for k, g in zip(key_ids, group_ids, strict=True)]
    ).mean()
    sums |= {"anywhere": between.mean(), "images": torch.ones(())}
    return seen.name, {
        **sums,
        "tokens": tokens,
        "top_k": key_ids.shape[2],
        "groups": key_ids.shape[1],
    }


def _patches(grid: tuple[int, int], count: int) -> Tensor:
    """(L,): the patch of each token; the number of patches is a square near ``count``."""
    side = round(count**0.5)
    row, column = (torch.arange(length) * side // length for length in grid)
    return (row[:, None] * side + column).flatten()


def _shares(token: Tensor, ids: Tensor) -> Tensor:
    """Fractions of labels among the labeled tokens in lists: (..., K) ids to (..., labels)."""
    found = token[ids].sum(-2)
    return found / found.sum(-1, keepdim=True).clamp(min=1)


def _pure(token: Tensor, group_ids: Tensor) -> Tensor:
    """(labels,): how many queries with each label are in a group with that majority label.

    In a tie each label counts in part.
    """
    counts = F.one_hot(group_ids).float().transpose(1, 2) @ token  # (H, G, labels)
    return (counts * F.normalize((counts == counts.amax(-1, keepdim=True)).float(), 1, -1)).sum(
        (0, 1)
    )


def _row(name: str, sums: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Means over all queries and by label."""
    queries = sums["queries"]
    row = {
        "layer": name,
        **{key: sums[key] for key in ("tokens", "groups", "top_k")},
        "images": int(sums["images"]),
    }
    row |= {key: float(sums[key].sum() / queries.sum()) for key in SHARES}
    row |= {key: float(sums[key] / sums["images"]) for key in ("far", "anywhere")}
    shares = {**{key: sums[key] / queries for key in SHARES}, "share": queries / queries.sum()}
    there = [(i, label) for i, label in enumerate(names) if queries[i] > 0]
    return row | {
        "by_label": {label: {key: float(of[i]) for key, of in shares.items()} for i, label in there}
    }


def markdown(content: dict[str, Any]) -> str:
    """One line per layer; for the first layer, also one per label."""
    rows = content["rows"]
    units = {**dict.fromkeys(SHARES, 100), "far": 1, "anywhere": 1}
    heads = [[str(row[key]) for key in ("layer", "tokens", "top_k")] for row in rows]
    table = [
        head + [number(row[key], 1, units[key]) for key in units]
        for head, row in zip(heads, rows, strict=True)
    ]
    text = markdown_table(["layer", "tokens", "k", *SHARES.values(), "far", "anywhere"], table)
    cells = [
        [name, *(number(of[k], 1, 100) for k in ("share", *SHARES))]
        for name, of in rows[0]["by_label"].items()
    ]
    return f"{text}\n{markdown_table([rows[0]['layer'], 'share, %', *SHARES.values()], cells)}"


if __name__ == "__main__":
    sys.exit(run_study(NAME, str(__doc__), like_to_like))
