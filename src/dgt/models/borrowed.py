"""Comparators of the paper that timm lacks: PVT's first version and CvT from transformers, CPVT around timm's DeiT.

Registered with timm, from random weights. PVT is a backbone as well: its tables of positions are stretched to the map
at hand, which transformers cannot do. CvT has three stages, so no head with four maps takes it.
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

DEPTHS: dict[str, tuple[int, ...]] = {
    **{"pvt_small": (3, 4, 6, 3), "pvt_medium": (3, 4, 18, 3), "pvt_large": (3, 8, 27, 3)},
    **{"cvt_13": (1, 2, 10), "cvt_21": (1, 4, 16)},
}
default_cfgs = generate_default_cfgs({name: {"input_size": (3, 224, 224), "num_classes": 1000} for name in DEPTHS})


class Borrowed(nn.Module):
    """PVT of four stages, or CvT of three: (B, in_chans, H, W) images, of multiples of 32 pixels, to logits."""

    def __init__(self, depths: tuple[int, ...], in_chans: int = 3, num_classes: int = 1000, device: Any = None) -> None:
        import transformers

        super().__init__()
        kind, key = ("Pvt", "depths") if len(depths) == 4 else ("Cvt", "depth")
        options = {key: list(depths), "num_channels": in_chans, "num_labels": num_classes}
        config = getattr(transformers, f"{kind}Config")(**options)
        with torch.device(device) if device else nullcontext():
            self.model: Any = getattr(transformers, f"{kind}ForImageClassification")(config)
        self.num_classes, self.ends = num_classes, [sum(depths[: i + 1]) - 1 for i in range(len(depths))]
        dims = enumerate(config.hidden_sizes if kind == "Pvt" else config.embed_dim)
        self.feature_info = [{"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in dims]
        for module in self.model.modules():
            if hasattr(module, "interpolate_pos_encoding"):
                module.interpolate_pos_encoding = _stretched

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes)."""
        logits: Tensor = self.model(images).logits
        return logits

    def forward_intermediates(self, x: Tensor, indices: int | list[int] | None = None, **_: Any) -> list[Tensor]:
        """The maps (B, C, h, w) of chosen stages of a PVT, as timm asks for intermediates alone."""
        states, maps = self.model(x, output_hidden_states=True).hidden_states, []
        for i in feature_take_indices(len(self.ends), indices)[0]:
            height, width = (side // int(self.feature_info[i]["reduction"]) for side in x.shape[2:])
            tokens = states[self.ends[i]][:, -height * width :]  # without the class token
            maps.append(tokens.transpose(1, 2).unflatten(-1, [height, width]))
        return maps

    def prune_intermediate_layers(self, indices: int | list[int] = 1, *_: Any, **__: Any) -> list[int]:
        """The chosen stages by their numbers; nothing is left out."""
        return list(feature_take_indices(len(self.ends), indices)[0])


def _stretched(table: Tensor, height: int, width: int) -> Tensor:
    """A table of positions (1, S S, C) of a square map for another one: (1, height width, C)."""
    square = table.transpose(1, 2).unflatten(-1, [isqrt(table.shape[1]), -1])
    return F.interpolate(square, size=(height, width), mode="bilinear").flatten(2).transpose(1, 2)


def _build(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
    features = {"out_indices": options.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"}
    options["depths"] = DEPTHS[name]
    model: nn.Module = build_model_with_cfg(Borrowed, name, pretrained, feature_cfg=features, **options)
    return model


class PositionedBlock(nn.Module):
    """A block of a ViT, and CPVT's position encoding of its output: a square map of tokens after ``prefix`` others."""

    def __init__(self, block: nn.Module, dim: int, prefix: int, device: Any) -> None:
        super().__init__()
        self.block, self.prefix = block, prefix
        self.cpe = ConditionalPositionEncoding(dim, device=device)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Map (B, L, C) to the same shape."""
        x = self.block(x, *args, **options)
        before, grid = x[:, : self.prefix], x[:, self.prefix :].unflatten(1, [isqrt(x.shape[1]), -1])
        return torch.cat([before, (grid + self.cpe(grid)).flatten(1, 2)], 1)


def _build_cpvt(deit: str, class_token: bool, pretrained: bool = False, **options: Any) -> nn.Module:
    """DeiT without its table of positions, a CPE after the first block; pooled by average or by class token."""
    options = {"global_pool": "token" if class_token else "avg", "class_token": class_token, **options}
    model: Any = timm.create_model(deit, pretrained, pos_embed="none", **options)
    model.blocks[0] = PositionedBlock(model.blocks[0], model.embed_dim, int(class_token), options.get("device"))
    return model


BUILDERS = {name: partial(_build, name) for name in DEPTHS}
BUILDERS["cpvt_small"] = partial(_build_cpvt, "deit_small_patch16_224", False)
BUILDERS["cpvt_base"] = partial(_build_cpvt, "deit_base_patch16_224", True)  # as 82.3 % was published for
for _name, _builder in BUILDERS.items():
    _builder.__name__, _builder.__module__ = _name, __name__  # type: ignore[attr-defined]
    register_model(_builder)
