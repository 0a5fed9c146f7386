"""The folder of a run: where it is, what is written into it, and the trained models in it opened again.

```
RUN/recipe.yaml           the complete recipe, written before training starts
RUN/metrics.jsonl         loss, learning rate and accuracy by step; events.* hold the same for TensorBoard
RUN/log.txt               a line for each epoch, and for whatever else happened
RUN/status.json           where the training is: `dgt status RUN`
RUN/checkpoints/          best.ckpt and the newest step-*.ckpt, from which a stopped training resumes
RUN/model/                model.safetensors and config.json; a classifier's: timm.create_model("local-dir:RUN/model")
RUN/broken_images.txt     images that could not be read, if there were any
RUN/results.json          metrics, epochs, seconds, seed, versions and the command
```

Weights are read without unpickling code; whatever is wrong with a file is told in a sentence that names it.
"""

from __future__ import annotations

import json
import platform
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dgt import __version__
from dgt.models.heads.backbone import FeatureBackbone
from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun, Prediction
from dgt.tasks.network import ModelSettings, model_arguments
from dgt.tasks.optim import batch_scale
from dgt.training.recipe import Recipe, flatten, load_recipe, parse_recipe
from dgt.training.state import RECORD_KEY, TrainingState, read_checkpoint
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.errors import UserError, check_range
from dgt.utils.records import command_line, processor
from dgt.weights import check_sums
from dgt.weights.folder import SUMS

RECORD_FORMAT = 1
RESULTS = "results.json"
WEIGHT_FILES = ("model/model.safetensors", "model.safetensors", "checkpoints/step-*.ckpt", "checkpoints/best.ckpt")

# What may change between a stop and its resumption; other processes, or fsdp2 or no more, show in the checkpoint.
FREE = re.compile(
    r"name|out|checkpoint\..*|data\.(root|num_workers|cache|max_broken_share)"
    r"|trainer\.(accelerator|devices|num_nodes|strategy|check_val_every|max_skipped|pictures_every|compile)"
)


def run_folder(recipe: Recipe, resume: bool = False) -> Path:
    """The folder that a recipe's run goes to, or with `resume` goes on in: `out`, or runs/NAME.

    Without both, the first of runs/NAME, runs/NAME-2, ... that is free. Raises FileExistsError where it holds files of
    something else, or a checkpoint (with `resume`: of another recipe), and NotADirectoryError as `check_folder`.
    """
    if recipe.out is None and not resume:
        names = (recipe.name + (f"-{number}" if number > 1 else "") for number in count(1))
        return next(folder for name in names if not (folder := Path("runs") / name).exists())
    folder = Path(recipe.out or f"runs/{recipe.name}")
    check_folder(folder)
    found = None
    if any(folder.glob("[!.]*")) and not is_run(folder):  # hidden is what a kill left before the recipe
        found = "holds files that are not a run's"
    elif any((folder / "checkpoints").glob("*.ckpt")) or (folder / RESULTS).exists():
        there, asked = (flatten(each.to_dict()) for each in (load_recipe(folder / "recipe.yaml"), recipe))
        found = None if resume else "holds a run already"
        for key in {**there, **asked} if resume else ():
            if there.get(key) != asked.get(key) and not FREE.fullmatch(key):
                found = f"was begun with {key} {there.get(key)!r}, now {asked.get(key)!r} is asked for"
    if found is not None:
        raise FileExistsError(f"{folder} {found}: give another folder with --out")
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a run's folder; UserError where the file is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def make_record(recipe: Recipe, class_names: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint must hold, beside its weights, to be rebuilt; names in the logits' order."""
    return {"format": RECORD_FORMAT, "recipe": recipe.to_dict(), "class_names": list(class_names)}


def export_model(
    folder: Path, network: nn.Module, record: dict[str, Any], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a trained network, with its `make_record`, as `model.safetensors` and `config.json` into a folder.

    timm opens a classifier's: `create_model("local-dir:FOLDER", pretrained=True)`. `weights` are written in place of
    the network's own.
    """
    config = {**({} if hasattr(network, "backbone") else _timm_config(network, record)), "dgt": record}
    tensors = {key: value.detach().cpu().contiguous() for key, value in (weights or network.state_dict()).items()}
    atomic_write(folder / "model.safetensors", safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)


