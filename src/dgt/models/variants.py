"""DGT-T, -S, -B and a small one: rows of data over one class, registered with timm."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from dgt.models.dgt import DynamicGroupTransformer


def _create(variant: str, pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    out_indices = options.pop("out_indices", (0, 1, 2, 3))
    model: DynamicGroupTransformer = build_model_with_cfg(
        DynamicGroupTransformer,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **options,
    )
    return model


def _cfg(input_size: int = 224, crop_pct: float = 0.875) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, input_size, input_size),
        "pool_size": (input_size // 32, input_size // 32),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stem.convs.0",
        "classifier": "head.fc",
    }


default_cfgs = generate_default_cfgs(
    {"dgt_nano": _cfg(64, 1.0), "dgt_tiny": _cfg(), "dgt_small": _cfg(), "dgt_base": _cfg()}
)

SMALL = {"stem_width": 48, "dims": (96, 192, 384, 768), "num_heads": (3, 6, 12, 24), "post_norm": True}
BASE = {"stem_width": 64, "dims": (128, 256, 512, 1024), "num_heads": (4, 8, 16, 32), "post_norm": True}
NANO = {
    "stem_width": 16,
    "dims": (32, 64, 128, 256),
    "num_heads": (1, 2, 4, 8),
    "depths": (1, 1, 4, 1),
    "num_groups": 16,
    "top_k": 32,
    "head_width": 512,
}


@register_model
def dgt_nano(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """A DGT for small images and quick trials; not in the paper. For 32 px take ``stem_stride=1``."""
    return _create("dgt_nano", pretrained, **{**NANO, **options})


@register_model
def dgt_tiny(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-T: 24.09 M parameters, 4.35 GFLOPs at 224 px."""
    return _create("dgt_tiny", pretrained, **options)


@register_model
def dgt_small(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-S: 51.76 M parameters, 9.41 GFLOPs at 224 px; cosine attention and residual post-norm."""
    return _create("dgt_small", pretrained, **{**SMALL, **options})


@register_model
def dgt_base(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-B: 90.28 M parameters, 16.40 GFLOPs at 224 px; cosine attention and residual post-norm."""
    return _create("dgt_base", pretrained, **{**BASE, **options})
