"""`dgt accelerate`: choose by a folder of images how a model's attention is done in groups, and keep the plan."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from torch import nn

from dgt.acceleration import Report, accelerate
from dgt.data.image_io import decode_image
from dgt.utils.errors import LOGGER, UserError

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
LOADING = (OSError, RuntimeError, ValueError, LookupError, ImportError, SafetensorError, TypeError, AttributeError)


def accelerate_model(name: str, images: str | Path, error: float, size: int | None, count: int) -> Report:
    """Accelerate a model of timm or transformers, by name with its pretrained weights or from a folder.

    Args:
        name: what `timm.create_model` knows, a name with a slash on Hugging Face's hub, or a folder of either library
            with `config.json` and `model.safetensors`. Of a model of images and text the images' half is taken.
        images: folder of image files, searched through; one in four is kept aside to measure the error.
        error: relative error of the model's output.
        size: side of the images in pixels; None for the model's own.
        count: images to use at most.

    Raises:
        UserError: the model cannot be had or takes no such size, or fewer than two images can be read; the files
            that cannot are left out, with a warning.
    """
    files = sorted(path for path in Path(images).rglob("*") if path.suffix.lower() in ENDINGS)
    if len(files) < 2:
        raise UserError(f"--images must be a folder with at least 2 image files, {str(images)!r} has {len(files)}")
    model, config = _open(name, size)
    options = config.pop("options", {})
    transform = timm.data.create_transform(**config, is_training=False)
    taken = []
    number = min(count, len(files))
    for path in (files[at * len(files) // number] for at in range(number)):  # from all over: neighbours are often alike
        try:
            taken.append(transform(decode_image(path)))
        except UserError as broken:
            LOGGER.warning("%s is left out: %s", path, broken)
    if len(taken) < 2:
        raise UserError(f"--images must hold at least 2 images that can be read, {str(images)!r} has {len(taken)}")
    pixels = torch.stack(taken)
    return accelerate(model.eval(), {"pixel_values": pixels, **options} if options else pixels, error)


def check_places(places: dict[str, str | None]) -> None:
    """Refuse what cannot be written, by the option that names it, before the minutes that the rest takes: UserError."""
    for option, path in ((option, Path(place)) for option, place in places.items() if place is not None):
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            why = "it is a folder" if path.is_dir() else f"no file can be made in {str(above)!r}"
            raise UserError(f"{option} {str(path)!r} cannot be written: {why}")
        if option == "--plot" and path.suffix not in (".png", ".pdf", ".svg"):
            raise UserError(f"--plot must end in .png, .pdf or .svg, got {str(path)!r}")


def _open(name: str, size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and what timm's transforms are made of; with it `options`, for a call by names."""
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None and not timm.is_model(name.partition(".")[0]) and name.count("/") != 1:
        raise UserError(f"model must be one of timm, ORGANISATION/NAME of transformers or a folder, got {name!r}")
    try:
        file = folder / "config.json" if folder else Path(hf_hub_download(name, "config.json")) if "/" in name else None
        own = json.loads(file.read_text(encoding="utf-8")) if file else {"architecture": name}
        if "model_type" in own or "architecture" not in own:  # transformers' TimmWrapperModel has both
            return _open_transformers(name, size)
        source = f"local-dir:{name}" if folder else f"hf-hub:{name}" if file else name
        sized: dict[str, Any] = {"img_size": size}
        for more in (sized, {}) if size is not None else ({},):  # a model of any size takes no such argument
            try:
                model: nn.Module = timm.create_model(source, pretrained=True, **more)
            except TypeError:
                continue
            config = timm.data.resolve_model_data_config(model)
            return model, config if size is None else {**config, "input_size": (3, size, size)}
    except LOADING as error:
        raise UserError(f"model {name!r} cannot be loaded: {error}") from error
    raise UserError(f"model {name!r} cannot be built")


def _open_transformers(name: str, size: int | None) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    kinds = transformers.AutoConfig.from_pretrained(name).architectures or [""]
    model = getattr(transformers, kinds[0], transformers.AutoModel).from_pretrained(name)
    model = model.vision_model if hasattr(model, "text_model") else model
    configs = (model.config, getattr(model.config, "backbone_config", None))
    own = next((found for config in configs if (found := getattr(config, "image_size", None))), 224)
    height, width = (size, size) if size else (own, own) if isinstance(own, int) else own
    config: dict[str, Any] = {"input_size": (3, height, width), "crop_pct": 1.0, "interpolation": "bicubic"}
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name)
        normalises = getattr(processor, "do_normalize", True)
        mean, std = (processor.image_mean, processor.image_std) if normalises else ((0.0,) * 3, (1.0,) * 3)
        config |= {"mean": tuple(mean), "std": tuple(std)}
    except (OSError, ValueError, AttributeError, TypeError):
        LOGGER.warning("%s has no processor of images: they are normalised as ImageNet's", name)
    if size and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        config["options"] = {"interpolate_pos_encoding": True}
    return model, config