def _timm_config(network: nn.Module, record: dict[str, Any]) -> dict[str, Any]:
    """What timm's `config.json` says of a classifier."""
    settings, data, names = ModelSettings(**record["recipe"]["model"]), record["recipe"]["data"], record["class_names"]
    size, known = data["image_size"], dict(getattr(network, "pretrained_cfg", None) or {})
    prepared = {key: known[key] for key in ("first_conv", "classifier", "fixed_input_size") if known.get(key)}
    prepared |= {"num_classes": len(names), "input_size": [3, size, size], "crop_pct": data["crop_ratio"]}
    prepared |= {"interpolation": data["augmentation"]["interpolation"], "mean": data["mean"], "std": data["std"]}
    arguments = model_arguments(settings, size)
    return {
        "architecture": settings.name.partition(".")[0],
        "num_classes": len(names),
        "num_features": getattr(network, "num_features", None),
        "label_names": names,
        "model_args": {key: arguments[key] for key in arguments.keys() - {"drop_path_rate", "pretrained"}},
        "pretrained_cfg": prepared,
    }


def results(recipe: Recipe, state: TrainingState) -> dict[str, Any]:
    """What `results.json` says of a finished training."""
    progress = state.progress
    return {
        **{"recipe": recipe.name, "task": recipe.task, "model": recipe.model.name, "seed": recipe.seed},
        **{"metrics": progress.metrics, "best": progress.best, "epochs": progress.epoch, "steps": progress.step},
        **{"seconds": round(progress.seconds, 2), "skipped_steps": progress.skipped},
        **{"global_batch": state.global_batch, "precision": state.fabric.strategy.precision.precision},
        "parameters": sum(parameter.numel() for parameter in state.network.parameters()),
        "learning_rate": recipe.optimizer.lr * batch_scale(recipe.optimizer, state.global_batch),
        "broken_images": sum(len(report) for report in state.data.broken_images.values()),
        **environment(),
    }


def environment() -> dict[str, Any]:
    """Versions, device and the command that started this process, as one would type it again, for `results.json`."""
    threads = "" if torch.cuda.is_available() else f", {torch.get_num_threads()} threads"
    versions = {name: version(name) for name in ("torch", "torchvision", "timm", "lightning")}
    versions = {"python": platform.python_version(), "dynamic-group-transformer": __version__, **versions}
    return {"versions": versions, "device": processor() + threads, "command": command_line()}


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Open a trained model.

    Args:
        path: a `.ckpt` of a training, its run folder (whose finished model is taken, else its last checkpoint), or a
            model folder with `config.json` and `model.safetensors`, ours or a classifier's that timm wrote, or
            transformers of its wrapper of a timm model.
        overrides: changes to its recipe, as on the command line; the network is built for that `data.image_size`.

    Raises FileNotFoundError where nothing is there; UserError for a file that is cut off, not of this package, of
    another model's weights, or, in a folder with SHA256SUMS, of another checksum; as `load_recipe` for overrides.
    """
    source, weights, record = _read(path)
    recipe, names = parse_recipe(record["recipe"], overrides), record["class_names"]
    settings = replace(recipe.model, args={key: each for key, each in recipe.model.args.items() if key != "pretrained"})
    network = TASKS[recipe.task].build(settings, len(names), recipe.data["image_size"])
    _load_weights(network, weights, f"model {recipe.model.name!r}", str(source))
    return LoadedRun(network.eval(), recipe, names, source)


def predict(path: str | Path | LoadedRun, images: Sequence[str | Path], top_k: int = 5) -> list[Prediction]:
    """What a trained model finds in single image files, as its task says.

    Args:
        path: checkpoint, run folder or model folder, or one already loaded.
        images: image files.
        top_k: classes that a classifier gives for each image; more than the model knows gives all.

    Returns one prediction per file, in their order; a file that cannot be read has `error` set and nothing else. Raises
    as `load_run`; UserError for `top_k` below 1.
    """
    check_range(1, top_k=top_k)
    run, found = path if isinstance(path, LoadedRun) else load_run(path), []
    for image in images:
        try:
            found.append(replace(TASKS[run.recipe.task].predict(run, image, top_k), image=str(image)))
        except (FileNotFoundError, ValueError) as error:
            found.append(Prediction(str(image), error=str(error)))
    return found


def initialize(network: nn.Module, path: str | Path) -> None:
    """Take the weights of another run as first weights; a classifier with another number of classes stays as it is.

    A network with a `FeatureBackbone` as its attribute `backbone` takes those of a classifier of that architecture, or
    of a network like itself. Raises as `load_run`; UserError for the weights of another model.
    """
    source, weights, _ = _read(path)
    backbone, name = getattr(network, "backbone", None), "the recipe's model"
    if isinstance(backbone, FeatureBackbone) and not any(key.startswith("backbone.") for key in weights):
        network, name = backbone.model, "the recipe's backbone"
        weights = {key: weights[key] for key in network.state_dict() if key in weights}  # it has no classifier
    heads = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or "head"
    classifier = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    for key, value in network.state_dict().items():
        if key.startswith(classifier) and key in weights and weights[key].shape != value.shape:
            weights[key] = value
    _load_weights(network, weights, name, f"model.init_from: {source}")


def _load_weights(network: nn.Module, weights: Mapping[str, Tensor], name: str, source: str) -> None:
    """Load weights that must fit exactly, or raise UserError with the beginning of what torch says of the others."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        told = textwrap.shorten(str(error), 400)
        raise UserError(f"{source} holds the weights of another model than {name}: {told}") from error


