"""Any hierarchical timm model as the backbone of segmentation and detection.

It returns only what heads such as UperNet and FPN need: maps at strides 4, 8, 16 and 32 whose
sizes follow from the image's alone, and a mask of real pixels that reaches the attention of the
models that know padding.
"""

from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.inspect import set_attention
from dgt.utils.errors import UserError

STRIDES = (4, 8, 16, 32)
NOT_BUILT = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    RuntimeError,
)
"""What timm's models raise for arguments that make none."""


class FeatureBackbone(nn.Module):
    """A timm model that returns the maps of its last four stages.

    Models that take no mask see the image padded with zeros, below and on the right, to a multiple
    of 32 pixels. The maps are cut again, so that every model gives maps of ``ceil(H / stride)`` x
    ``ceil(W / stride)``.

    Args:
        getter: what ``timm.create_model(name, features_only=True, feature_cls="getter",
            out_indices=4)`` returns.

    Raises:
        UserError: the maps are not at strides 4, 8, 16 and 32.
    """

    model: Any

    def __init__(self, getter: Any) -> None:
        super().__init__()
        strides = tuple(getter.feature_info.reduction())
        if strides != STRIDES:
            name = type(getter.model).__name__
            came = f"{strides} from {name}"
            raise UserError(f"backbone must have maps at strides {STRIDES}, got {came}")
        self.model = getter.model
        self.indices = list(getter.out_indices)
        self.channels: list[int] = list(getter.feature_info.channels())
        self.strides: list[int] = list(strides)
        # Those of timm that take one mean another by it, as Hiera that of a masked autoencoder.
        self.takes_mask = isinstance(self.model, DynamicGroupTransformer)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Map images to the maps of the four stages.

        Args:
            images: (B, 3, H, W), at least 32 x 32 pixels.
            mask: bool (B, H, W), True where a pixel is real, or None. Models that take none see
                padding as it is.

        Returns:
            Four maps (B, ``channels[i]``, ceil(H / ``strides[i]``), ceil(W / ``strides[i]``)).
        """
        options: dict[str, Any] = {
            "indices": self.indices,
            "intermediates_only": True,
            "output_fmt": "NCHW",
        }
        if self.takes_mask:
            maps: list[Tensor] = self.model.forward_intermediates(images, mask=mask, **options)
            return maps
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % STRIDES[-1], 0, -height % STRIDES[-1]))
        maps = self.model.forward_intermediates(padded, **options)
        cut = []
        for x, stride in zip(maps, self.strides, strict=True):
            cut.append(x[..., : -(-height // stride), : -(-width // stride)])
        return cut


def build_backbone(
    backbone: str | nn.Module,
    image_size: int | None = None,
    keys: int | None = None,
    **arguments: Any,
) -> FeatureBackbone:
    """Build the backbone of a segmentation or detection model.

    Args:
        backbone: name of a timm model with a pyramid of stages (dgt_tiny,
            swin_tiny_patch4_window7_224, resnet50, ...); or a :class:`FeatureBackbone`, which is
            returned as it is.
        image_size: side of the training images, for models that are built for one size and cannot
            be told to take any.
        keys: that a model with DG-Attention selects for each group unless ``top_k`` is given; None
            for its own k.
        arguments: further keyword arguments of the model, e.g. ``top_k=512, drop_path_rate=0.2``.

    Raises:
        TypeError: ``backbone`` is neither, or arguments come with a finished one.
        UserError: timm knows no such model, it does not take the arguments, or it has no four maps
            at strides 4 to 32.

    Example:
        >>> build_backbone("dgt_tiny").channels
        [64, 128, 256, 512]
    """
    if isinstance(backbone, FeatureBackbone):
        if arguments:
            raise TypeError(
                f"arguments must be empty unless backbone is a model name, got {arguments}"
            )
        return backbone
    if not isinstance(backbone, str):
        came = type(backbone).__name__
        raise TypeError(
            f"backbone must be the name of a timm model or a FeatureBackbone, got {came}"
        )
    if not timm.is_model(backbone):
        raise UserError(
            f"backbone must be a registered timm model, got {backbone!r}; "
            "timm.list_models() lists them"
        )
    built = _create(backbone, image_size, arguments)
    if keys and "top_k" not in arguments and _has_groups(built):
        set_attention(built, top_k=keys)
    return built


def _create(name: str, image_size: int | None, arguments: dict[str, Any]) -> FeatureBackbone:
    """Build a timm model by name, for any size if it supports that, else for this one."""
    attempts: list[dict[str, Any]] = [{}]
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        one_size = {} if image_size is None else {"img_size": image_size}
        attempts = [{"strict_img_size": False}, one_size]
    options = {"features_only": True, "feature_cls": "getter", "out_indices": 4, **arguments}
    for attempt in attempts[:-1]:
        try:
            return FeatureBackbone(timm.create_model(name, **attempt, **options))
        except TypeError:  # no such argument: try again without it
            continue
        except UserError:
            raise
        except NOT_BUILT as error:
            raise _cannot_be_built(name, arguments, error) from error
    try:
        return FeatureBackbone(timm.create_model(name, **attempts[-1], **options))
    except UserError:
        raise
    except NOT_BUILT as error:
        raise _cannot_be_built(name, arguments, error) from error


def _cannot_be_built(name: str, arguments: dict[str, Any], error: Exception) -> UserError:
    """Explain what timm raised."""
    return UserError(f"backbone {name!r} cannot be built with {arguments}: {error}")


def _has_groups(model: nn.Module) -> bool:
    """Whether a model has DG-Attention."""
    return any(isinstance(module, DGAttention) for module in model.modules())
