"""The Dynamic Group Transformer (section 3.3): stem, four stages of merging and blocks, head.

All stages but the last attend inside dynamic groups, the last globally; :mod:`dgt.models.variants`
has the sizes. A ``mask`` (B, H, W) of real pixels, wherever one is accepted, keeps the padding of a
batch out: padded tokens never become keys, never count in centroid statistics, and look to every
convolution like its own padding.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from timm.layers import trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from dgt.layers import Block, Head, InvertedResidualFFN
from dgt.layers.reset import reset_parts
from dgt.models.padding import check_images, check_tokens
from dgt.models.parts import Parts, Stage
from dgt.ops.checks import check_count, check_share, describe
from dgt.utils.errors import UserError

# Parameters that are not to decay: position encodings and tables, global tokens, logit scales.
NO_WEIGHT_DECAY = (
    ".cpe.",
    "logit_scale",
    "position_table",
    "relative_position_bias_table",
    "row_position",
    "column_position",
    "global_tokens",
)


def _check_sizes(
    dims: tuple[int, ...],
    depths: tuple[int, ...],
    num_heads: tuple[int, ...],
    stem_stride: int,
    mlp_ratio: float,
) -> None:
    """Raise UserError for sizes that make no model."""
    for name, values in (("dims", dims), ("depths", depths), ("num_heads", num_heads)):
        if not isinstance(values, Sequence):
            raise TypeError(f"{name} must be one int per stage, got {describe(values)}")
    if not len(dims) == len(depths) == len(num_heads):
        came = f"{dims}, {depths}, {num_heads}"
        raise UserError(f"dims, depths and num_heads must be equally long, got {came}")
    if stem_stride not in (1, 2):
        raise UserError(f"stem_stride must be 1 or 2, got {stem_stride}")
    if not isinstance(mlp_ratio, int | float):
        raise TypeError(f"mlp_ratio must be a number, got {describe(mlp_ratio)}")
    if not 0 < mlp_ratio < math.inf:
        raise UserError(f"mlp_ratio must be above 0 and finite, got {mlp_ratio}")
    for dim in dims:
        check_count("dims", dim)
    for depth in depths:
        check_count("depths", depth, least=0)


def _describe_stages(dims: tuple[int, ...], strides: list[int]) -> list[dict[str, Any]]:
    """Return what timm asks of the maps of the stages."""
    return [
        {"num_chs": dim, "reduction": stride, "module": f"stages.{i}"}
        for i, (dim, stride) in enumerate(zip(dims, strides, strict=True))
    ]


class DynamicGroupTransformer(nn.Module):
    """Dynamic Group Transformer for images of any size from 32 x 32 pixels on.

    Args:
        in_chans: channels of the image.
        num_classes: classes; 0 leaves the classifier out.
        global_pool: timm's name of the pooling; "" leaves it out.
        stem_width: channels of the stem.
        stem_stride: stride of the stem's first convolution: 2, or 1 for very small images (all
            strides halve).
        dims, depths, num_heads: channels, blocks and heads of the stages.
        num_groups, top_k: G and k of the stages that attend in groups.
        mlp_ratio: expansion R of the feed-forward networks.
        post_norm: residual post-norm and cosine attention (DGT-S and -B).
        head_width: channels of the head's 1x1 convolution.
        tau, tau_weighs, backend: as in :class:`dgt.DGAttention`.
        residual_keys: M, as there, of the stages that attend in groups.
        drop_rate: dropout rate before the classifier.
        proj_drop_rate: dropout rate of the feed-forward networks.
        drop_path_rate: stochastic depth rate of the last block; it grows linearly from 0.
        parts: what stem, merging, attention and blocks are.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> model = DynamicGroupTransformer(num_classes=10)
        >>> model(torch.randn(2, 3, 224, 224)).shape
        torch.Size([2, 10])
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
        mlp_ratio: float = 4.0,
        post_norm: bool = False,
        head_width: int = 1280,
        tau: float | None = None,
        tau_weighs: str = "old",
        backend: str = "auto",
        residual_keys: int = 0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        parts: Parts = Parts(),  # noqa: B008 (it has no state)
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        _check_sizes(dims, depths, num_heads, stem_stride, mlp_ratio)
        check_count("in_chans", in_chans)
        check_count("num_classes", num_classes, least=0)
        check_count("stem_width", stem_width)
        check_count("head_width", head_width)
        check_share("drop_rate", drop_rate)
        check_share("proj_drop_rate", proj_drop_rate)
        check_share("drop_path_rate", drop_path_rate)
        parts.check(len(dims))
        factory = {"device": device, "dtype": dtype}
        groups = {
            "num_groups": num_groups,
            "top_k": top_k,
            "tau": tau,
            "tau_weighs": tau_weighs,
            "backend": backend,
            "residual_keys": residual_keys,
        }
        block = {"mlp_ratio": mlp_ratio, "post_norm": post_norm, "drop": proj_drop_rate}
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.patches = parts.patches
        self.grad_checkpointing = False
        stages = [2 * stem_stride * 2**i for i in range(len(dims))]
        # Of the stem and of every stage.
        self.strides = [stages[0] if parts.patches else stem_stride, *stages]
        self.feature_info = _describe_stages(dims, stages)
        self.stem = parts.make_stem(in_chans, stem_width, dims[0], self.strides[0], **factory)
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").split(list(depths))
        self.stages = nn.ModuleList()
        widths = (stem_width, *dims)
        for i, heads in enumerate(num_heads):
            ends = (widths[i], widths[i + 1])
            drops, last = rates[i].tolist(), i == len(dims) - 1
            stage = parts.make_stage(i, last, ends, heads, drops, groups, block, **factory)
            self.stages.append(stage)
        self.num_features = dims[-1]
        hidden = None if parts.patches else head_width
        self.head = Head(dims[-1], hidden, num_classes, global_pool, drop_rate, **factory)
        self.head_hidden_size = self.head.num_features * self.head.global_pool.feat_mult()
        if next(self.parameters()).device.type != "meta":
            self.init_weights(needs_reset=False)

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize linears with a truncated normal of 0.02, convolutions as Kaiming et al.

        The linears of CMT's feed-forward network are convolutions of 1x1 there. The convolutions
        of patches (Swin, CSWin, ViL, CrossFormer) keep PyTorch's weights.

        Args:
            needs_reset: as in timm, reset all other parameters and buffers before, whatever they
                hold, as after ``to_empty``; False where the modules are new.
        """
        if needs_reset:
            reset_parts(self)
        pointwise: list[nn.Linear] = []
        for module in self.modules():
            if isinstance(module, InvertedResidualFFN):
                pointwise += [module.expand, module.project]
            if isinstance(module, nn.Linear | nn.Conv2d):
                if isinstance(module, nn.Linear) and module not in pointwise:
                    trunc_normal_(module.weight, std=0.02)
                elif not self.patches:
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, Block) and module.post_norm:
                self._start_as_identity(module)

    def _start_as_identity(self, block: Block) -> None:
        """Make a block with post-norm initially return its input (Swin v2)."""
        for norm in (block.norm1, block.norm2):
            nn.init.zeros_(norm.weight)
            nn.init.zeros_(norm.bias)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that are not to decay."""
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if any(part in name for part in NO_WEIGHT_DECAY)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that sort parameters by depth, for layer-wise learning rates."""
        if coarse:
            return {"stem": r"^stem", "blocks": r"^stages\.(\d+)"}
        merges = (r"^stages\.(\d+)\.merge", (0,))
        blocks = (r"^stages\.(\d+)\.blocks\.(\d+)", None)
        return {"stem": r"^stem", "blocks": [merges, blocks]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of blocks for the backward pass, and compute the rest again.

        Gradients and centroids stay what they are; BatchNorm counts every batch twice, as always
        in PyTorch.
        """
        self.grad_checkpointing = enable
        for stage in cast(list[Stage], self.stages):
            stage.grad_checkpointing = enable

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
        """Return masks of real tokens for the stem and every stage.

        ``mask`` is bool (B, H, W), True where a pixel is real, or None.
        """
        return [None if mask is None else mask[:, ::stride, ::stride] for stride in self.strides]

    def _check_residual_keys(self, x: Tensor) -> None:
        """Raise UserError for images with fewer tokens than a stage has residual keys."""
        for i, stage in enumerate(cast(list[Stage], self.stages)):
            for block in stage.blocks:
                residual_keys = getattr(block.attn, "residual_keys", 0)
                if residual_keys > 1:  # every image has one token
                    check_tokens(x, i + 1, self.strides[i + 1], residual_keys)

    def embed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map images to the stem's (B, H', W', C); arguments as in :meth:`forward_features`."""
        x = check_images(x, self.in_chans, mask)
        self._check_residual_keys(x)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(1), 0.0)  # whatever it holds, NaN included
        return self.stem(x, self.masks(mask)[0])

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to the last stage's (B, C, H / 32, W / 32) map.

        ``mask`` is bool (B, H, W), True where a pixel is real. Errors as in :func:`check_images`.
        """
        x = self.embed(x, mask)
        masks = self.masks(mask)
        for i, stage in enumerate(self.stages):
            x = stage(x, masks[i + 1])
        return x.permute(0, 3, 1, 2)

    def forward_head(
        self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Map (B, C, h, w) features to (B, num_classes); as :meth:`dgt.layers.Head.forward`."""
        return self.head(x, pre_logits, mask)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, num_classes) logits.

        For a padded batch, call :meth:`forward_features` with its mask, and :meth:`forward_head`
        with ``mask=model.masks(mask)[-1]``.
        """
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
            raise UserError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        x = self.embed(x, mask)
        masks = self.masks(mask)
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
