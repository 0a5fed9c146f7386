"""The demo: train on the built-in scenes, evaluate, predict, and draw what the attention does."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from dgt.data.scenes import Scenes
from dgt.runs import Recipe, load_recipe, load_run, predict
from dgt.runs.folder import check_folder, is_run
from dgt.runs.recipe import flatten
from dgt.training import evaluate, fit
from dgt.utils.atomic_write import exclusive_lock
from dgt.utils.errors import UserError
from dgt_command.visualize import View, visualize

SAMPLES = 6
CHOSEN = {"out", "seed", "schedule.epochs"}
"""Keys in which demos differ."""


def run(out: str | Path = "runs/demo", seed: int = 0, epochs: int | None = None) -> str:
    """Train the nano model on the built-in scenes, measure it on held-out ones, predict a few and
    draw its attention.

    Args:
        out: folder to write; an earlier demo in it is replaced.
        seed: of the training.
        epochs: passes over the scenes; None for the recipe's.

    Returns:
        The results and where to look, as text.

    Raises:
        FileExistsError: the folder holds something else.
        NotADirectoryError: `out` is a file.
    """
    start = time.perf_counter()
    folder = Path(out)
    overrides = ["--out", str(folder), "--seed", str(seed), "--name", "demo"]
    overrides += [] if epochs is None else ["--schedule.epochs", str(epochs)]
    recipe = load_recipe("scenes", overrides)
    _clear(folder, recipe)
    print(f"training {recipe.model.name} on {recipe.data.train_size} scenes", flush=True)
    fit(recipe)
    metrics = evaluate(folder)
    images = _write_scenes(folder / "images", recipe.data.image_size)
    trained = load_run(folder)
    summary = f"top-1 {100 * metrics['top1']:.2f} % on {metrics['images']} held-out scenes"
    lines = [f"\n{summary}, {time.perf_counter() - start:.0f} s in total\n"]
    for prediction in predict(trained, images, top_k=1):
        name, score = prediction.classes[0]
        lines.append(f"  {prediction.image}: {name} ({100 * score:.1f} %)")
    visualize([trained], images[:4], folder / "groups.png", View(block=0))
    visualize([trained], images[:4], folder / "group_map.png", View(block=0, as_map=True))
    lines += [
        "\nlook at",
        f"  {folder / 'groups.png'}     query groups and the keys selected for each group",
        f"  {folder / 'group_map.png'}   all groups at once",
        f"  {folder / 'results.json'}    metrics, versions, command",
        f"  tensorboard --logdir {folder}",
    ]
    return "\n".join(lines)


def _write_scenes(folder: Path, image_size: int) -> list[Path]:
    """A few scenes of the test split as PNG files, named by their number and class."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes = Scenes("test", SAMPLES, image_size)
    paths = []
    for index in range(SAMPLES):
        scene = scenes[index]
        paths.append(folder / f"{index}_{scenes.class_names[scene.label]}.png")
        scene.to_pil().save(paths[-1])
    return paths


def _clear(folder: Path, recipe: Recipe) -> None:
    """Remove an earlier demo; refuse to remove anything else."""
    check_folder(folder)
    if any(folder.glob("[!.]*")):
        if not _is_demo(folder, recipe):
            raise FileExistsError(f"{folder} is not a demo run: choose another folder with --out")
        with exclusive_lock(folder):
            pass  # and lets go of its file, which Windows would not remove
        shutil.rmtree(folder)


def _is_demo(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder holds a demo, and not a run of a recipe that only has its name."""
    if not is_run(folder, recipe.name):
        return False
    try:
        before = load_recipe(folder / "recipe.yaml")
    except UserError:  # of another version
        return False
    of_one = (flatten(each.to_dict()) for each in (before, recipe))
    values, expected = ({key: flat[key] for key in flat.keys() - CHOSEN} for flat in of_one)
    return values == expected
