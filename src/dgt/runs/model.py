"""Trained models as files: written when a training ends, and opened again by every other command.

Weights are read without unpickling code; any problem with a file raises a one-sentence error that
names it.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors.torch
from safetensors import SafetensorError
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from dgt.layers import DGAttention
from dgt.models.heads.backbone import FeatureBackbone
from dgt.models.heads.hub import OF_FIRST_WEIGHTS, HubModel
from dgt.models.inspect import different_residual_keys
from dgt.runs.checkpoints import RECORD_KEY, evaluated_weights, read_checkpoint
from dgt.runs.recipe import Recipe, changes_of, flatten, parse_recipe
from dgt.tasks import TASKS
from dgt.tasks.base import LoadedRun
from dgt.tasks.network import check_input_size, model_arguments
from dgt.utils.atomic_write import atomic_write, write_json
from dgt.utils.class_names import are_numbers, comparable, some
from dgt.utils.errors import LOGGER, UserError
from dgt.utils.json_files import read_json
from dgt.weights import check_sums, list_weights
from dgt.weights.folder import SUMS

RECORD_FORMAT = 1
RECORD_ENTRIES = {"format", "recipe", "class_names"}
WEIGHT_FILES = (
    "model/model.safetensors",
    "model.safetensors",
    "pytorch_model.bin",  # what timm's `save_for_hf` writes
    "checkpoints/step-*.ckpt",
    "checkpoints/best.ckpt",
)
# names of position embeddings and of biases by position in timm's models
POSITIONS = re.compile("pos_embed|position_embed|rel_pos|relative_position_bias")
CUT_BY = (
    "image_size",
    "crop_ratio",
    "augmentation.interpolation",
    "bits",
)  # how images are made, beside their scale
NO_MODEL_ARGUMENTS = ("drop_path_rate", *OF_FIRST_WEIGHTS)  # of training alone
# entries of timm's configuration that we pass on
KEPT_CONFIG = ("first_conv", "classifier", "fixed_input_size")


def make_record(recipe: Recipe, class_names: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint holds beside its weights, to be rebuilt: recipe, and class names in the order of the logits."""
    return {"format": RECORD_FORMAT, "recipe": recipe.to_dict(), "class_names": list(class_names)}


