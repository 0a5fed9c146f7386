"""Opening what a training left behind: a checkpoint, a run's folder, or a model's folder, ours or timm's.

Weights are read without unpickling code (`weights_only=True`, safetensors). Everything that can be wrong with a file is
told in a sentence that names the file: missing, cut off, not of this package, weights of another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dgt.models.heads.backbone import FeatureBackbone
from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun
from dgt.training.recipe import parse_recipe
from dgt.training.run import RECORD_FORMAT
from dgt.training.state import RECORD_KEY, read_checkpoint
from dgt.utils.errors import UserError
from dgt.weights import check_sums
from dgt.weights.folder import SUMS

WEIGHT_FILES = ("model/model.safetensors", "model.safetensors", "checkpoints/last.ckpt", "checkpoints/best.ckpt")
WRAPPER = "timm_model."  # transformers' name for the model inside its own


def load_run(path: str | Path) -> LoadedRun:
    """Open a trained model.

    Args:
        path: a `.ckpt` of a training, its run folder (whose finished model is taken, else its last checkpoint), or a
            model folder with `config.json` and `model.safetensors`, ours or any that timm or transformers wrote.

    Raises:
        FileNotFoundError: nothing there, or a folder that holds neither.
        UserError: a file that is cut off, was not written by this package, or holds another model's weights; one of a
            folder with SHA256SUMS whose checksum is another.
    """
    source, weights, record = _read(path)
    if record.get("format") != RECORD_FORMAT:
        raise UserError(f"{source} has record format {record.get('format')!r}, this version reads {RECORD_FORMAT}")
    if not isinstance(record.get("recipe"), dict) or not record.get("class_names"):
        raise UserError(f"{source} is cut off or damaged: its record lacks the recipe or the names of the classes")
    recipe = parse_recipe(record["recipe"])
    arguments = {key: value for key, value in recipe.model.args.items() if key != "pretrained"}
    settings = replace(recipe.model, args=arguments)
    network = TASKS[recipe.task].build(settings, len(record["class_names"]), recipe.data["image_size"])
    _load_weights(network, weights, f"model {recipe.model.name!r}", source)
    return LoadedRun(network.eval(), recipe, record["class_names"], source)


def initialize(network: nn.Module, path: str | Path) -> None:
    """Take the weights of another run as first weights; a classifier with another number of classes stays as it is.

    A network with a backbone takes those of a classifier of the backbone's architecture, or of a network like itself.

    Args:
        network: a timm model, or a network with a `FeatureBackbone` as its attribute `backbone`; changed in place.
        path: as in `load_run`.

    Raises:
        FileNotFoundError: nothing there.
        UserError: unreadable, or the weights are of another model.
    """
    source, weights, record = _read(path)
    recipe, backbone = record.get("recipe"), getattr(network, "backbone", None)
    of_classifier = isinstance(recipe, dict) and recipe.get("task", "classify") == "classify"
    if isinstance(backbone, FeatureBackbone) and of_classifier:
        missing, _ = backbone.load_classifier(weights)
        if missing:
            raise UserError(
                f"model.init_from: {source} holds the weights of another model than the recipe's backbone: "
                f"{len(missing)} tensors are missing or have another shape, the first: {missing[0]}"
            )
        return
    names = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or "head"
    classifier = tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))
    for key, value in network.state_dict().items():
        if key.startswith(classifier) and key in weights and weights[key].shape != value.shape:
            weights[key] = value
    _load_weights(network, weights, "the recipe's model", source)


def _load_weights(network: nn.Module, weights: Mapping[str, Tensor], name: str, source: Path) -> None:
    """Load weights that must fit exactly, or raise UserError with how many tensors do not, and the first of them."""
    own = network.state_dict()
    shapes = [
        f"{key} is {tuple(weights[key].shape)} in the file and {tuple(own[key].shape)} in the model"
        for key in own
        if key in weights and weights[key].shape != own[key].shape
    ]
    missing = [f"{key} is not in the file" for key in own if key not in weights]
    surplus = [f"{key} is not in the model" for key in weights if key not in own]
    if problems := shapes + missing + surplus:
        raise UserError(
            f"{source} holds the weights of another model than {name}: {len(shapes)} tensors have another shape, "
            f"{len(missing)} are missing, {len(surplus)} are unknown; the first: {problems[0]}"
        )
    network.load_state_dict(dict(weights))


def _read(path: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """File, weights and record of a checkpoint, a run folder or a model folder."""
    source = path = Path(path)
    if path.is_dir():
        found = [path / place for place in WEIGHT_FILES if (path / place).is_file()]
        if not found:
            places = ", ".join(WEIGHT_FILES)
            raise FileNotFoundError(f"the folder {str(path)!r} holds no model: expected one of {places} in it")
        source = found[0]
    elif not path.exists():
        raise FileNotFoundError(f"there is no checkpoint, run folder or model folder {str(path)!r}")
    elif path.name == "config.json":
        source = path.with_name("model.safetensors")
    if source.suffix == ".safetensors":
        return source, *_read_model_folder(source)
    stored = read_checkpoint(source)
    if not isinstance(stored.get(RECORD_KEY), dict):
        raise UserError(f"{source} was not written by `dgt train`: it has no entry 'dgt' with the recipe")
    weights = stored.get("state_dict")
    if not isinstance(weights, dict):
        raise UserError(f"{source} is cut off or damaged: it holds no weights")
    return source, weights, stored[RECORD_KEY]


def _read_model_folder(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config = source.with_name("config.json")
    if not config.is_file():
        raise FileNotFoundError(f"{source} has no config.json beside it, which says what model it is")
    if (source.parent / SUMS).is_file():
        check_sums(source.parent, (source.name, config.name))
    try:
        description = json.loads(config.read_text(encoding="utf-8"))
        weights = safetensors.torch.load_file(source)
    except ValueError as error:
        raise UserError(f"{config} is not the description of a model: {error}") from error
    except SafetensorError as error:
        raise UserError(f"{source} is cut off or damaged ({source.stat().st_size} bytes): {error}") from error
    if not isinstance(description, dict):
        raise UserError(f"{config} is not the description of a model: it holds no object")
    if isinstance(description.get(RECORD_KEY), dict):
        return weights, description[RECORD_KEY]
    weights = {key.removeprefix(WRAPPER): value for key, value in weights.items()}
    return weights, _record_of_timm(config, description)


def _record_of_timm(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The record of a classifier that `timm.models.save_for_hf` or transformers wrote, as far as `config.json` tells:
    the model, its size, and how its images are prepared.
    """
    prepared = config.get("pretrained_cfg") or config  # timm before 1.0 wrote one level
    architecture, count = config.get("architecture"), prepared.get("num_classes", config.get("num_classes"))
    if not architecture or not count:
        raise UserError(
            f"{path} was not written by `dgt train` nor by timm: it has neither an entry 'dgt' with the recipe nor "
            "'architecture' and 'num_classes' of a classifier"
        )
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
