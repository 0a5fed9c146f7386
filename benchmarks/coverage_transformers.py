"""What `dgt.accelerate` finds in every encoder of images or video that transformers registers.

Each is built small from its own configuration, two layers deep with random weights, and called with one
random image or clip; those that cannot be built so are built whole, without values (the "meta" device).
Nothing is downloaded or measured. Models that take text, too, are left out: their encoders stand in the
registry by themselves.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from coverage_timm import Row, refused, summarize, why_refused
from torch import nn

LAYERS = 2
DEPTHS = ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
STAGES = ("depths", "num_blocks", "layers_per_stage", "blocks_per_stage")
ENCODERS = ("image", "video")
SIDE = 224
FRAMES = 4
LEAST_SIDE, MOST_SIDE = 96, 512
Inputs = dict[str, Any]


def registered() -> dict[str, type[nn.Module]]:
    """Classes of models by their kind in transformers' registry: those that take images or video, and no text."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    found = {}
    for kind, names in {**MODEL_MAPPING_NAMES, **MODEL_FOR_IMAGE_MAPPING_NAMES}.items():
        name = names[0] if isinstance(names, tuple) else names
        try:
            model = getattr(transformers, name)
            modalities = model.input_modalities
        except (AttributeError, ImportError):  # what it needs is not installed
            continue
        words = {modalities} if isinstance(modalities, str) else set(modalities)
        images = "pixel_values" in str(model.main_input_name)
        if words <= set(ENCODERS) or (images and kind in MODEL_FOR_IMAGE_MAPPING_NAMES):
            found[kind] = model
    return found


def shrink(config: Any) -> None:
    """Two layers instead of many, in a configuration and in those inside it."""
    for name in DEPTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(LAYERS, getattr(config, name)))
    for name in STAGES:
        depths = getattr(config, name, None)
        if isinstance(depths, list | tuple) and all(isinstance(depth, int) for depth in depths):
            setattr(config, name, type(depths)(min(LAYERS, depth) for depth in depths))
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            shrink(value)


def number(config: Any, *names: str, default: int) -> int:
    """The first whole number, or the first of a pair, that a configuration has under one of these names."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def side_of(config: Any) -> int:
    """The side of the images that a configuration is for, within reason."""
    for part in (config, getattr(config, "backbone_config", None)):
        side = number(part, "image_size", "crop_size", default=0)
        if side:
            return min(max(side, LEAST_SIDE), MOST_SIDE)
    return SIDE


def image(config: Any) -> Inputs:
    """One image."""
    side, channels = side_of(config), number(config, "num_channels", "in_channels", default=3)
    return {"pixel_values": torch.rand(1, channels, side, side)}


def clip(config: Any) -> Inputs:
    """One clip, under the name that the model has for it."""
    side = side_of(config)
    frames = number(config, "num_frames", "frames_per_clip", default=FRAMES)
    return {"pixel_values": torch.rand(1, frames, 3, side, side)}


def clip_by_name(config: Any) -> Inputs:
    """The same as `pixel_values_videos`."""
    return {"pixel_values_videos": clip(config)["pixel_values"]}


def grid(config: Any, name: str = "hidden_states") -> Inputs:
    """Patches of one image in a row, and its grid, as encoders of language models take them."""
    patch = number(config, "patch_size", default=14)
    values = number(config, "in_channels", "in_chans", "num_channels", default=3) * patch**2
    values *= number(config, "temporal_patch_size", default=1)
    return {name: torch.rand(16 * 16, values), "grid_thw": torch.tensor([[1, 16, 16]])}


def grid_of_pixels(config: Any) -> Inputs:
    """The same under another name."""
    return grid(config, "pixel_values")


def padded(config: Any) -> Inputs:
    """Patches of an image in a padded row, with its shape, as SigLIP 2 takes them."""
    patch = number(config, "patch_size", default=16)
    patches = torch.rand(1, 256, 3 * patch**2)
    mask, shapes = torch.ones(1, 256, dtype=torch.long), torch.tensor([[16, 16]])
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def with_mask(config: Any) -> Inputs:
    """One image, and a mask of its patches."""
    patch = number(config, "patch_size", default=16)
    cells = side_of(config) // patch
    mask = torch.ones(1, cells, cells, dtype=torch.bool)
    return {**image(config), "patch_attention_mask": mask}


def with_size(config: Any) -> Inputs:
    """One image, and its size."""
    side = side_of(config)
    return {**image(config), "image_sizes": torch.tensor([[side, side]])}


FORMS = (image, clip, clip_by_name, grid, grid_of_pixels, padded, with_mask, with_size)


def attempts(model: type[nn.Module]) -> Iterator[tuple[nn.Module, Inputs]]:
    """Models and inputs, the likeliest first: small ones with values, then whole ones without."""
    wanted = inspect.signature(model.forward).parameters
    for device in ("cpu", "meta"):
        config = model.config_class()
        if device == "cpu":
            shrink(config)
        config._attn_implementation = "sdpa"  # what from_pretrained sets for most
        with torch.device(device):
            built = model(config).eval()
        for form in FORMS:
            inputs = form(config)
            if set(inputs) <= set(wanted):
                yield built, {name: value.to(device) for name, value in inputs.items()}


def look(model: type[nn.Module]) -> Row:
    """What is found in one class of models."""
    from dgt.acceleration import inspect_model

    last = "it could not be built from its configuration alone"
    tried: Callable[..., Iterator[tuple[nn.Module, Inputs]]] = attempts
    try:
        for built, inputs in tried(model):
            try:
                return summarize(inspect_model(built, inputs, least_tokens=0))
            except ValueError as error:
                if "must call F.scaled_dot_product_attention" in str(error):
                    return refused(why_refused(built, inputs, error))
                last = "it was not called: inputs of another kind"
    except Exception as error:  # whatever an unusual configuration raises: the table goes on, and says so
        last = f"it could not be built from its configuration alone: {type(error).__name__}"
    return refused(last)


def look_at_transformers() -> Iterator[tuple[str, Row]]:
    """Every encoder, by its kind."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    for kind, model in sorted(registered().items()):
        yield kind, {"class": model.__name__, **look(model)}
