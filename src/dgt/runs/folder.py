"""The folder of a run: where it is and what is written into it.

```
RUN/recipe.yaml           the complete recipe, written before training starts
RUN/metrics.jsonl         loss, learning rate and accuracy by step; events.* hold the same for TensorBoard
RUN/log.txt               a line for each epoch, and for whatever else happened
RUN/status.json           where the training is: `dgt status RUN`
RUN/checkpoints/          best.ckpt and the newest step-*.ckpt, from which a stopped training resumes
RUN/model/                model.safetensors and config.json; a classifier's opens in timm:
                          timm.create_model("local-dir:RUN/model", pretrained=True)
RUN/broken_images.txt     images that could not be read, if there were any
RUN/results.json          metrics, epochs, seconds, seed, versions and the command
```
"""

from __future__ import annotations

import re
from pathlib import Path

from dgt.runs.recipe import Recipe, flatten, load_recipe
from dgt.runs.settings import to_yaml
from dgt.utils.class_names import some

METRICS, RESULTS = "metrics.jsonl", "results.json"

MUTABLE_KEYS = re.compile(
    r"name|out|checkpoint\..*|data\.(root|num_workers|cache|max_broken_share)"
    r"|trainer\.(accelerator|devices|num_nodes|strategy|check_val_every|max_skipped|pictures_every|compile|tracker)"
)
"""Keys of a recipe that may change between a stop and its resumption.

Another number of processes, or a change from or to fsdp2, is refused where the checkpoint is
loaded.
"""


def run_folder(recipe: Recipe, resume: bool = False) -> Path:
    """Choose the folder of a recipe's run, and check that the run may write there.

    Args:
        recipe: the complete recipe.
        resume: continue what an earlier run left in the folder.

    Returns:
        The recipe's `out`, or runs/NAME. Without `out` and `resume`: the first of runs/NAME,
            runs/NAME-2, ... that does not exist.

    Raises:
        FileExistsError: the folder holds other files, a run (without `resume`) or the run of
            another recipe; there are several runs to resume, and `out` does not say which.
        NotADirectoryError: as `check_folder`.
    """
    if recipe.out is None:
        folder = _resumed_folder(recipe.name) if resume else _unused_folder(recipe.name)
    else:
        folder = Path(recipe.out)
    check_folder(folder)
    problem = _conflict(folder, recipe, resume)
    if problem is not None:
        raise FileExistsError(f"{folder} {problem}: choose another folder with --out")
    return folder


def _unused_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that does not exist."""
    folder = Path("runs") / name
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _resumed_folder(name: str) -> Path:
    """runs/NAME; FileExistsError where a run of this name is in runs/NAME-2 or another of these."""
    folder = Path("runs") / name
    numbered = re.compile(rf"{re.escape(folder.name)}-\d+")
    others = sorted(
        str(place)
        for place in folder.parent.glob("*")
        if numbered.fullmatch(place.name) and is_run(place, name)
    )
    if not others:
        return folder
    if is_run(folder):
        others.insert(0, str(folder))
    raise FileExistsError(
        f"`--resume auto` needs --out to say which run of {name} it resumes: {some(others)}"
    )


def _conflict(folder: Path, recipe: Recipe, resume: bool) -> str | None:
    """Why a run of this recipe must not write into an existing folder; None if it may."""
    visible = any(folder.glob("[!.]*"))  # a killed process may leave hidden files before its recipe
    if visible and not is_run(folder):
        return "contains files that do not belong to a run"
    saved = any((folder / "checkpoints").glob("*.ckpt")) or (folder / RESULTS).exists()
    if saved and not resume:
        return "already contains a run"
    # numbers of another training, if a checkpoint of it or not, would be mixed with those of this
    if not saved and not (folder / METRICS).exists():
        return None
    before = flatten(load_recipe(folder / "recipe.yaml").to_dict())
    now = flatten(recipe.to_dict())
    for key in {**before, **now}:
        if before.get(key) != now.get(key) and not MUTABLE_KEYS.fullmatch(key):
            return f"was started with {key} {before.get(key)!r}, but now {key} is {now.get(key)!r}"
    return None


def check_folder(folder: Path) -> None:
    """Raise NotADirectoryError if a file stands in the place of the folder or of one of its
    parents.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"out must be a folder, but {place} is a file")


def is_run(folder: Path, name: str = "") -> bool:
    """Whether a folder holds the recipe that a run writes first, whose keys begin in this order, and no
    recipe of a user's, and, if a name is given, one of that name.
    """
    recipe = folder / "recipe.yaml"
    start = re.escape(to_yaml({"name": name})) if name else r"name: .*\n(  .*\n)*"
    written = re.compile(rf"{start}task: \w+\nseed: \d+\nout: ".encode())
    return recipe.is_file() and written.match(recipe.read_bytes()) is not None