def _read(path: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """File, weights and record of a checkpoint, a run folder or a model folder. Raises as `load_run`."""
    source = _weight_file(Path(path))
    config = source.with_name("config.json")
    weights: Any
    record: Any
    if source.suffix != ".safetensors":
        stored = read_checkpoint(source)
        weights, record = stored.get("state_dict"), stored.get(RECORD_KEY)
    else:
        if (source.parent / SUMS).is_file():
            check_sums(source.parent, (source.name, config.name))
        description = read_json(config)
        try:
            weights = safetensors.torch.load_file(source)
        except SafetensorError as error:
            raise UserError(f"{source} is cut off or damaged ({source.stat().st_size} bytes): {error}") from error
        record = description.get(RECORD_KEY)
        if record is None:  # of timm, or of transformers, which has timm's model inside its own
            weights = {key.removeprefix("timm_model."): value for key, value in weights.items()}
            record = _record_of_timm(config, description)
    whole = isinstance(record, dict) and {"format", "recipe", "class_names"} <= record.keys() and weights is not None
    if not whole or record["format"] != RECORD_FORMAT:
        raise UserError(f"{source} is cut off or damaged, or was not written by `dgt train` of this version")
    return source, weights, record


def _weight_file(path: Path) -> Path:
    """The file with the weights: `path` itself, or that of the folder or `config.json` that it is."""
    path = path.with_name("model.safetensors") if path.name == "config.json" else path
    inside = (found for place in WEIGHT_FILES for found in sorted(path.glob(place), reverse=True))
    found = next(inside, None) if path.is_dir() else path
    if found is None or not found.exists():
        expected = f"expected a file, or a folder with one of {', '.join(WEIGHT_FILES)}"
        raise FileNotFoundError(f"there is no checkpoint, run folder or model folder {str(path)!r}: {expected}")
    return found


def _record_of_timm(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The record of a classifier that timm wrote, or transformers of its wrapper, as `config.json` tells it."""
    prepared = config.get("pretrained_cfg") or config  # timm before 1.0 wrote one level
    architecture, count = config.get("architecture"), prepared.get("num_classes", config.get("num_classes"))
    if not architecture or not count:
        needed = "entry 'dgt' with the recipe, nor 'architecture' and 'num_classes' of a classifier"
        raise UserError(f"{path} was not written by `dgt train` nor by timm: it has no {needed}")
    names = {"crop_ratio": "crop_pct", "mean": "mean", "std": "std"}
    data: dict[str, Any] = {ours: prepared[theirs] for ours, theirs in names.items() if theirs in prepared}
    if "input_size" in prepared:
        data["image_size"] = int(prepared["input_size"][-1])
    if "interpolation" in prepared:
        data["augmentation"] = {"interpolation": prepared["interpolation"]}
    arguments = {key: value for key, value in (config.get("model_args") or {}).items() if key != "num_classes"}
    labels = config.get("label_names")
    labels = labels if isinstance(labels, list) and len(labels) == count else list(map(str, range(count)))
    model = {"name": architecture, "args": arguments}
    recipe = {"name": path.parent.name or architecture, "model": model, "data": data}
    return {"format": RECORD_FORMAT, "recipe": recipe, "class_names": labels}