def export_model(
    folder: Path,
    network: nn.Module,
    record: dict[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a trained network as `model.safetensors` and `config.json` into a folder.

    timm opens a classifier's folder: `create_model("local-dir:FOLDER", pretrained=True)`; others
    are opened by `dgt.models.UperNet.from_pretrained` and `PaddedMaskRCNN.from_pretrained`.

    Args:
        folder: made if it is missing.
        network: the trained network.
        record: its `make_record`.
        weights: written in place of the network's own.
    """
    config = (
        network.hub_config() if isinstance(network, HubModel) else _timm_config(network, record)
    )
    tensors = _separate_tensors(weights or network.state_dict())
    atomic_write(
        folder / "model.safetensors", safetensors.torch.save(tensors, metadata={"format": "pt"})
    )
    write_json(folder / "config.json", {**config, RECORD_KEY: record})


def _separate_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU of which no two share memory, as weights that layers have in common do:
    the format has no shared ones, and whoever reads it expects every name.
    """
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for key, value in state.items():
        tensor = value.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        tensors[key] = tensor.clone() if place in places else tensor
        places.add(place)
    return tensors


def _timm_config(network: nn.Module, record: dict[str, Any]) -> dict[str, Any]:
    """What timm's `config.json` says of a classifier."""
    recipe = parse_recipe(record["recipe"])
    data: Any = recipe.data
    names = record["class_names"]
    size = data.image_size
    known = dict(getattr(network, "pretrained_cfg", None) or {})
    arguments = model_arguments(recipe.model, size)
    return {
        "architecture": recipe.model.name.partition(".")[0],
        "num_classes": len(names),
        "num_features": getattr(network, "num_features", None),
        "label_names": names,
        "model_args": {
            key: value for key, value in arguments.items() if key not in NO_MODEL_ARGUMENTS
        },
        "pretrained_cfg": {
            **{key: known[key] for key in KEPT_CONFIG if known.get(key)},
            "num_classes": len(names),
            "input_size": [3, size, size],
            "crop_pct": data.crop_ratio,
            "interpolation": data.augmentation.interpolation,
            "mean": data.mean,
            "std": data.std,
        },
    }


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Open a trained model.

    Args:
        path: a `.ckpt` of a training; a run folder, of which the finished model is taken, else the
            last checkpoint; a model folder with `config.json` and `model.safetensors` (or
            `pytorch_model.bin`, read without its code), of this package, of a classifier that timm
            wrote, or of transformers' wrapper of a timm model; or, where no such file is, the name
            of weights, `dgt_nano.imagenette`.
        overrides: changes to its recipe, as on the command line; the network is built for that
            `data.image_size`.

    Returns:
        The network in evaluation mode on the CPU, with its recipe and class names.

    Raises:
        FileNotFoundError: nothing is there.
        UserError: the file is cut off, was not written by this package, or holds another model's
            weights; in a folder with SHA256SUMS, a checksum is wrong; or an override is refused.

    Example:
        >>> from dgt.runs import load_run
        >>> run = load_run("runs/scenes")  # doctest: +SKIP
        >>> run.network(images).argmax(1)  # doctest: +SKIP
    """
    source, weights, record = _read(path)
    recipe = parse_recipe(record["recipe"], overrides)
    names = record["class_names"]
    network = TASKS[recipe.task].build(recipe.model.untrained(), len(names), recipe.data.image_size)
    _load_weights(network, weights, f"model {recipe.model.name!r}", str(source), record)
    _compare_residual_keys(network, record, str(source))
    if "data.image_size" in changes_of(overrides) and not TASKS[recipe.task].has_backbone:
        side = recipe.data.image_size
        check_input_size(network, recipe.model.name, side, side)
    return LoadedRun(network.eval(), recipe, names, source)


def initialize(
    network: nn.Module, path: str | Path, class_names: Sequence[str], task: str = "classify"
) -> Recipe:
    """Take the weights of another run as first weights; of its last layers, the rows of the classes
    that both have, by name. The log says how many these are.

    A network with a backbone takes the weights of a classifier of that architecture, or of a
    network like itself.

    Args:
        network: changed in place.
        path: as `load_run` takes it.
        class_names: of the network's classes. Weights without names of classes are taken in order,
            if they are as many.
        task: what the network is for, a key of `TASKS`.

    Returns:
        The recipe that the weights were trained by.

    Raises:
        FileNotFoundError, UserError: as `load_run`.
        UserError: these are the weights of another model.
    """
    source, weights, record = _read(path)
    name = "the recipe's model"
    before = parse_recipe(record["recipe"])
    new_task, old_task = TASKS[task], TASKS[before.task]
    if new_task.has_backbone and not old_task.has_backbone:
        network = cast(FeatureBackbone, network.backbone).model
        name = "the recipe's backbone"
        # it has no classifier
        weights = {key: weights[key] for key in network.state_dict() if key in weights}
    else:
        layers = new_task.class_layers or _classifier_layers(network)
        _match_rows(weights, network.state_dict(), layers, record["class_names"], class_names)
    _load_weights(network, weights, name, f"model.init_from: {source}", record)
    _compare_residual_keys(network, record, f"model.init_from: {source}")
    return before


def pretraining(network: nn.Module) -> Recipe:
    """How images were prepared for the weights that timm has of a classifier, or of the backbone of
    another network, as a recipe.
    """
    backbone = getattr(network, "backbone", None)
    timms: Any = backbone.model if isinstance(backbone, FeatureBackbone) else network
    prepared = dict(timms.pretrained_cfg)
    if prepared.get("crop_pct", 0) > 1:  # of few, with a black border, which no recipe has
        del prepared["crop_pct"]
    return parse_recipe({"data": _data_of_timm(prepared)})


def compare_preparation(recipe: Recipe, before: Recipe, source: str) -> None:
    """Compare how a recipe prepares images with how they were prepared for its first weights; the log
    says what differs: a warning for another mean or deviation, which gives images another scale.

    Args:
        recipe: of the training.
        before: of the weights.
        source: where these come from, for messages.
    """
    now, then = _normalization(recipe), _normalization(before)
    if not all(map(math.isclose, [*now[0], *now[1]], [*then[0], *then[1]])):
        place = "data." if hasattr(recipe.data, "mean") else "model.head.options.image_"
        LOGGER.warning(
            f"{source} saw images of mean {list(then[0])} and std {list(then[1])}, here they are "
            f"{list(now[0])} and {list(now[1])}, another scale for these weights: set {place}mean and "
            f"{place}std to theirs"
        )
    was, is_now = (flatten(each.to_dict()["data"]) for each in (before, recipe))
    both = [key for key in CUT_BY if key in was and key in is_now]
    if others := [
        f"data.{key} {was[key]}, here {is_now[key]}" for key in both if was[key] != is_now[key]
    ]:
        LOGGER.info(f"{source} saw images with {'; '.join(others)}")


def _normalization(recipe: Recipe) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation of the images of a recipe; detectors have them in their head."""
    options = recipe.model.head.get("options") or {}
    mean = getattr(recipe.data, "mean", options.get("image_mean", IMAGENET_MEAN))
    return mean, getattr(recipe.data, "std", options.get("image_std", IMAGENET_STD))


def _classifier_layers(network: nn.Module) -> tuple[str, ...]:
    """Names of the last layers of a classifier of timm."""
    config = getattr(network, "pretrained_cfg", None) or {}
    names = config.get("classifier") or "head"
    return (names,) if isinstance(names, str) else tuple(names)


def _match_rows(
    weights: dict[str, Tensor],
    initial: Mapping[str, Tensor],
    layers: Sequence[str],
    before: Sequence[str],
    now: Sequence[str],
) -> None:
    """Put the rows of last layers in the order of other classes, in place; those of new classes are
    the network's own.
    """
    before_keys, now_keys = comparable(before, now)
    if before_keys == now_keys:
        return
    both = [key for key in now_keys if before_keys.count(key) == now_keys.count(key) == 1]
    if are_numbers(before) and len(before) == len(now) and not set(before_keys) & set(now_keys):
        LOGGER.warning(
            f"model.init_from has no names for its {len(before)} classes: they are taken in order as "
            f"{some(now)}"
        )
        return
    for key, value in initial.items():
        if key in weights and key.startswith(tuple(f"{layer}." for layer in layers)):
            weights[key] = _rows_by_name(weights[key], value, before_keys, now_keys, both)
    LOGGER.info(
        f"model.init_from knows {len(both)} of the {len(now)} classes: {some(both)}; the last layer "
        "of the others begins anew"
    )


def _rows_by_name(
    trained: Tensor, initial: Tensor, before: Sequence[str], now: Sequence[str], both: Sequence[str]
) -> Tensor:
    """A weight or bias with a row for each class, or a row for the background and several for each
    class; any other is the network's own where its shape differs.
    """
    for background, rows in ((0, 1), (1, 1), (1, 4)):
        sizes = (rows * (len(before) + background), rows * (len(now) + background))
        if (len(trained), len(initial)) == sizes and trained.shape[1:] == initial.shape[1:]:
            taken = initial.clone().unflatten(0, (-1, rows))
            given = trained.unflatten(0, (-1, rows))
            taken[:background] = given[:background]
            for name in both:
                taken[background + list(now).index(name)] = given[
                    background + list(before).index(name)
                ]
            return taken.flatten(0, 1)
    return trained if trained.shape == initial.shape else initial


def _compare_residual_keys(network: nn.Module, record: dict[str, Any], source: str) -> None:
    """Warn where a network attends to more or fewer residual keys than its weights were trained with.

    No weight tells: they fit any number.
    """
    arguments = record["recipe"].get("model", {}).get("args", {})
    before = arguments.get("residual_keys", 0)
    layers = [layer for layer in network.modules() if isinstance(layer, DGAttention)]
    now = max((layer.residual_keys for layer in layers), default=before)
    if now != before:
        LOGGER.warning(different_residual_keys(source, before, now))


def _load_weights(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    name: str,
    source: str,
    record: Mapping[str, Any],
) -> None:
    """Load weights that must fit exactly, but for position embeddings of another image size; else
    raise UserError with the beginning of what torch reports.
    """
    fitting = _resampled(network, weights)
    size = record["recipe"].get("data", {}).get("image_size")
    if changed := [key for key, value in fitting.items() if value is not weights[key]]:
        LOGGER.info(
            f"{source} was trained with data.image_size {size}: its position embeddings are "
            f"resampled ({some(changed)})"
        )
    try:
        network.load_state_dict(fitting)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 400)
        hint = ""
        if fitting.keys() == network.state_dict().keys():
            hint = f"; they were trained with data.image_size {size}, which may be what differs"
        raise UserError(
            f"{source} contains the weights of a model other than {name}: {reason}{hint}"
        ) from error


def _resampled(network: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights with the position embeddings of a model of timm resampled to its image size, as timm
    does it; all others, and those that timm cannot resample, as they are.
    """
    different = [
        key
        for key, value in network.state_dict().items()
        if POSITIONS.search(key) and key in weights and weights[key].shape != value.shape
    ]
    if not different:
        return weights
    resample = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    try:
        filtered = {} if resample is None else resample(dict(weights), network)
    except (RuntimeError, ValueError, AssertionError):  # of weights of another architecture
        return weights
    taken = {key: filtered.get(key, weights[key]) for key in different}
    if (grid := getattr(getattr(network, "patch_embed", None), "grid_size", None)) is not None:
        shapes = {key: value.shape for key, value in network.state_dict().items()}
        for key, value in taken.items():
            prefix = shapes[key][1] - math.prod(grid) if value.dim() == 3 else -1
            if value.shape != shapes[key] and prefix >= 0:
                taken[key] = resample_abs_pos_embed(value, list(grid), num_prefix_tokens=prefix)
    return {**weights, **taken}


def _read(path: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """File, weights and record of a checkpoint, a run folder or a model folder.

    Raises as `load_run`.
    """
    source = weight_file(path)
    weights: Any
    record: Any
    if source.suffix in (".safetensors", ".bin"):
        weights, record = _read_model_folder(source)
    else:
        stored = read_checkpoint(source)
        weights = evaluated_weights(stored)
        record = stored.get(RECORD_KEY)
    complete = isinstance(record, dict) and record.keys() >= RECORD_ENTRIES and weights is not None
    if not complete or record["format"] != RECORD_FORMAT:
        raise UserError(
            f"{source} is truncated or damaged, or was not written by this version of `dgt train`"
        )
    return source, weights, record


def _read_model_folder(source: Path) -> tuple[dict[str, Tensor], Any]:
    """Weights and record of a file of weights alone and the `config.json` beside it."""
    config = source.with_name("config.json")
    if (source.parent / SUMS).is_file():
        check_sums(source.parent, (source.name, config.name))
    description = read_json(config)
    weights = read_checkpoint(source) if source.suffix == ".bin" else _read_safetensors(source)
    # transformers copies our entry, even for other classes
    if RECORD_KEY in description and "transformers_version" not in description:
        return weights, description[RECORD_KEY]
    # Written by timm, or by transformers, which has timm's model inside its own
    weights = {key.removeprefix("timm_model."): value for key, value in weights.items()}
    return weights, _record_of_timm(config, description)


def _read_safetensors(source: Path) -> dict[str, Tensor]:
    """The tensors of a file, or UserError."""
    try:
        # by a path, it would read no folder whose name is not UTF-8
        return safetensors.torch.load(source.read_bytes())
    except SafetensorError as error:
        raise UserError(
            f"{source} is truncated or damaged ({source.stat().st_size} bytes): {error}"
        ) from error


def weight_file(path: str | Path) -> Path:
    """The file with the weights: `path` itself, or that of the folder, `config.json` or name of
    weights that it is. FileNotFoundError where nothing is there.
    """
    path = Path(path)
    if not path.exists():
        path = list_weights().get(str(path), path)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        if path.exists():
            return path
    else:
        for pattern in WEIGHT_FILES:
            newest_first = sorted(path.glob(pattern), reverse=True)
            if newest_first:
                return newest_first[0]
    expected = f"expected a file, a folder with one of {', '.join(WEIGHT_FILES)}"
    expected += f", or the name of weights, {', '.join(list_weights())}"
    raise FileNotFoundError(
        f"there is no checkpoint, run folder or model folder {str(path)!r}: {expected}"
    )


def _record_of_timm(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The record of a classifier that timm wrote, or transformers for its wrapper of timm, from
    `config.json`.
    """
    prepared = config.get("pretrained_cfg") or config  # timm before 1.0 wrote one level
    architecture = config.get("architecture")
    count = prepared.get("num_classes", config.get("num_classes"))
    if not architecture or not count:
        needed = "entry 'dgt' with the recipe, nor 'architecture' and 'num_classes' of a classifier"
        raise UserError(
            f"{path} was written neither by `dgt train` nor by timm: it has no {needed}"
        )
    arguments = dict(config.get("model_args") or {})
    arguments.pop("num_classes", None)
    channels, *sides = prepared.get("input_size", (3,))
    if (arguments.get("in_chans", channels), *sides[1:]) != (3, *sides[:1]):
        raise UserError(
            f"{path} is for images of {prepared['input_size']}: only squares of 3 channels are read"
        )
    if prepared.get("crop_mode", "center") != "center":
        LOGGER.warning(
            f"{path} has crop_mode {prepared['crop_mode']!r}: here the middle of images is cut out"
        )
    labels = config.get("label_names")
    if not isinstance(labels, list) or len(labels) != count:
        labels = [str(index) for index in range(count)]
    recipe = {
        "name": path.parent.name or architecture,
        "model": {"name": architecture, "args": arguments},
        "data": _data_of_timm(prepared),
    }
    return {"format": RECORD_FORMAT, "recipe": recipe, "class_names": labels}


def _data_of_timm(prepared: dict[str, Any]) -> dict[str, Any]:
    """Settings of the data, from the part of timm's configuration on the preparation of images."""
    names = {"crop_ratio": "crop_pct", "mean": "mean", "std": "std"}
    data: dict[str, Any] = {
        ours: prepared[theirs] for ours, theirs in names.items() if prepared.get(theirs) is not None
    }
    if "input_size" in prepared:
        data["image_size"] = int(prepared["input_size"][-1])
    if "interpolation" in prepared:
        data["augmentation"] = {"interpolation": prepared["interpolation"]}
    return data
