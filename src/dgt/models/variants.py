"""DGT-T, -S, -B, a small one, and the ablation of blocks: rows of data over one class, registered with timm.

The blocks of Swin, CSWin and CMT stand in all four stages of DGT-T's skeleton, which with their own feed-forward
networks and position encodings gives 23.74, 23.76 and 24.13 M parameters (and 0.58 M for CMT's position tables).
"""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from dgt.models.dgt import DynamicGroupTransformer


def create_variant(variant: str, pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """Build a registered model of ours from its row of options, as timm builds its own."""
    out_indices = options.pop("out_indices", (0, 1, 2, 3))
    model: DynamicGroupTransformer = build_model_with_cfg(
        DynamicGroupTransformer,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **options,
    )
    return model


def default_cfg(input_size: int = 224, crop_pct: float = 0.875, first_conv: str = "stem.convs.0") -> dict[str, Any]:
    """Return what timm wants to know of a model: the size of its images in pixels, and their preparation."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, input_size, input_size),
        "pool_size": (input_size // 32, input_size // 32),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": first_conv,
        "classifier": "head.fc",
    }


TINY_NAMES = ("dgt_tiny", "dgt_tiny_swin_block", "dgt_tiny_cswin_block", "dgt_tiny_cmt_block")
NANO_NAMES = ("dgt_nano", "dgt_nano_swin_block", "dgt_nano_cswin_block", "dgt_nano_cmt_block")
default_cfgs = generate_default_cfgs(
    {
        **{name: default_cfg(64, 1.0) for name in NANO_NAMES},
        **{name: default_cfg() for name in (*TINY_NAMES, "dgt_small", "dgt_base")},
    }
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
SWIN_BLOCK = {"attention": ("window",) * 4, "extents": (7, 7, 7, 7), "cpe": False, "ffn": "mlp"}
CSWIN_BLOCK = {"attention": ("stripe",) * 4, "extents": (1, 2, 7, 0), "cpe": False, "ffn": "mlp"}
CMT_BLOCK = {"attention": ("reduced",) * 4, "extents": (8, 4, 2, 1)}
# Windows of 4 x 4, stripes and reduced maps of 16 tokens: what 7 x 7 and 49 are for DGT-T, on maps of 16 to 2 tokens.
NANO_SWIN_BLOCK = {**NANO, **SWIN_BLOCK, "extents": (4, 4, 4, 4)}
NANO_CSWIN_BLOCK = {**NANO, **CSWIN_BLOCK, "extents": (1, 2, 4, 0), "num_heads": (2, 2, 4, 8)}  # stripes: even
NANO_CMT_BLOCK = {**NANO, **CMT_BLOCK, "extents": (4, 2, 1, 1), "table_side": 16}


@register_model
def dgt_nano(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """A DGT for small images and quick trials; not in the paper. For 32 px take ``stem_stride=1``."""
    return create_variant("dgt_nano", pretrained, **{**NANO, **options})


@register_model
def dgt_tiny(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-T: 24.09 M parameters, 4.35 GFLOPs at 224 px."""
    return create_variant("dgt_tiny", pretrained, **options)


@register_model
def dgt_small(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-S: 51.76 M parameters, 9.41 GFLOPs at 224 px; cosine attention and residual post-norm."""
    return create_variant("dgt_small", pretrained, **{**SMALL, **options})


@register_model
def dgt_base(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-B: 90.28 M parameters, 16.40 GFLOPs at 224 px; cosine attention and residual post-norm."""
    return create_variant("dgt_base", pretrained, **{**BASE, **options})


@register_model
def dgt_tiny_swin_block(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-T with Swin's blocks: 23.74 M parameters."""
    return create_variant("dgt_tiny_swin_block", pretrained, **{**SWIN_BLOCK, **options})


@register_model
def dgt_tiny_cswin_block(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-T with CSWin's blocks: 23.76 M parameters."""
    return create_variant("dgt_tiny_cswin_block", pretrained, **{**CSWIN_BLOCK, **options})


@register_model
def dgt_tiny_cmt_block(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """DGT-T with CMT's blocks: 24.13 M parameters, and 0.58 M in tables of positions."""
    return create_variant("dgt_tiny_cmt_block", pretrained, **{**CMT_BLOCK, **options})


@register_model
def dgt_nano_swin_block(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """``dgt_nano`` with Swin's blocks."""
    return create_variant("dgt_nano_swin_block", pretrained, **{**NANO_SWIN_BLOCK, **options})


@register_model
def dgt_nano_cswin_block(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """``dgt_nano`` with CSWin's blocks."""
    return create_variant("dgt_nano_cswin_block", pretrained, **{**NANO_CSWIN_BLOCK, **options})


@register_model
def dgt_nano_cmt_block(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """``dgt_nano`` with CMT's blocks."""
    return create_variant("dgt_nano_cmt_block", pretrained, **{**NANO_CMT_BLOCK, **options})
