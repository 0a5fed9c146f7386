"""Which models `dgt.accelerate` can group, and which have exact attention at once: timm's pretrained
ones, and the encoders of transformers.

    python benchmarks/accelerate_coverage.py [--only 'vit_small*'] [--again] [--out FILE]

Architectures of timm are built without values (on the "meta" device) and called once at their own
size. Encoders of images or video that transformers registers are built two layers deep with random
weights, and called with one random image or clip; those that cannot be built like that are built
whole, without values. Models that also take text are left out: their encoders have their own entries
in the registry. No weights are downloaded, and nothing is timed: an attention counts as one that can
be grouped however few tokens it has.

What the file has from the same versions is kept; `--again` inspects everything again, which takes an
hour of one core.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import dgt
from dgt.acceleration.calls import PAIRS
from dgt.acceleration.decomposed_bias import DecomposedAttention
from dgt.acceleration.intercept import installed_processors, uninstall_processors
from dgt.utils.errors import UserError
from dgt.utils.records import write_record

# Architectures of timm

Row = dict[str, Any]
SOFTMAX = ("softmax", "_softmax")
LEAST_KEYS = 16  # a softmax over fewer is not over tokens, but over branches or channels
OWN = "a softmax of its own, not F.scaled_dot_product_attention"
NONE = "no attention found"
FOR_DENSE_KERNEL = ("", PAIRS, "a bias per key")
"""Why attention cannot be grouped that exact attention takes nevertheless."""


class SoftmaxCounter(TorchFunctionMode):
    """Counts softmax over the last dimension of matrices: attention without PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in SOFTMAX and isinstance(found, torch.Tensor):
            matrices = found.dim() >= 3 and min(found.shape[-2:]) >= LEAST_KEYS
            self.count += matrices
        return found


def summarize(model: nn.Module, rows: Any) -> Row:
    """Rows of `inspect_model` as a row of the results."""
    reasons = [reason_of(row) for row in rows]
    found = {
        "attentions": len(rows),
        "grouped": sum(not reason for reason in reasons),
        "tokens": max(row.tokens for row in rows),
        "prefix": max(row.num_prefix_tokens for row in rows),
        "reasons": dict(collections.Counter(reason for reason in reasons if reason)),
    }
    return found if found["grouped"] else with_exact(found, model, rows)


def with_exact(found: Row, model: nn.Module, rows: Any = ()) -> Row:
    """A row of what cannot be grouped, with how many attentions can be exact at once, if any can."""
    count = count_exact(model, rows)
    return {**found, "exact": count} if count else found


def count_exact(model: nn.Module, rows: Any) -> int:
    """How many attentions `dgt.accelerate(model, error=0)` reaches: those whose calls the dense kernel
    takes, and those whose forward it replaces.
    """
    try:
        dgt.accelerate(model, error=0)
    except UserError:  # nothing in its code calls attention
        return 0
    processors = installed_processors(model)
    uninstall_processors(model)
    names = {row.name for row in rows if is_for_dense_kernel(model, row)} & set(processors)
    replaced = (name for name, each in processors.items() if isinstance(each, DecomposedAttention))
    return len(names.union(replaced))


def is_for_dense_kernel(model: nn.Module, row: Any) -> bool:
    """Whether the dense kernel takes an attention's calls; PyTorch's module adds masks of pairs itself."""
    if row.tokens == 1:  # a class token, beside whose attention that of the others counts
        return False
    if row.reason == PAIRS and isinstance(model.get_submodule(row.name), nn.MultiheadAttention):
        return False
    return row.reason.partition(",")[0] in FOR_DENSE_KERNEL


def reason_of(row: Any) -> str:
    """Why an attention does not gain at any size; empty if it may.

    At larger sizes, windows stay as small, and so does one side of a pooling head.
    """
    if row.tokens != row.key_tokens and not row.reason:
        return "queries and keys are of different tokens"
    if row.sequences > 1 and not row.reason:
        return "in windows"
    return str(row.reason.partition(",")[0])


def refused(reason: str) -> Row:
    """A row of the results for what has nothing that could be grouped."""
    return {"attentions": 0, "grouped": 0, "reasons": {reason: 1}}


