"""The Dynamic Group Transformer (section 3.3): stem, four stages of patch merging and blocks, classifier head.

The first three stages attend inside dynamic groups, the last globally. Variants are rows of data over one class, and
register with timm. A ``mask`` (B, H, W) of real pixels, wherever one is accepted, keeps the padding of a batch out:
padded tokens never become keys, never count in centroid statistics, and look to every convolution like its own padding.
"""

from typing import Any, cast

import torch
from timm.layers import SelectAdaptivePool2d, trunc_normal_
from timm.models import (
    build_model_with_cfg,
    checkpoint,
    generate_default_cfgs,
    register_model,
    register_notrace_function,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from dgt.layers import Block, ConvStem, DGAttention, GlobalAttention, PatchMerging
from dgt.layers.convolution import keep_real

MIN_SIZE = 32  # pixels a side


@register_notrace_function
def check_images(x: Tensor, in_chans: int) -> Tensor:
    """Return ``x`` unchanged if it is a (B, in_chans, H, W) batch of at least 32 x 32 pixels.

    Raises:
        ValueError: otherwise, saying what came.
    """
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"images must be a (B, {in_chans}, H, W) tensor, got shape {x.shape}")
    if x.shape[2] < 32 or x.shape[3] < 32:
        raise ValueError(f"images must be at least 32 x 32 pixels, got {x.shape[2]} x {x.shape[3]}")
    return x


