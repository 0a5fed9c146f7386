"""What of a trained run is exported: a module from images to tensors, and what users of the file should know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import timm
from torch import Tensor, nn

from dgt.layers.windows import StripeAttention, WindowAttention
from dgt.training.checkpoints import LoadedRun


@dataclass(frozen=True)
class Source:
    """A module to export.

    Args:
        module: maps (B, 3, H, W) images to a tensor or a list of tensors; float32, in evaluation mode.
        outputs: name of each of those.
        size: the only side of images that the module takes, in pixels; None where it takes any.
        about: further facts, kept in the file: what the classes are, how images are normalised.
    """

    module: nn.Module
    outputs: tuple[str, ...] = ("logits",)
    size: int | None = None
    about: dict[str, str] = field(default_factory=dict)


class FeatureMaps(nn.Module):
    """A timm classifier that returns the maps of its stages instead of logits.

    Args:
        classifier: a timm model with `forward_intermediates`.

    Raises:
        ValueError: it has none.
    """

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        if not hasattr(classifier, "forward_intermediates"):
            raise ValueError(f"a {type(classifier).__name__} has no feature maps to export")
        self.classifier = classifier

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map (B, 3, H, W) images to NCHW maps, the finest first."""
        maps: list[Tensor] = self.classifier.forward_intermediates(images, intermediates_only=True)  # type: ignore[operator]
        return maps


def source_of_run(run: LoadedRun, features: bool = False) -> Source:
    """Choose what to export of a trained run.

    Args:
        run: the trained run.
        features: the feature maps of the backbone instead of what the task predicts.

    Raises:
        ValueError: for a detector, whose lists of objects are no tensors of one shape, a model without maps, and
            windows (of Swin and CSWin) under a segmenter or detector, which take images of any size.
    """
    task, data = run.recipe.task, run.recipe.data
    backbone = run.network if task == "classify" else run.network.get_submodule("backbone")
    about: dict[str, str] = {
        "model": run.recipe.model.name,
        "task": task,
        **{key: json.dumps(data[key]) for key in ("mean", "std", "image_size") if key in data},
    }
    config = timm.get_pretrained_cfg(run.recipe.model.name)
    windows = any(isinstance(part, WindowAttention | StripeAttention) for part in backbone.modules())
    if windows and task != "classify":
        raise ValueError(
            f"a {run.recipe.model.name} attends in windows, which a graph cannot cut out of images of any size: "
            f"only classifiers can be exported with it, for images of one size"
        )
    fixed = task == "classify" and (windows or (config is not None and config.fixed_input_size))
    size = data["image_size"] if fixed else None
    if features:
        maps = FeatureMaps(backbone).eval() if task == "classify" else backbone
        count = len(backbone.feature_info) if task == "classify" else len(backbone.channels)  # type: ignore[arg-type]
        return Source(maps, tuple(f"map_{i}" for i in range(count)), size, about)
    if task == "detect":
        raise ValueError(
            "a detector cannot be exported: how many objects it finds is no shape that a graph knows; "
            "the feature maps of its backbone can, with --features"
        )
    return Source(run.network, ("logits",), size, {**about, "classes": json.dumps(run.class_names)})
