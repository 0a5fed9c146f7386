"""What `dgt.accelerate` finds in every encoder of images or video that transformers registers.

Each is built from its own configuration, but only two layers deep and with random weights, and
called with one random image or clip. Those that cannot be built like that are built whole, without
values (on the "meta" device). Nothing is downloaded or measured. Models that also take text are left
out: their encoders have their own entries in the registry.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from coverage_timm import Row, refused, summarize, why_refused
from torch import nn

LOGGER = logging.getLogger(__name__)
LAYERS = 2
DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "pred_num_hidden_layers",
)
STAGES = ("depths", "num_blocks", "layers_per_stage", "blocks_per_stage")
ENCODERS = ("image", "video")
SIDE = 224
FRAMES = 4
FRAME_COUNTS = ("num_frames", "frames_per_clip")
LEAST_SIDE, MOST_SIDE = 96, 1536
MOST_PARAMETERS = 300e6  # of a model that is built whole, with values
Inputs = dict[str, Any]


@cache
def registered() -> dict[str, type[nn.Module]]:
    """The classes in transformers' registry that take images or video but no text, by kind."""
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
        if name.startswith("Timm"):  # those have a table of their own
            continue
        if words <= set(ENCODERS) or (images and kind in MODEL_FOR_IMAGE_MAPPING_NAMES):
            found[kind] = model
    return found


def limit(config: Any, names: Iterable[str], most: int) -> None:
    """Lower whole numbers of a configuration to a maximum."""
    for name in names:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(most, getattr(config, name)))


def shrink(config: Any) -> None:
    """Lower the depth of a configuration, and of those inside it, to two layers."""
    limit(config, DEPTHS, LAYERS)
    limit(config, FRAME_COUNTS, FRAMES)
    for name in STAGES:
        limit_stages(config, name)
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            shrink(value)


def limit_stages(config: Any, name: str) -> None:
    """Lower a list of depths in a configuration, if it is one, to two layers each."""
    depths = getattr(config, name, None)
    if isinstance(depths, list | tuple) and all(isinstance(depth, int) for depth in depths):
        setattr(config, name, type(depths)(min(LAYERS, depth) for depth in depths))


def number(config: Any, *names: str, default: int) -> int:
    """The first whole number, or first of a pair, that a configuration has under one of some names."""
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
    """A random image."""
    side, channels = side_of(config), number(config, "num_channels", "in_channels", default=3)
    return {"pixel_values": torch.rand(1, channels, side, side)}


def clip(config: Any) -> Inputs:
    """A random clip, as `pixel_values`."""
    side = side_of(config)
    frames = number(config, *FRAME_COUNTS, default=FRAMES)
    return {"pixel_values": torch.rand(1, frames, 3, side, side)}


def clip_by_name(config: Any) -> Inputs:
    """The same as `pixel_values_videos`."""
    return {"pixel_values_videos": clip(config)["pixel_values"]}


def patches(config: Any) -> Inputs:
    """The flattened patches of an image, and its grid, as encoders of language models take them."""
    patch = number(config, "patch_size", default=14)
    values = number(config, "in_channels", "in_chans", "num_channels", default=3) * patch**2
    frames = number(config, "temporal_patch_size", default=1)
    return {
        "hidden_states": torch.rand(16 * 16, values * frames),
        "grid_thw": torch.tensor([[1, 16, 16]]),
    }


def patches_as_pixels(config: Any) -> Inputs:
    """The same under another name."""
    row = patches(config)
    return {"pixel_values": row["hidden_states"], "grid_thw": row["grid_thw"]}


def patches_of_two_frames(config: Any) -> Inputs:
    """The same, two frames deep."""
    row = patches_as_pixels(config)
    return {**row, "pixel_values": row["pixel_values"].repeat(1, 2)}


def square_patches(config: Any) -> Inputs:
    """The same, each patch a small image."""
    patch = number(config, "patch_size", default=14)
    return {
        "pixel_values": torch.rand(16 * 16, 3, patch, patch),
        "grid_thw": torch.tensor([[1, 16, 16]]),
    }


def patches_of_images(config: Any) -> Inputs:
    """The same, the grid under another name."""
    row = patches_as_pixels(config)
    return {"pixel_values": row["pixel_values"], "image_grid_thw": row["grid_thw"]}


def pair(config: Any) -> Inputs:
    """Two images, as matchers take them."""
    one = image(config)["pixel_values"]
    return {"pixel_values": torch.stack([one, one.flip(-1)], dim=1)}


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


FORMS = (
    image,
    clip,
    clip_by_name,
    patches,
    patches_as_pixels,
    patches_of_two_frames,
    square_patches,
    patches_of_images,
    padded,
    with_mask,
    with_size,
    pair,
)
# A device, and whether two layers are enough.
ATTEMPTS = (
    ("cpu", True),
    ("meta", False),
    ("cpu", False),
)


def build(model: type[nn.Module], device: str, small: bool) -> tuple[nn.Module, Any]:
    """A model in evaluation mode, and its configuration."""
    for attention in ("sdpa", "eager"):  # what from_pretrained sets for most; some refuse the first
        config = model.config_class()
        if small:
            shrink(config)
        config._attn_implementation = attention
        try:
            with torch.device(device):
                return model(config).eval(), config
        except (ImportError, ValueError) as refusal:
            if attention == "eager":
                raise
            LOGGER.debug("%s: %s", model.__name__, refusal)
    raise AssertionError("one of two attentions was built or raised")


def look(model: type[nn.Module]) -> Row:
    """What is found in one class of models."""
    reason = "it could not be built from its configuration alone"
    parameters = 0
    for device, small in ATTEMPTS:
        if (device, small) == ("cpu", False) and not 0 < parameters < MOST_PARAMETERS:
            continue
        try:
            built, config = build(model, device, small)
        except Exception as error:  # whatever an unusual configuration raises: try the next way
            LOGGER.debug("%s on %s: %r", model.__name__, device, error)
            continue
        parameters = sum(parameter.numel() for parameter in built.parameters())
        reason = "it was not called: it takes inputs of another kind"
        if (row := look_with_inputs(built, config, device)) is not None:
            return row
    return refused(reason)


def look_with_inputs(built: nn.Module, config: Any, device: str) -> Row | None:
    """What is found with the first inputs that a model takes; None if it takes none of them."""
    from dgt.acceleration import inspect_model

    wanted = inspect.signature(built.forward).parameters
    for form in FORMS:
        inputs = {name: value.to(device) for name, value in form(config).items()}
        if not set(inputs) <= set(wanted):
            continue
        try:
            return summarize(inspect_model(built, inputs, least_tokens=0))
        except Exception as error:  # whatever a model raises for inputs that it does not take
            if "must call F.scaled_dot_product_attention" in str(error):
                return refused(why_refused(built, inputs, error))
            LOGGER.debug("%s with %s: %s", type(built).__name__, form.__name__, error)
    return None


def look_at_encoder(kind: str) -> Row:
    """The row of an encoder in the results."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = registered()[kind]
    return {"class": model.__name__, **look(model)}
