"""Comparators of the paper that timm lacks: PVT (first version), CvT, and CPVT.

PVT and CvT are those of transformers, CPVT is timm's DeiT with our position encoding. They are
registered with timm, with random weights. PVT is a backbone as well: its tables of positions are
stretched to the map at hand, which transformers cannot do. CvT has three stages, so no head with
four maps takes it.
"""

from contextlib import nullcontext
from functools import partial
from math import isqrt
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from dgt.layers.convolution import ConditionalPositionEncoding
from dgt.layers.reset import reset_parts
from dgt.utils.errors import UserError

DEPTHS: dict[str, tuple[int, ...]] = {
    "pvt_small": (3, 4, 6, 3),
    "pvt_medium": (3, 4, 18, 3),
    "pvt_large": (3, 8, 27, 3),
    "cvt_13": (1, 2, 10),
    "cvt_21": (1, 4, 16),
}
CONFIG = {"input_size": (3, 224, 224), "num_classes": 1000}
default_cfgs = generate_default_cfgs(dict.fromkeys(DEPTHS, CONFIG))


class TransformersModel(nn.Module):
    """PVT of four stages, or CvT of three, from transformers, under timm's interface.

    Args:
        depths: blocks of each stage.
        in_chans: channels of the image.
        num_classes: classes.
        device: of the weights.

    Example:
        >>> TransformersModel((1, 1, 1, 1))(torch.randn(2, 3, 224, 224)).shape
        torch.Size([2, 1000])
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        in_chans: int = 3,
        num_classes: int = 1000,
        device: Any = None,
    ) -> None:
        import transformers

        super().__init__()
        options: dict[str, Any] = {"num_channels": in_chans, "num_labels": num_classes}
        with torch.device(device) if device else nullcontext():
            if len(depths) == 4:
                pvt = transformers.PvtConfig(depths=list(depths), **options)
                self.model: Any = transformers.PvtForImageClassification(pvt)
                dims = pvt.hidden_sizes
            else:
                cvt = transformers.CvtConfig(depth=list(depths), **options)
                self.model = transformers.CvtForImageClassification(cvt)
                dims = cvt.embed_dim
        self.num_classes = num_classes
        self.ends = [sum(depths[: i + 1]) - 1 for i in range(len(depths))]
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"}
            for i, dim in enumerate(dims)
        ]
        for module in self.model.modules():
            if hasattr(module, "interpolate_pos_encoding"):
                module.interpolate_pos_encoding = _stretched

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize all parameters and buffers as transformers does.

        Args:
            needs_reset: as in :meth:`dgt.models.DynamicGroupTransformer.init_weights`.
        """
        if needs_reset:
            reset_parts(self)
        self.model.apply(self.model._init_weights)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, in_chans, H, W) images, of multiples of 32 pixels, to (B, num_classes)."""
        logits: Tensor = self.model(images).logits
        return logits

    def forward_intermediates(
        self, x: Tensor, indices: int | list[int] | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the maps of chosen stages of a PVT, as timm asks for intermediates alone.

        Args:
            x: (B, in_chans, H, W).
            indices: stages: the last n if an int, all if None.

        Returns:
            Maps (B, C, h, w).
        """
        states = self.model(x, output_hidden_states=True).hidden_states
        maps = []
        for i in feature_take_indices(len(self.ends), indices)[0]:
            height, width = (side // int(self.feature_info[i]["reduction"]) for side in x.shape[2:])
            tokens = states[self.ends[i]][:, -height * width :]  # without the class token
            maps.append(tokens.transpose(1, 2).unflatten(-1, [height, width]))
        return maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, *_: Any, **__: Any
    ) -> list[int]:
        """Return the chosen stages by their numbers; nothing is left out."""
        return list(feature_take_indices(len(self.ends), indices)[0])


def _stretched(table: Tensor, height: int, width: int) -> Tensor:
    """Stretch the positions (1, S S, C) of a square map to another one: (1, height width, C)."""
    square = table.transpose(1, 2).unflatten(-1, [isqrt(table.shape[1]), -1])
    return F.interpolate(square, size=(height, width), mode="bilinear").flatten(2).transpose(1, 2)


def _build(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
    """Build PVT or CvT by name."""
    features = {"out_indices": options.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"}
    options["depths"] = options.get("depths", DEPTHS[name])
    model: nn.Module = build_model_with_cfg(
        TransformersModel, name, pretrained, feature_cfg=features, **options
    )
    return model


class PositionedBlock(nn.Module):
    """A block of a ViT, and CPVT's position encoding of its output.

    Args:
        block: maps (B, L, C) to the same shape.
        dim: channels C.
        prefix: tokens before those of the map.
        embedding: timm's, which makes the patches, and knows rows and columns of the map.
        device: of the weights.
    """

    def __init__(
        self, block: nn.Module, dim: int, prefix: int, embedding: Any, device: Any
    ) -> None:
        super().__init__()
        self.block = block
        self.prefix = prefix
        self.embedding = (embedding,)  # of the model, and no part of the block
        self.cpe = ConditionalPositionEncoding(dim, device=device)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Map (B, L, C) to the same shape."""
        x = self.block(x, *args, **options)
        before = x[:, : self.prefix]
        grid = x[:, self.prefix :].unflatten(1, self.embedding[0].grid_size)
        return torch.cat([before, (grid + self.cpe(grid)).flatten(1, 2)], 1)


def _build_cpvt(
    deit: str, class_token: bool, pretrained: bool = False, **options: Any
) -> nn.Module:
    """Build DeiT without its table of positions, with a CPE after the first block, pooled by average or class token."""
    pool = "token" if class_token else "avg"
    options = {"global_pool": pool, "class_token": class_token, **options}
    model: Any = timm.create_model(deit, pretrained, pos_embed="none", **options)
    embedding = model.patch_embed
    if not embedding.strict_img_size:
        raise UserError(
            "strict_img_size must be True and dynamic_img_size False for CPVT, got others"
        )
    device = options.get("device")
    model.blocks[0] = PositionedBlock(
        model.blocks[0], model.embed_dim, int(class_token), embedding, device
    )
    return model


BUILDERS = {name: partial(_build, name) for name in DEPTHS}
BUILDERS["cpvt_small"] = partial(_build_cpvt, "deit_small_patch16_224", False)
# With a class token, as the 82.3 % of the paper's Table 2 were published for.
BUILDERS["cpvt_base"] = partial(_build_cpvt, "deit_base_patch16_224", True)
for _name, _builder in BUILDERS.items():
    _builder.__name__ = _name  # type: ignore[attr-defined]
    _builder.__module__ = __name__
    register_model(_builder)