class Stage(nn.Module):
    """Patch merging, then blocks.

    Args:
        in_dim: channels in.
        dim: channels out.
        blocks: the blocks.
    """

    def __init__(self, in_dim: int, dim: int, blocks: list[Block], **factory: Any) -> None:
        super().__init__()
        self.merge = PatchMerging(in_dim, dim, **factory)
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim); ``mask`` is at the resolution of the result."""
        x = self.merge(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, mask)
            else:
                x = block(x, mask)
        return keep_real(x, mask)


class Head(nn.Module):
    """1x1 convolution, BatchNorm, SiLU, global pooling, linear classifier (CMT's head).

    Args:
        in_dim: channels in.
        hidden: channels of the convolution.
        num_classes: classes; 0 leaves the classifier out.
        pool: timm's name of the pooling; "" leaves it out, and the classifier becomes a 1x1 convolution.
        drop: dropout rate before the classifier.
    """

    def __init__(
        self, in_dim: int, hidden: int, num_classes: int, pool: str = "avg", drop: float = 0.0, **factory: Any
    ) -> None:
        super().__init__()
        self.num_features = hidden
        self.conv: nn.Module = nn.Conv2d(in_dim, hidden, 1, **factory)
        self.norm: nn.Module = nn.BatchNorm2d(hidden, **factory)
        self.act: nn.Module = nn.SiLU()
        self.drop = nn.Dropout(drop)
        self.reset(num_classes, pool, **factory)

    def reset(self, num_classes: int, pool: str | None = None, **factory: Any) -> None:
        """Replace classifier and, if ``pool`` is given, pooling."""
        if pool is not None:
            self.global_pool = SelectAdaptivePool2d(pool_type=pool, flatten=bool(pool)).train(self.training)
        width = self.num_features * self.global_pool.feat_mult()
        if num_classes == 0:
            self.fc: nn.Module = nn.Identity()
        elif self.global_pool.is_identity():
            self.fc = nn.Conv2d(width, num_classes, 1, **factory)
        else:
            self.fc = nn.Linear(width, num_classes, **factory)
        self.fc.train(self.training)

    def remove_hidden(self, in_dim: int) -> None:
        """Drop convolution and BatchNorm, leaving pooling: for a backbone that only yields features."""
        self.conv, self.norm, self.act, self.num_features = nn.Identity(), nn.Identity(), nn.Identity(), in_dim
        self.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (B, C, H, W) to (B, num_classes); with ``pre_logits`` to what the classifier gets."""
        x = self.drop(self.global_pool(self.act(self.norm(self.conv(x)))))
        return x if pre_logits else self.fc(x)


class DynamicGroupTransformer(nn.Module):
    """Dynamic Group Transformer for images of any size from 32 x 32 pixels on, without being told the size.

    Args:
        in_chans: channels of the image.
        num_classes: classes; 0 leaves the classifier out.
        global_pool: timm's name of the pooling; "" leaves it out.
        stem_width: channels of the stem.
        stem_stride: stride of the stem's first convolution: 2, or 1 for very small images (all strides halve).
        dims, depths, num_heads: channels, blocks and heads of the four stages.
        num_groups, top_k: G and k of the stages that attend in groups.
        attention: kind of attention of each stage, ``"group"`` or ``"global"``.
        mlp_ratio: expansion R of the feed-forward networks.
        post_norm: residual post-norm and cosine attention (DGT-S and -B).
        head_width: channels of the head's 1x1 convolution.
        tau, tau_weighs, backend: as in :class:`dgt.DGAttention`.
        drop_rate: dropout rate before the classifier.
        proj_drop_rate: dropout rate of the feed-forward networks.
        drop_path_rate: stochastic depth rate of the last block; it grows linearly from 0.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        stem_width: int = 32,
        stem_stride: int = 2,
        dims: tuple[int, ...] = (64, 128, 256, 512),
        depths: tuple[int, ...] = (1, 2, 17, 2),
        num_heads: tuple[int, ...] = (2, 4, 8, 16),
        num_groups: int = 48,
        top_k: int = 98,
        attention: tuple[str, ...] = ("group", "group", "group", "global"),
        mlp_ratio: float = 4.0,
        post_norm: bool = False,
        head_width: int = 1280,
        tau: float | None = None,
        tau_weighs: str = "new",
        backend: str = "auto",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if stem_stride not in (1, 2):
            raise ValueError(f"stem_stride must be 1 or 2, got {stem_stride}")
        if not len(dims) == len(depths) == len(num_heads) == len(attention):
            raise ValueError(
                f"dims, depths, num_heads and attention must be equally long, got {dims}, {depths}, "
                f"{num_heads}, {attention}"
            )
        factory = {"device": device, "dtype": dtype}
        self.in_chans, self.num_classes = in_chans, num_classes
        self.grad_checkpointing = False
        self.strides = [stem_stride * 2**i for i in range(len(dims) + 1)]  # of the stem and of every stage
        self.feature_info = [
            {"num_chs": dim, "reduction": stride, "module": f"stages.{i}"}
            for i, (dim, stride) in enumerate(zip(dims, self.strides[1:], strict=True))
        ]
        self.stem = ConvStem(in_chans, stem_width, stem_stride, **factory)
        group_options = {
            "num_groups": num_groups,
            "top_k": top_k,
            "tau": tau,
            "tau_weighs": tau_weighs,
            "backend": backend,
        }
        drop_paths = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").split(list(depths))
        stages: list[Stage] = []
        for i, dim in enumerate(dims):
            blocks = [
                Block(
                    dim,
                    make_attention(attention[i], dim, num_heads[i], post_norm, group_options, factory),
                    mlp_ratio,
                    post_norm,
                    proj_drop_rate,
                    drop_path,
                    **factory,
                )
                for drop_path in drop_paths[i].tolist()
            ]
            stages.append(Stage(dims[i - 1] if i else stem_width, dim, blocks, **factory))
        self.stages = nn.ModuleList(stages)
        self.num_features = dims[-1]
        self.head = Head(dims[-1], head_width, num_classes, global_pool, drop_rate, **factory)
        self.head_hidden_size = self.head.num_features * self.head.global_pool.feat_mult()
        if self.head.conv.weight.device.type != "meta":
            self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialise linears with a truncated normal of 0.02, convolutions with Kaiming's of their fan-out."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, Block) and module.post_norm:  # every block starts as the identity (Swin v2)
                for norm in (module.norm1, module.norm2):
                    nn.init.zeros_(norm.weight)
                    nn.init.zeros_(norm.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not to decay: position encodings and logit scales."""
        return {name for name, _ in self.named_parameters() if ".cpe." in name or name.endswith("logit_scale")}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that sort parameters by depth, for layer-wise learning rates."""
        blocks = (
            r"^stages\.(\d+)"
            if coarse
            else [(r"^stages\.(\d+)\.merge", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        )
        return {"stem": r"^stem", "blocks": blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of blocks for the backward pass, and compute the rest again."""
        self.grad_checkpointing = enable
        for stage in cast(list[Stage], self.stages):
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier (0 classes: remove it) and, if given, the pooling."""
        self.num_classes = num_classes
        weight = next(self.parameters())
        self.head.reset(num_classes, global_pool, device=weight.device, dtype=weight.dtype)
        self.head_hidden_size = self.head.num_features * self.head.global_pool.feat_mult()

    def masks(self, mask: Tensor | None) -> list[Tensor | None]:
        """Masks of real tokens for the stem and every stage, from a bool (B, H, W) mask of real pixels (or None)."""
        return [None if mask is None else mask[:, ::stride, ::stride] for stride in self.strides]

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to the last stage's (B, C, H / 32, W / 32) map.

        Args:
            x: images, at least 32 x 32 pixels.
            mask: optional bool (B, H, W), True where a pixel is real.

        Raises:
            ValueError: for another shape or a smaller image.
        """
        x = check_images(x, self.in_chans)
        masks = self.masks(mask)
        x = self.stem(keep_real_pixels(x, mask), masks[0])
        for i, stage in enumerate(self.stages):
            x = stage(x, masks[i + 1])
        return x.permute(0, 3, 1, 2)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (B, C, h, w) features to (B, num_classes); with ``pre_logits`` to what the classifier gets."""
        return self.head(x, pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Return the last feature map and those of chosen stages.

        Args:
            x: (B, in_chans, H, W) images.
            indices: stages: the last n if an int, all if None.
            norm: accepted as timm calls it; the model has no final norm.
            stop_early: leave out the stages after the last chosen one.
            output_fmt: "NCHW", or "NHWC".
            intermediates_only: return only the list.
            mask: optional bool (B, H, W), True where a pixel is real.

        Returns:
            ``(features, maps)``, or ``maps``.

        Raises:
            ValueError: for another ``output_fmt``, or images as in :meth:`forward_features`.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        x = check_images(x, self.in_chans)
        masks = self.masks(mask)
        x = self.stem(keep_real_pixels(x, mask), masks[0])
        maps = []
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x, masks[i + 1])
            if i in take:
                maps.append(x if output_fmt == "NHWC" else x.permute(0, 3, 1, 2))
        return maps if intermediates_only else (x.permute(0, 3, 1, 2), maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last chosen one, and the head; return the chosen stages."""
        take, last = feature_take_indices(len(self.stages), indices)
        shorter = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if prune_head or shorter:
            self.num_features = int(self.feature_info[last]["num_chs"])
            self.head.remove_hidden(self.num_features)
            self.reset_classifier(0, "")
        return list(take)


def make_attention(
    kind: str, dim: int, num_heads: int, cosine: bool, group_options: dict[str, Any], factory: dict[str, Any]
) -> nn.Module:
    """Build one attention layer of a stage.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind == "group":
        return DGAttention(dim, num_heads, cosine=cosine, **group_options, **factory)
    if kind == "global":
        return GlobalAttention(dim, num_heads, cosine=cosine, **factory)
    raise ValueError(f"attention must be 'group' or 'global' for every stage, got {kind!r}")


def keep_real_pixels(images: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding of (B, C, H, W) images; ``mask`` is bool (B, H, W), True where a pixel is real, or None."""
    return images if mask is None else images * mask.unsqueeze(1)


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
