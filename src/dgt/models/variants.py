"""The models by name: rows of data over one class, registered with timm.

- DGT-T, -S, -B and a small one.
- The ablation of blocks: Swin's, CSWin's and CMT's in all stages of DGT-T, with their own
  feed-forward networks and position encodings.
- The hybrids of the appendix: Swin-T and CSWin-T as they are, and with DG-Attention in the place of
  windows or stripes and a CPE at the block's start in that of the table of positions or LePE.
- Other models of the paper's tables: CSWin, CMT, ViL and CrossFormer.

The nano models are for images of 32 to 64 pixels; at 32, take ``stem_stride=1``.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from dgt.models.compared import ComparedParts
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.inspect import different_residual_keys
from dgt.ops.checks import check_count
from dgt.utils.errors import LOGGER, UserError
from dgt.weights import find_weights, list_weights

PARTS = tuple(field.name for field in fields(ComparedParts))
SOURCES = {"source", "file", "url", "hf_hub_id", "state_dict"}


def create_variant(
    variant: str, pretrained: bool = False, **options: Any
) -> DynamicGroupTransformer:
    """Build a registered model, as timm builds its own.

    Args:
        variant: the model's name.
        pretrained: load trained weights; needs a tag, as in ``dgt_nano.scenes``.
        options: arguments of :class:`DynamicGroupTransformer`, and of
            :class:`dgt.models.compared.ComparedParts` where the parts are not the paper's.
    """
    parts = {name: options.pop(name) for name in PARTS if name in options}
    if parts:
        options["parts"] = ComparedParts(**parts)
    features = {"out_indices": options.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"}
    model: DynamicGroupTransformer = build_model_with_cfg(
        DynamicGroupTransformer, variant, pretrained, feature_cfg=features, **options
    )
    return model


def _default_cfg(name: str) -> dict[str, Any]:
    """Return what timm asks of a model: the size of its images in pixels, and their preparation."""
    nano = "nano" in name
    size = 64 if nano else 224
    crop = 0.9
    if name.startswith("dgt"):
        crop = 0.875
    if nano:
        crop = 1.0
    first_conv: str | tuple[str, ...] = "stem.conv"
    if name.startswith(("dgt", "cmt")):
        first_conv = "stem.convs.0"
    if name.startswith("crossformer"):
        first_conv = tuple(f"stem.patches.convs.{i}" for i in range(4))
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": (size // 32, size // 32),
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "crop_pct": crop,
        "first_conv": first_conv,
        "classifier": "head.fc",
    }


Row = dict[str, Any]

WIDE: Row = {"dims": (96, 192, 384, 768), "num_heads": (3, 6, 12, 24)}
SMALL: Row = {**WIDE, "stem_width": 48, "post_norm": True}
WIDEST: Row = {"dims": (128, 256, 512, 1024), "num_heads": (4, 8, 16, 32)}
BASE: Row = {**WIDEST, "stem_width": 64, "post_norm": True}
NANO: Row = {
    "stem_width": 16,
    "dims": (32, 64, 128, 256),
    "num_heads": (1, 2, 4, 8),
    "depths": (1, 1, 4, 1),
    "num_groups": 16,
    "top_k": 32,
    "head_width": 512,
}
PLAIN: Row = {"cpe": False, "ffn": "mlp"}

# The ablation of blocks. In dgt_nano, windows of 4 x 4, and stripes and reduced maps of 16 tokens
# are what 7 x 7 and 49 are for DGT-T, on maps of 16 to 2 tokens.
SWIN_BLOCK: Row = {**PLAIN, "attention": ("window",) * 4, "extents": (7, 7, 7, 7)}
CSWIN_BLOCK: Row = {**PLAIN, "attention": ("stripe",) * 4, "extents": (1, 2, 7, 0)}
CMT_BLOCK: Row = {"attention": ("reduced",) * 4, "extents": (8, 4, 2, 1)}
NANO_SWIN_BLOCK = {**NANO, **SWIN_BLOCK, "extents": (4, 4, 4, 4)}
NANO_CSWIN_BLOCK = {
    **NANO,
    **CSWIN_BLOCK,
    "extents": (1, 2, 4, 0),
    "num_heads": (2, 2, 4, 8),  # even, for two kinds of stripes
}
NANO_CMT_BLOCK = {**NANO, **CMT_BLOCK, "extents": (4, 2, 1, 1), "table_side": 16}

# The hybrids. Swin's k is the number of keys in a window.
DGA: Row = {"attention": ("group",) * 4, "cpe": True}
SWIN = {**SWIN_BLOCK, **WIDE, "skeleton": "swin", "depths": (2, 2, 6, 2), "top_k": 49}
CSWIN = {**CSWIN_BLOCK, "skeleton": "cswin", "depths": (1, 2, 21, 1)}  # as wide as DGT-T
NANO_DIMS: Row = {"dims": (32, 64, 128, 256), "num_heads": (2, 2, 4, 8), "num_groups": 16}
NANO_SWIN = {
    **SWIN,
    **NANO_DIMS,
    "depths": (2, 2, 4, 2),
    "extents": (4, 4, 4, 4),
    "top_k": 16,
}
NANO_CSWIN = {
    **CSWIN,
    **NANO_DIMS,
    "depths": (1, 1, 4, 1),
    "extents": (1, 2, 4, 0),
    "top_k": 32,
}

# Other models of the paper's tables, from their own papers.
CSWIN_SMALL = {**CSWIN, "depths": (2, 4, 32, 2)}
CSWIN_BASE = {**CSWIN_SMALL, **WIDE, "num_heads": (4, 8, 16, 32)}
CMT_SMALL = {
    **CMT_BLOCK,
    "skeleton": "cmt",
    "depths": (3, 3, 16, 3),
    "num_heads": (1, 2, 4, 8),
    "mlp_ratio": 3.6,
}
VIL: Row = {
    **PLAIN,
    "attention": ("sliding window",) * 4,
    "extents": (15, 15, 15, 15),
    "skeleton": "vil",
    "dims": (96, 192, 384, 768),
    "num_heads": (3, 3, 6, 12),
}
CROSSFORMER: Row = {
    **PLAIN,
    **WIDE,
    "attention": ("long-short",) * 4,
    "extents": (7, 7, 7, 7),
    "intervals": (8, 4, 2, 1),
    "skeleton": "crossformer",
}


ARGUMENTS = """
    Args:
        pretrained: load trained weights; needs a tag, as in ``dgt_nano.scenes``.
        options: arguments of :class:`dgt.models.DynamicGroupTransformer`, such as ``num_classes``.

    Returns:
        The model, in training mode.

    Raises:
        TypeError, ValueError: for an unknown option, or one out of range; for a tag without weights.

    Example:
        >>> model = timm.create_model("NAME", num_classes=10)
