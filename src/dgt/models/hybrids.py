"""Hybrids of the appendix: Swin-T and CSWin-T, with their own attention and with DG-Attention in its place.

DG-Attention replaces windows or stripes in every block of all four stages, and a CPE at the block's start replaces the
table of positions or LePE; the rest of Swin and CSWin stays. Rows of data over the one model class; the small ones are
for images of 32 to 64 pixels (at 32, take ``stem_stride=1``).
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.variants import create_variant, default_cfg

DGA = {"attention": ("group",) * 4, "cpe": True}
SWIN = {
    "skeleton": "swin",
    "dims": (96, 192, 384, 768),
    "depths": (2, 2, 6, 2),
    "num_heads": (3, 6, 12, 24),
    "attention": ("window",) * 4,
    "extents": (7, 7, 7, 7),
    "cpe": False,
    "ffn": "mlp",
    "top_k": 49,  # as many keys as a window has
}
CSWIN = {
    "skeleton": "cswin",
    "dims": (64, 128, 256, 512),
    "depths": (1, 2, 21, 1),
    "num_heads": (2, 4, 8, 16),
    "attention": ("stripe",) * 4,
    "extents": (1, 2, 7, 0),
    "cpe": False,
    "ffn": "mlp",
}
SMALL: dict[str, Any] = {"dims": (32, 64, 128, 256), "num_heads": (2, 2, 4, 8), "num_groups": 16}
SWIN_NANO = {**SWIN, **SMALL, "depths": (2, 2, 4, 2), "extents": (4, 4, 4, 4), "top_k": 16}
CSWIN_NANO = {**CSWIN, **SMALL, "depths": (1, 1, 4, 1), "extents": (1, 2, 4, 0), "top_k": 32}

default_cfgs = generate_default_cfgs(
    {
        name: default_cfg(size, crop, first_conv="stem.conv")
        for names, size, crop in (
            (("swin_tiny", "swin_tiny_dga", "cswin_tiny", "cswin_tiny_dga"), 224, 0.9),
            (("swin_nano", "swin_nano_dga", "cswin_nano", "cswin_nano_dga"), 64, 1.0),
        )
        for name in names
    }
)


@register_model
def swin_tiny(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """Swin-T for images of any size, padding masked: 28.29 M parameters."""
    return create_variant("swin_tiny", pretrained, **{**SWIN, **options})


@register_model
def swin_tiny_dga(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """Swin-T with DG-Attention, k = 49: 28.31 M parameters."""
    return create_variant("swin_tiny_dga", pretrained, **{**SWIN, **DGA, **options})


@register_model
def cswin_tiny(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """CSWin-T for images of any size: 22.32 M parameters."""
    return create_variant("cswin_tiny", pretrained, **{**CSWIN, **options})


@register_model
def cswin_tiny_dga(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """CSWin-T with DG-Attention, k = 98: 22.32 M parameters."""
    return create_variant("cswin_tiny_dga", pretrained, **{**CSWIN, **DGA, **options})


@register_model
def swin_nano(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """A Swin of small windows for small images."""
    return create_variant("swin_nano", pretrained, **{**SWIN_NANO, **options})


@register_model
def swin_nano_dga(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """The same with DG-Attention, k = 16 as its windows have tokens."""
    return create_variant("swin_nano_dga", pretrained, **{**SWIN_NANO, **DGA, **options})


@register_model
def cswin_nano(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """A CSWin for small images."""
    return create_variant("cswin_nano", pretrained, **{**CSWIN_NANO, **options})


@register_model
def cswin_nano_dga(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
    """The same with DG-Attention, k = 32 as in ``dgt_nano``."""
    return create_variant("cswin_nano_dga", pretrained, **{**CSWIN_NANO, **DGA, **options})