def why_refused(model: torch.nn.Module, images: Any, error: Exception) -> str:
    """The reason for a model that never calls PyTorch's function, or the error itself."""
    if "must call F.scaled_dot_product_attention" not in str(error):
        return str(error).partition(", got")[0]
    with SoftmaxCounter() as counter, torch.no_grad():
        model(**images) if isinstance(images, dict) else model(images)
    return OWN if counter.count else NONE


def look_at_named(name: str) -> Row:
    """What is found in one architecture: its attentions, which of them can be grouped, and why the
    others cannot.
    """
    import timm

    from dgt.acceleration import inspect_model

    with torch.device("meta"):
        model: Any = timm.create_model(name).eval()
        images = torch.empty(1, *model.default_cfg["input_size"])
        try:
            rows = inspect_model(model, images, least_tokens=0)
        except ValueError as error:
            return with_exact(refused(why_refused(model, images, error)), model)
    return {"pixels": images.shape[-1], **summarize(model, rows)}


@cache
def architectures() -> dict[str, tuple[str, int]]:
    """Family and number of pretrained tags of every architecture that has any."""
    import timm

    tags = collections.Counter(tag.split(".")[0] for tag in timm.list_pretrained())
    return {
        name: (family, tags[name])
        for family in timm.list_modules()
        for name in timm.list_models(module=family)
        if tags[name] and not name.startswith("dgt_")  # which dgt adds
    }


def look_at_architecture(name: str) -> Row:
    """The row of an architecture in the results."""
    family, tags = architectures()[name]
    try:
        found = look_at_named(name)
    except Exception as error:
        # it cannot be built without values: the table says so and continues
        found = refused(f"not tried: {type(error).__name__}")
    return {"family": family, "tags": tags, **found}


# Encoders of transformers

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
        name = names if isinstance(names, str) else names[0]
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


def build(model: Any, device: str, small: bool) -> tuple[nn.Module, Any]:
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


def look_at_class(model: type[nn.Module]) -> Row:
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
            return summarize(built, inspect_model(built, inputs, least_tokens=0))
        except Exception as error:  # whatever a model raises for inputs that it does not take
            if "must call F.scaled_dot_product_attention" in str(error):
                return with_exact(refused(why_refused(built, inputs, error)), built)
            LOGGER.debug("%s with %s: %s", type(built).__name__, form.__name__, error)
    return None


def look_at_encoder(kind: str) -> Row:
    """The row of an encoder in the results."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = registered()[kind]
    return {"class": model.__name__, **look_at_class(model)}


# The results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accelerate_coverage.json"
PARTS = ("architectures", "encoders")
EVERY = 25  # rows after which the file is written


def read_earlier(path: Path, again: bool) -> dict[str, Any]:
    """What an earlier run found with the same versions; nothing if it is all to be done again."""
    versions = {name: version(name) for name in ("timm", "transformers", "torch")}
    found: dict[str, Any] = {**versions, "architectures": {}, "encoders": {}}
    if again or not path.is_file():
        return found
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if all(earlier.get(name) == number for name, number in versions.items()):
        found.update({part: earlier[part] for part in PARTS})
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results, sorted by name."""
    write_record(path, found | {part: dict(sorted(found[part].items())) for part in PARTS})


class Work(NamedTuple):
    """A model that has not been inspected yet."""

    part: str
    name: str
    look: Callable[[str], dict[str, Any]]


def missing(found: dict[str, Any], only: str) -> list[Work]:
    """What has not been inspected yet, of the names that fit a pattern."""
    work = [Work("architectures", name, look_at_architecture) for name in architectures()]
    work += [Work("encoders", kind, look_at_encoder) for kind in registered()]
    left = [each for each in work if each.name not in found[each.part]]
    return [each for each in left if fnmatch.fnmatch(each.name, only)]


def look_at_all(found: dict[str, Any], only: str, path: Path) -> None:
    """Add what is missing, and write the results from time to time."""
    found["registered"] = {"architectures": len(architectures()), "encoders": len(registered())}
    left = missing(found, only)
    for done, (part, name, look) in enumerate(left, start=1):
        found[part][name] = look(name)
        print(f"{done} of {len(left)}: {name} {found[part][name]}", flush=True)
        if done % EVERY == 0 or done == len(left):
            write(path, found)


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of architectures and encoders")
    parser.add_argument("--again", action="store_true", help="inspect everything again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Inspect what is missing."""
    options = parse_arguments()
    look_at_all(read_earlier(options.out, options.again), options.only, options.out)


if __name__ == "__main__":
    main()
