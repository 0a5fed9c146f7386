"""What of a trained run is exported: a module from images to tensors, and what users of the file should know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import timm
from torch import Tensor, nn

from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.swin import WindowAttention
from dgt.tasks import TASKS
from dgt.training.load import LoadedRun
from dgt.utils.errors import UserError


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
        UserError: it has none.
    """

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        if not hasattr(classifier, "forward_intermediates"):
            raise UserError(f"a {type(classifier).__name__} has no feature maps to export")
        self.classifier = classifier

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map (B, 3, H, W) images to NCHW maps, the finest first."""
        maps: list[Tensor] = self.classifier.forward_intermediates(images, intermediates_only=True)  # type: ignore[operator]
        return maps


def backbone_of(run: LoadedRun) -> nn.Module | None:
    """The backbone under the head of a run's task; None for a classifier, which is timm's model itself."""
    return getattr(run.network, "backbone", None)


def source_of_run(run: LoadedRun, features: bool = False) -> Source:
    """Return what to export of a trained run.

    Args:
        run: the trained run.
        features: the feature maps of the backbone instead of what the task predicts.

    Raises:
        UserError: for a task whose outputs are no tensors of one shape, a model without maps, and windows (of Swin and
            CSWin) under the head of a task, which take images of any size.
    """
    task, data, name, backbone = TASKS[run.recipe.task], run.recipe.data, run.recipe.model.name, backbone_of(run)
    windows = any(isinstance(part, WindowAttention | StripeAttention) for part in run.network.modules())
    if windows and backbone is not None:
        raise UserError(
            f"a {name} attends in windows, which a graph cannot cut out of images of any size: "
            "only classifiers can be exported with it, for images of one size"
        )
    config = timm.get_pretrained_cfg(name)
    fixed = backbone is None and (windows or (config is not None and config.fixed_input_size))
    size = data["image_size"] if fixed else None
    about: dict[str, str] = {"model": name, "task": task.name}
    about |= {key: json.dumps(data[key]) for key in ("mean", "std", "image_size") if key in data}
    if features:
        maps = FeatureMaps(run.network).eval() if backbone is None else backbone
        count = len(run.network.feature_info if backbone is None else backbone.channels)  # type: ignore[arg-type]
        return Source(maps, tuple(f"map_{i}" for i in range(count)), size, about)
    if not task.outputs:
        raise UserError(
            f"what the task {task.name!r} finds cannot be exported: how many objects there are is no shape that a "
            "graph knows; the feature maps of its backbone can, with --features"
        )
    return Source(run.network, task.outputs, size, {**about, "classes": json.dumps(run.class_names)})