"""


class Variant(NamedTuple):
    """A model by name: what `help` says of it, and its arguments."""

    about: str
    row: Row


ROWS: dict[str, Variant] = {
    "dgt_nano": Variant("A DGT for small images and quick trials; not in the paper.", NANO),
    "dgt_tiny": Variant("DGT-T: 24.09 M parameters, 4.35 GFLOPs at 224 px.", {}),
    "dgt_small": Variant(
        "DGT-S: 51.76 M parameters, 9.41 GFLOPs at 224 px; cosine attention, residual post-norm.",
        SMALL,
    ),
    "dgt_base": Variant(
        "DGT-B: 90.28 M parameters, 16.40 GFLOPs at 224 px; cosine attention, residual post-norm.",
        BASE,
    ),
    "dgt_tiny_swin_block": Variant("DGT-T with Swin's blocks: 23.74 M parameters.", SWIN_BLOCK),
    "dgt_tiny_cswin_block": Variant("DGT-T with CSWin's blocks: 23.76 M parameters.", CSWIN_BLOCK),
    "dgt_tiny_cmt_block": Variant(
        "DGT-T with CMT's blocks: 24.71 M parameters, 0.58 M of them for positions.",
        CMT_BLOCK,
    ),
    "dgt_nano_swin_block": Variant("``dgt_nano`` with Swin's blocks.", NANO_SWIN_BLOCK),
    "dgt_nano_cswin_block": Variant("``dgt_nano`` with CSWin's blocks.", NANO_CSWIN_BLOCK),
    "dgt_nano_cmt_block": Variant("``dgt_nano`` with CMT's blocks.", NANO_CMT_BLOCK),
    "swin_tiny": Variant(
        "Swin-T for images of any size, padding masked: 28.29 M parameters.",
        SWIN,
    ),
    "swin_tiny_dga": Variant(
        "Swin-T with DG-Attention, k = 49: 28.31 M parameters.",
        {**SWIN, **DGA},
    ),
    "cswin_tiny": Variant("CSWin-T for images of any size: 22.32 M parameters.", CSWIN),
    "cswin_tiny_dga": Variant(
        "CSWin-T with DG-Attention, k = 98: 22.32 M parameters.",
        {**CSWIN, **DGA},
    ),
    "cswin_small": Variant("CSWin-S: 34.64 M parameters.", CSWIN_SMALL),
    "cswin_base": Variant("CSWin-B: 77.38 M parameters.", CSWIN_BASE),
    "cmt_small": Variant("CMT-S: 24.70 M parameters.", CMT_SMALL),
    "vil_small": Variant(
        "ViL-S (Vision Longformer): 24.64 M parameters.",
        {**VIL, "depths": (1, 2, 8, 1)},
    ),
    "vil_medium": Variant(
        "ViL-M, the deep variant: 39.72 M parameters.",
        {**VIL, "depths": (1, 4, 16, 1)},
    ),
    "vil_base": Variant(
        "ViL-B, the deep variant: 55.70 M parameters.",
        {**VIL, "depths": (1, 8, 24, 1)},
    ),
    "crossformer_small": Variant(
        "CrossFormer-S: 30.66 M parameters.",
        {**CROSSFORMER, "depths": (2, 2, 6, 2)},
    ),
    "crossformer_base": Variant(
        "CrossFormer-B: 51.97 M parameters.",
        {**CROSSFORMER, "depths": (2, 2, 18, 2)},
    ),
    "crossformer_large": Variant(
        "CrossFormer-L: 91.97 M parameters.",
        {**CROSSFORMER, **WIDEST, "depths": (2, 2, 18, 2)},
    ),
    "swin_nano": Variant("A Swin of small windows for small images.", NANO_SWIN),
    "swin_nano_dga": Variant(
        "The same with DG-Attention, k = 16 as its windows have tokens.",
        {**NANO_SWIN, **DGA},
    ),
    "cswin_nano": Variant("A CSWin for small images.", NANO_CSWIN),
    "cswin_nano_dga": Variant(
        "The same with DG-Attention, k = 32 as in ``dgt_nano``.",
        {**NANO_CSWIN, **DGA},
    ),
}
# Tags of trained weights come before the models without one: where no tag is given, timm takes the
# last of a name.
TAGS: dict[str, Row] = {
    "dgt_nano.scenes": {
        "num_classes": 8,
        "interpolation": "bilinear",
        "file": str(list_weights()["dgt_nano.scenes"] / "model.safetensors"),
    },
    "dgt_nano.imagenette": {
        "num_classes": 10,
        "input_size": (3, 128, 128),
        "pool_size": (4, 4),
        "file": str(list_weights()["dgt_nano.imagenette"] / "model.safetensors"),
    },
}
_cfgs: dict[str, Any] = {name: {**_default_cfg(name), **row} for name, row in TAGS.items()}
_cfgs |= {f"{name}.*": _default_cfg(name) for name in ROWS}
default_cfgs = generate_default_cfgs(_cfgs)


def _with_weights(name: str, options: Row) -> Row:
    """Return a model's options with those by which timm loads the weights of their tag.

    The model is built as it was when these were trained.
    """
    tag = options.get("pretrained_cfg")
    overlay = options.get("pretrained_cfg_overlay") or {}
    if SOURCES & set(overlay):
        return options  # the caller says where the weights are
    if tag is None and (tagged := _names_of_weights(name)):
        raise UserError(
            f"pretrained needs the name of trained weights, {' or '.join(tagged)}, got {name}"
        )
    if not isinstance(tag, str):
        return options
    folder = find_weights(f"{name}.{tag}")
    config = _read_config(folder)
    came = config.get("architecture")
    if came is None:
        raise UserError(
            f"{folder} contains no classifier, which timm needs: "
            f"dgt.runs.load_run({folder.name!r}).network is its model"
        )
    if came != name:
        raise UserError(f"{folder} contains weights of {came!r}, not of {name!r}")
    about = {
        **config["pretrained_cfg"],
        "source": "local-dir",
        "file": str(folder),
        "label_names": config["label_names"],
        **overlay,
    }
    built = config["model_args"] | options
    before, now = (arguments.get("residual_keys", 0) for arguments in (config["model_args"], built))
    check_count("residual_keys", now, least=0)
    if now != before:
        LOGGER.warning(different_residual_keys(str(folder), before, now))
    return built | {"pretrained_cfg_overlay": about}


def _names_of_weights(name: str) -> list[str]:
    """The weights of this architecture that timm can build: those of classifiers."""
    return [
        full
        for full, folder in list_weights().items()
        if full.startswith(f"{name}.") and _read_config(folder).get("architecture") == name
    ]


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _register(name: str, variant: Variant) -> Callable[..., DynamicGroupTransformer]:
    """Register a model with timm, and return the function that builds it."""

    def build(pretrained: bool = False, **options: Any) -> DynamicGroupTransformer:
        options = _with_weights(name, options) if pretrained else options
        return create_variant(name, pretrained, **(variant.row | options))

    build.__name__ = name
    build.__qualname__ = name
    build.__doc__ = f"{variant.about}\n{ARGUMENTS.replace('NAME', name)}"
    return register_model(build)


MODELS = {name: _register(name, variant) for name, variant in ROWS.items()}
dgt_nano = MODELS["dgt_nano"]
dgt_tiny = MODELS["dgt_tiny"]
dgt_small = MODELS["dgt_small"]
dgt_base = MODELS["dgt_base"]
