"""The recipe's model: any timm model by name, as the classifier itself or as the backbone of
another task.

Models of the Dynamic Group Transformer take every image size. Many others are built for one size
(Swin, DeiT, ViT, MaxViT): those get the recipe's, so that a peer trains on the same recipe by
naming it and nothing else.
"""

import difflib
from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
from torch import nn

from dgt.models.heads.backbone import NOT_BUILT
from dgt.models.heads.hub import OF_FIRST_WEIGHTS
from dgt.utils.errors import UserError
from dgt.utils.faults import explain
from dgt.utils.modes import in_evaluation


@dataclass(frozen=True)
class ModelSettings:
    """The model to train.

    Args:
        name: a model that timm knows, this package's among them: dgt_tiny,
            swin_tiny_patch4_window7_224, resnet50.
        drop_path_rate: stochastic depth; null for models that do not take it.
        args: further keyword arguments of the model. They belong to the recipe's model: naming
            another one on the command line drops them.
        head: keyword arguments of the head that the task puts on the model; classification has
            none. A segmenter's class_weights are what a pixel of each class counts in the loss.
        freeze: parts that hold still, by name: [stem, stages.0]. Their weights, the statistics of
            BatchNorm and the centroids stay as they are; those of a backbone are named as in the
            model itself.
        init_from: a checkpoint, run folder or model folder to take the first weights from; null for
            random weights.
        top_k_schedule: share of the steps in which k of DG-Attention falls from all tokens to
            `top_k`; null for none.
        top_k_start: number of keys that it falls from, in place of all tokens.

    Raises UserError for a value out of its range, naming the recipe's key.
    """

    name: str = "dgt_tiny"
    drop_path_rate: float | None = None
    args: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    init_from: str | None = None
    top_k_schedule: float | None = None
    top_k_start: int | None = None

    def __post_init__(self) -> None:
        if self.top_k_schedule is not None and not 0 < self.top_k_schedule <= 1:
            raise UserError(
                f"model.top_k_schedule must be null, or above 0 and at most 1, got {self.top_k_schedule!r}"
            )
        if self.top_k_start is not None and (self.top_k_start < 1 or self.top_k_schedule is None):
            raise UserError(
                f"model.top_k_start must be null or, with top_k_schedule, above 0, got {self.top_k_start}"
            )
        if self.drop_path_rate is not None and not 0 <= self.drop_path_rate < 1:
            raise UserError(
                f"model.drop_path_rate must be null or in [0, 1), got {self.drop_path_rate!r}"
            )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model: `args`, and the `drop_path_rate` where there is one."""
        return (
            {} if self.drop_path_rate is None else {"drop_path_rate": self.drop_path_rate}
        ) | self.args

    def untrained(self) -> "ModelSettings":
        """The same model without pretrained weights, for one that gets others."""
        kept = {name: value for name, value in self.args.items() if name not in OF_FIRST_WEIGHTS}
        return replace(self, args=kept)

    def check_head(self, *known: str) -> None:
        """Raise UserError for unknown arguments of a head."""
        if unknown := sorted(set(self.head) - set(known)):
            expected = (
                f"only have keys among {', '.join(known)}" if known else "be empty for this task"
            )
            raise UserError(f"model.head must {expected}, got {', '.join(unknown)}")


def nearest_models(name: str) -> str:
    """What to say of a name that timm does not know: the models with names like it."""
    near = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists timm's"


def model_arguments(settings: ModelSettings, image_size: int) -> dict[str, Any]:
    """Collect the keyword arguments for `timm.create_model`.

    Args:
        settings: the recipe's model.
        image_size: side in pixels, passed as `img_size` where the model needs it.

    Raises:
        UserError: timm has no such model.
    """
    if not timm.is_model(settings.name):
        raise UserError(
            f"model.name must be a registered timm model, got {settings.name!r}; "
            f"{nearest_models(settings.name)}"
        )
    arguments = settings.arguments()
    config = timm.get_pretrained_cfg(settings.name)
    if config is not None and config.fixed_input_size and not arguments.get("dynamic_img_size"):
        arguments.setdefault("img_size", image_size)
    return arguments


def build_classifier(settings: ModelSettings, num_classes: int, image_size: int) -> nn.Module:
    """Build the recipe's model as a classifier.

    Args:
        settings: the recipe's model.
        num_classes: number of classes.
        image_size: side of the images in pixels.

    Returns:
        A module from (B, 3, image_size, image_size) to (B, num_classes).

    Raises:
        UserError: timm has no such model, it does not take these arguments, or arguments of a head
            are given.
    """
    settings.check_head()
    arguments = model_arguments(settings, image_size)
    try:
        return timm.create_model(settings.name, num_classes=num_classes, **arguments)
    except NOT_BUILT as error:
        hint = "see model.args and model.drop_path_rate of the recipe"
        raise UserError(
            f"model {settings.name!r} cannot be built with {arguments}: {error}; {hint}"
        ) from error


def check_input_size(
    network: nn.Module, name: str, height: int, width: int, remedy: str = ""
) -> None:
    """UserError where a network cannot be run on images of a size: many models take multiples of 32, or
    their own alone.

    Args:
        network: maps (B, 3, height, width) to anything; its mode stays.
        name: of its model, for the message.
        height, width: in pixels.
        remedy: what to do, for the message.
    """
    try:
        with torch.no_grad(), in_evaluation(network):
            network(next(network.parameters()).new_zeros(1, 3, height, width))
    except (RuntimeError, AssertionError) as error:
        raise explain(error) or UserError(
            f"model {name!r} cannot be run on images of {height} x {width} pixels"
            f"{remedy} ({type(error).__name__}: {error})"
        ) from error
