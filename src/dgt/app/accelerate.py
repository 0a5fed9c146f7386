"""`dgt accelerate`: choose by a folder of images how a model's attention is done in groups, and keep the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from dgt.acceleration import Report, accelerate
from dgt.data.image_io import decode_image
from dgt.utils.errors import LOGGER, UserError

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}


def accelerate_model(name: str, images: str | Path, error: float, size: int | None, count: int) -> Report:
    """Accelerate a timm model, by name with its pretrained weights or from a folder that timm opens.

    Args:
        name: what `timm.create_model` knows, or a folder with `config.json` and `model.safetensors`.
        images: folder of image files, searched through; the later half is kept aside to measure the error.
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
    model = _open(name, size).eval()
    config = timm.data.resolve_model_data_config(model)
    if size is not None:
        config["input_size"] = (3, size, size)
    transform = timm.data.create_transform(**config, is_training=False)
    step = max(1, len(files) // count)  # from all over the folder, since neighbours are often alike
    taken = []
    for path in files[::step][:count]:
        try:
            taken.append(transform(decode_image(path)))
        except UserError as broken:
            LOGGER.warning("%s is left out: %s", path, broken)
    if len(taken) < 2:
        raise UserError(f"--images must hold at least 2 images that can be read, {str(images)!r} has {len(taken)}")
    try:
        return accelerate(model, torch.stack(taken), error)
    except (AssertionError, RuntimeError) as failed:
        shape = " x ".join(str(length) for length in taken[0].shape)
        raise UserError(f"model {name!r} fails on images of {shape}: {failed}") from failed


def _open(name: str, size: int | None) -> nn.Module:
    local = Path(name).is_dir()
    if not local and not timm.is_model(name.partition(".")[0]):
        raise UserError(f"model must be a timm model or a folder that timm opens, got {name!r}")
    sized: dict[str, Any] = {"img_size": size}
    for more in (sized, {}) if size is not None else ({},):  # a model of any size takes no such argument
        try:
            model: nn.Module = timm.create_model(f"local-dir:{name}" if local else name, pretrained=True, **more)
            return model
        except TypeError:
            continue
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"model {name!r} cannot be loaded: {error}") from error
    raise UserError(f"model {name!r} cannot be built")
