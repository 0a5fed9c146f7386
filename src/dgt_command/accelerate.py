"""`dgt accelerate`: accelerate a model with grouped attention, using a folder of images, and save the plan."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from torch import nn

from dgt.acceleration import Report, accelerate
from dgt.data.folders import image_files
from dgt.data.image_io import decode_image, note_on_bits
from dgt.tasks.network import nearest_models
from dgt.utils.atomic_write import check_writable
from dgt.utils.errors import LOGGER, UserError
from dgt.utils.hub import check_on_hub

LOADING = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    ImportError,
    SafetensorError,
    TypeError,
    AttributeError,
)


def accelerate_model(
    name: str, images: str | Path, error: float, size: int | None, count: int
) -> Report:
    """Accelerate a model of timm or transformers, by name with its pretrained weights or from a folder.

    Args:
        name: what `timm.create_model` knows, a name with a slash on Hugging Face's hub, or a folder
            of either library with `config.json` and `model.safetensors`. Of a model of images and
            text the images' half is taken.
        images: folder of image files, searched through; one in four is held out to measure the
            error.
        error: relative error of the model's output.
        size: side of the images in pixels; None for the model's own.
        count: images to use at most.

    Returns:
        The plan, with what was measured.

    Raises:
        UserError: the model cannot be had or takes no such size, the folder is not there, or fewer
            than two images can be read; the files that cannot are left out, with a warning.
    """
    if not Path(images).is_dir():
        raise UserError(f"--images {images}: there is no such file or folder")
    files = image_files(images)
    if len(files) < 2:
        raise UserError(
            f"--images must be a folder with at least 2 image files, but {str(images)!r} has {len(files)}"
        )
    source = _open(name, size)
    transform = timm.data.create_transform(**source.config, is_training=False)
    number = min(count, len(files))
    # spread out: neighbors are often similar
    spread = [files[at * len(files) // number] for at in range(number)]
    for note in note_on_bits(spread.__getitem__, number, None, images):
        LOGGER.warning(note)
    tensors = []
    for path in spread:
        try:
            tensors.append(transform(decode_image(path)))
        except UserError as broken:
            LOGGER.warning("skipping %s: %s", path, broken)
    if len(tensors) < 2:
        raise UserError(
            f"--images must contain at least 2 readable images, but {str(images)!r} has {len(tensors)}"
        )
    pixels = torch.stack(tensors)
    inputs = {"pixel_values": pixels, **source.options} if source.options else pixels
    return accelerate(source.model.eval(), inputs, error)


def check_places(places: dict[str, str | None]) -> None:
    """Reject output files that cannot be written before the slow part starts.

    Args:
        places: file by option; None where the option is not given.

    Raises:
        UserError: a file cannot be written; the message names the option.
    """
    for option, place in places.items():
        if place is None:
            continue
        check_writable(place, option)
        if option == "--plot" and Path(place).suffix not in (".png", ".pdf", ".svg"):
            raise UserError(f"--plot must end in .png, .pdf or .svg, got {place!r}")


class OpenedModel(NamedTuple):
    """A pretrained model, how its images are prepared, and arguments of its forward beside them, by
    name.
    """

    model: nn.Module
    config: dict[str, Any]
    options: dict[str, Any]


def _open(name: str, size: int | None) -> OpenedModel:
    """Open a model of timm or transformers. Raises as `accelerate_model`."""
    folder = Path(name) if Path(name).is_dir() else None
    on_hub = folder is None and name.count("/") == 1
    if folder is None and not on_hub and not timm.is_model(name.partition(".")[0]):
        raise UserError(
            "model must be a timm model, ORGANIZATION/NAME of a transformers model, or a folder, "
            f"got {name!r}; {nearest_models(name.partition('.')[0])}"
        )
    try:
        if folder is not None:
            config = _read_config(folder / "config.json")
            source = f"local-dir:{name}"
        elif on_hub:
            check_on_hub("cannot read a model from", name, "model")
            config = _read_config(hf_hub_download(name, "config.json"))
            source = f"hf-hub:{name}"
        else:
            config = {"architecture": name}
            source = name
        # transformers' TimmWrapperModel has both
        if "model_type" in config or "architecture" not in config:
            return _open_transformers(name, size)
        return _open_timm(source, size)
    except ModuleNotFoundError:
        raise  # transformers, an extra
    except LOADING as error:
        raise UserError(f"model {name!r} cannot be loaded: {error}") from error


def _read_config(path: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return config


def _open_timm(source: str, size: int | None) -> OpenedModel:
    """A model of timm, built for the given size if it needs one."""
    if size is None:
        model = timm.create_model(source, pretrained=True)
        return OpenedModel(model, timm.data.resolve_model_data_config(model), {})
    try:
        model = timm.create_model(source, pretrained=True, img_size=size)
    except TypeError:  # a model of any size takes no such argument
        model = timm.create_model(source, pretrained=True)
    config = {**timm.data.resolve_model_data_config(model), "input_size": (3, size, size)}
    return OpenedModel(model, config, {})


def _open_transformers(name: str, size: int | None) -> OpenedModel:
    """A model of transformers, with its own preparation of images."""
    import transformers

    kinds = transformers.AutoConfig.from_pretrained(name).architectures or [""]
    model = getattr(transformers, kinds[0], transformers.AutoModel).from_pretrained(name)
    if hasattr(model, "text_model"):
        model = model.vision_model
    height, width = (size, size) if size else _image_size(model.config)
    config: dict[str, Any] = {
        "input_size": (3, height, width),
        "crop_pct": 1.0,
        "interpolation": "bicubic",
    }
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name)
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        if getattr(processor, "do_normalize", True):
            mean, std = tuple(processor.image_mean), tuple(processor.image_std)
        config |= {"mean": mean, "std": std}
    except (OSError, ValueError, AttributeError, TypeError):
        LOGGER.warning(
            "%s has no image processor: images are normalized with ImageNet's mean and std", name
        )
    options = {}
    if size and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        options["interpolate_pos_encoding"] = True
    return OpenedModel(model, config, options)


def _image_size(config: Any) -> tuple[int, int]:
    """Height and width of the images that a model of transformers was trained on; 224 where it does not say."""
    for source in (config, getattr(config, "backbone_config", None)):
        size = getattr(source, "image_size", None)
        if size:
            return (size, size) if isinstance(size, int) else tuple(size)
    return (224, 224)
