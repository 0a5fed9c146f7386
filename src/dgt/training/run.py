"""The folder of a run: where it is, what is written into it, and the model at its end in timm's own format.

```
RUN/recipe.yaml           the complete recipe, written before training starts
RUN/metrics.jsonl         loss, learning rate and accuracy by step; events.* hold the same for TensorBoard
RUN/log.txt               a line for each epoch, and for whatever else happened
RUN/status.json           where the training is: `dgt status RUN`
RUN/checkpoints/          best.ckpt, last.ckpt and the newest step-*.ckpt, from which a stopped training resumes
RUN/model/                model.safetensors and config.json; a classifier's: timm.create_model("local-dir:RUN/model")
RUN/broken_images.txt     images that could not be read, if there were any
RUN/results.json          metrics, epochs, seconds, seed, versions and the command
```
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dgt.tasks.network import ModelSettings, model_arguments
from dgt.training.recipe import Recipe, flatten, load_recipe
from dgt.training.state import step_checkpoints
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import UserError

RECORD_FORMAT = 1
RESULTS = "results.json"

# What may change between a stop and its resumption: places, speed, and how much is tolerated or looked at.
# A change of the number of processes is found when the checkpoint is opened.
FREE = (
    *("name", "out", "checkpoint", "data.root", "data.num_workers", "data.cache", "data.max_broken_share"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.check_val_every"),
    *("trainer.max_skipped", "trainer.pictures_every", "trainer.compile"),
)


def choose_run_folder(recipe: Recipe, again: bool = False) -> Path:
    """The folder that a recipe's run goes to: `out`, or the first free one of runs/NAME, runs/NAME-2, ...

    Args:
        recipe: the complete recipe.
        again: take runs/NAME, where the same command line will look for the run.

    Raises:
        FileExistsError: `out` names a folder that holds a run already, unless that failed before its first checkpoint,
            or files of something else.
        NotADirectoryError: `out` is a file, or lies below one.
    """
    if recipe.out is None and not again:
        names = (recipe.name + (f"-{number}" if number > 1 else "") for number in count(1))
        return next(folder for name in names if not (folder := Path("runs") / name).exists())
    folder = _own_folder(recipe)
    if any((folder / "checkpoints").glob("*.ckpt")) or (folder / RESULTS).exists():
        raise FileExistsError(f"{folder} holds a run already: give another folder with --out")
    return folder


def run_to_resume(recipe: Recipe) -> Path | None:
    """The folder of the recipe's run (`out`, or runs/NAME), if it holds one that began.

    Raises:
        FileExistsError: the folder holds files of something else, or the run of another recipe.
        NotADirectoryError: `out` is a file.
    """
    folder = _own_folder(recipe)
    if not step_checkpoints(folder) and not (folder / RESULTS).exists():
        return None
    there, asked = (flatten(each.to_dict()) for each in (load_recipe(folder / "recipe.yaml"), recipe))
    for key in sorted({*there, *asked}):
        if there.get(key) != asked.get(key) and not f"{key}.".startswith(tuple(f"{free}." for free in FREE)):
            raise FileExistsError(
                f"{folder} was begun with {key} {there.get(key)!r}, now {asked.get(key)!r} is asked for: give the "
                "same, or another folder with --out"
            )
    return folder


def _own_folder(recipe: Recipe) -> Path:
    folder = Path(recipe.out or f"runs/{recipe.name}")
    check_folder(folder)
    if folder.exists() and any(folder.iterdir()) and not is_run(folder):
        raise FileExistsError(f"{folder} holds files that are not a run's: give another folder with --out")
    return folder


def check_folder(folder: Path) -> None:
    """Raise NotADirectoryError where a file stands in the place of a folder to write, or of one above it."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"out must be a folder, {place} is a file")


def is_run(folder: Path, name: str = "") -> bool:
    """Whether a folder holds the complete recipe that a run writes first, and that has this name, if one is given."""
    recipe = folder / "recipe.yaml"
    return recipe.is_file() and recipe.read_bytes().startswith(f"name: {name}\n".encode() if name else b"name: ")


def finished_results(folder: Path) -> dict[str, Any] | None:
    """What `results.json` of a run says; None where the run is not finished. Raises UserError where it is damaged."""
    return read_json(folder / RESULTS) if (folder / RESULTS).is_file() else None


def read_json(path: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object from a run's folder.

    Raises:
        UserError: the file is damaged, or lacks one of the keys that are `needed`.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    lacking = [key for key in needed if key not in content] if isinstance(content, dict) else ["an object"]
    if lacking:
        raise UserError(f"{path} is damaged: it lacks {', '.join(lacking)}")
    return dict(content)


def make_record(recipe: Recipe, class_names: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint must hold, beside its weights, to be rebuilt: plain values; names in the logits' order."""
    return {"format": RECORD_FORMAT, "recipe": recipe.to_dict(), "class_names": list(class_names)}


def export_model(
    folder: Path, network: nn.Module, record: dict[str, Any], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a trained network as `model.safetensors` and `config.json`.

    timm opens the folder of a classifier: `create_model("local-dir:FOLDER", pretrained=True)`.

    Args:
        folder: where the two files go.
        network: the trained network.
        record: from `make_record`; kept in the file under "dgt".
        weights: its whole state, where the network itself holds a share of it.
    """
    classifier = record["recipe"]["task"] == "classify"
    config = {**(_timm_config(network, record) if classifier else {}), "dgt": record}
    state = network.state_dict() if weights is None else weights
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    atomic_write(folder / "model.safetensors", safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)


def _timm_config(network: nn.Module, record: dict[str, Any]) -> dict[str, Any]:
    """What timm's `config.json` says of a classifier."""
    settings, data = ModelSettings(**record["recipe"]["model"]), record["recipe"]["data"]
    training_only = ("drop_path_rate", "pretrained")
    arguments = model_arguments(settings, data["image_size"])
    known = dict(getattr(network, "pretrained_cfg", None) or {})
    kept = {key: known[key] for key in ("first_conv", "classifier", "fixed_input_size") if known.get(key) is not None}
    return {
        "architecture": settings.name.partition(".")[0],
        "num_classes": len(record["class_names"]),
        "num_features": getattr(network, "num_features", None),
        "label_names": record["class_names"],
        "model_args": {key: value for key, value in arguments.items() if key not in training_only},
        "pretrained_cfg": {
            **kept,
            "num_classes": len(record["class_names"]),
            "input_size": [3, data["image_size"], data["image_size"]],
            "interpolation": data["augmentation"]["interpolation"],
            "crop_pct": data["crop_ratio"],
            "mean": data["mean"],
            "std": data["std"],
        },
    }


def environment() -> dict[str, Any]:
    """Versions, device and the command that started this process, as one would type it again, for `results.json`."""
    packages = ("dynamic-group-transformer", "torch", "torchvision", "timm", "lightning")
    program, info = Path(sys.argv[0]), Path("/proc/cpuinfo")
    script = program.suffix == ".py" and program.name != "__main__.py"
    named = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8") if info.is_file() else "")
    processor = named[1] if named else platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "device": gpu or f"cpu, {torch.get_num_threads()} threads ({processor})",
        "command": shlex.join([*(["python", str(program)] if script else ["dgt"]), *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
