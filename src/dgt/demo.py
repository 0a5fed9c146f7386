"""The demo, and the drawing of what a trained model's attention does: the queries of a group and their keys."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from dgt.data.scenes import Scenes
from dgt.figures import GroupPanel, denormalize, figure_group_map, figure_groups, save_figure
from dgt.models import DynamicGroupTransformer, GroupRecord, group_records
from dgt.training import LoadedRun, evaluate, fit, load_recipe, load_run, predict
from dgt.training.evaluate import read_image

SAMPLES = 6


def draw(
    path: str | Path | LoadedRun,
    images: Sequence[str | Path],
    out: str | Path,
    block: int | None = None,
    head: int = 0,
    groups: int = 3,
    as_map: bool = False,
) -> None:
    """Draw the groups of a trained model's queries over images, and the keys that the groups chose.

    Args:
        path: checkpoint, run folder or model folder, or one already loaded.
        images: image files; each gives a row for each block drawn.
        out: PNG, SVG or PDF to write.
        block: which block with dynamic group attention, from 0; None for the last one at each resolution.
        head: attention head, from 0.
        groups: how many groups to show.
        as_map: colour all groups at once instead.

    Raises:
        FileNotFoundError, ValueError: as `load_run`, `read_image` and `save_figure` do; a model without such blocks, a
            block or a head that it does not have.
    """
    run = path if isinstance(path, LoadedRun) else load_run(path)
    panels = [panel for image in images for panel in _panels(run, image, block, head)]
    save_figure(figure_group_map(panels) if as_map else figure_groups(panels, groups), out)


def run(out: str | Path = "runs/demo", seed: int = 0, epochs: int | None = None) -> str:
    """Train the nano model on the built-in scenes, measure it on held-out ones, predict a few and draw its attention.

    Args:
        out: folder to write; an earlier demo in it is replaced.
        seed: seed of the training.
        epochs: passes over the scenes; None for the recipe's.

    Returns:
        What was found and what to look at, as text.

    Raises:
        FileExistsError: the folder holds something other than a demo.
    """
    start = time.perf_counter()
    folder = _clear(Path(out))
    overrides = ["--out", str(folder), "--seed", str(seed), "--name", "demo"]
    overrides += [] if epochs is None else ["--schedule.epochs", str(epochs)]
    recipe = load_recipe("scenes", overrides)
    print(f"training {recipe.model.name} on {recipe.data['train_size']} scenes", flush=True)
    fit(recipe)
    metrics = evaluate(folder)
    images = _write_scenes(folder / "images", recipe.data["image_size"])
    trained = load_run(folder)
    lines = [
        f"\ntop-1 {100 * metrics['top1']:.2f} % on {metrics['images']} held-out scenes, "
        f"{time.perf_counter() - start:.0f} s in all\n"
    ]
    for prediction in predict(trained, images, top_k=1):
        name, score = prediction.classes[0]
        lines.append(f"  {prediction.image}: {name} ({100 * score:.1f} %)")
    draw(trained, images[:4], folder / "groups.png", block=0)
    draw(trained, images[:4], folder / "group_map.png", block=0, as_map=True)
    lines += [
        "\nlook at",
        f"  {folder / 'groups.png'}      groups of queries, and the keys that each group chose",
        f"  {folder / 'group_map.png'}   all groups at once",
        f"  {folder / 'results.json'}    metrics, versions, command",
        f"  tensorboard --logdir {folder}",
    ]
    return "\n".join(lines)


def _panels(run: LoadedRun, image: str | Path, block: int | None, head: int) -> list[GroupPanel]:
    pixels = read_image(run, image)
    if not isinstance(run.network, DynamicGroupTransformer):
        raise ValueError(f"model {run.recipe.model.name!r} has no dynamic group attention to draw")
    records = group_records(run.network, pixels)
    if block is not None and not 0 <= block < len(records):
        raise ValueError(f"block must lie in 0 to {len(records) - 1} for {run.recipe.model.name!r}, got {block}")
    chosen = list({record.grid: record for record in records}.values()) if block is None else [records[block]]
    picture = denormalize(pixels[0], run.recipe.data["mean"], run.recipe.data["std"])
    return [_panel(record, picture, head) for record in chosen]


def _panel(record: GroupRecord, picture: NDArray[Any], head: int) -> GroupPanel:
    group_ids, key_ids = record.attention.group_ids.numpy(), record.attention.key_ids.numpy()
    heads = group_ids.shape[1]
    if not 0 <= head < heads:
        raise ValueError(f"head must lie in 0 to {heads - 1} at block {record.name!r}, got {head}")
    return GroupPanel(picture, record.grid, group_ids[0, head], key_ids[0, head], title=record.name)


def _write_scenes(folder: Path, image_size: int) -> list[Path]:
    """A few scenes of the test split as PNG files, named by their number and class."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes = Scenes("test", SAMPLES, image_size)
    paths = []
    for index in range(SAMPLES):
        scene = scenes[index]
        paths.append(folder / f"{index}_{scenes.class_names[scene.label]}.png")
        Image.fromarray(scene.image.permute(1, 2, 0).numpy()).save(paths[-1])
    return paths


def _clear(folder: Path) -> Path:
    """Remove an earlier demo; refuse to remove anything else."""
    if folder.exists() and any(folder.iterdir()):
        recipe = folder / "recipe.yaml"
        if not recipe.is_file() or not recipe.read_text(encoding="utf-8").startswith("name: demo\n"):
            raise FileExistsError(f"{folder} is not an earlier demo: give another folder with --out")
        shutil.rmtree(folder)
    return folder
