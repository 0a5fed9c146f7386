"""DG-Attention in models that exist: timm's ViT and DeiT, Swin, and Twins, keeping their weights.

Projections, norms and feed-forward networks stay the same modules under the same names; only what
decides which tokens attend to which is new. In a ViT, class and register tokens belong to no group:
they attend to all tokens, every token attends to them in addition to the k patches of its group,
and centroids are learned from patches alone. So with k of at least the number of patches the
model's outputs are what they were. In Swin the windows, their shift, mask and table of positions
go, and each block gets a CPE at its start in the table's place, as in the paper's appendix; it
begins at zero. In Twins the windows go; its attention over a reduced map and its position encoding
stay.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

from timm.models import register_notrace_module
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.twins import LocallyGroupedAttn
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from dgt.acceleration.intercept import original_class
from dgt.acceleration.prefix_tokens import count_prefix_tokens
from dgt.layers import ConditionalPositionEncoding, DGAttention
from dgt.layers.plain import can_be_skipped
from dgt.models.inspect import LayerInput, capture
from dgt.ops import DynamicGroupAttentionOutput
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import UserError

SUPPORTED = (
    "timm's vision_transformer.Attention, swin_transformer.SwinTransformerBlock "
    "and twins.LocallyGroupedAttn"
)
IS_ATTENTION = re.compile(r"Att(entio)?n(?!.*Pool)")  # names of classes, but not pooling
KEPT = ("GlobalSubSampleAttn",)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SETTINGS = ("num_groups", "top_k", "tau", "tau_weighs", "backend", "residual_keys")


@register_notrace_module
@can_be_skipped
class TimmDGAttention(DGAttention):
    """DG-Attention in the place of an attention of timm, made of its projections, norms and dropout.

    Args:
        old: an attention of timm with ``qkv`` and ``proj``; its modules are shared, not copied.
        num_prefix_tokens: class and register tokens before the patches; they belong to no group.
        settings: ``num_groups``, ``top_k``, ``tau``, ``tau_weighs``, ``backend`` and
            ``residual_keys``, as in :class:`dgt.DGAttention`.
    """

    def __init__(self, old: Any, num_prefix_tokens: int = 0, **settings: Any) -> None:
        weight = old.qkv.weight
        factory = {"device": weight.device, "dtype": weight.dtype}
        super().__init__(weight.shape[1], old.num_heads, **factory, **settings)
        self.qkv = old.qkv
        self.proj = old.proj
        self.scale = old.scale
        self.q_norm = getattr(old, "q_norm", nn.Identity())
        self.k_norm = getattr(old, "k_norm", nn.Identity())
        self.norm = getattr(old, "norm", nn.Identity())
        self.proj_drop = old.proj_drop
        self.num_prefix_tokens = num_prefix_tokens
        self.train(old.training)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | tuple[int, int] | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Map (B, L, C) or (B, H, W, C) to the same shape; timm's arguments.

        Twins passes the size of the map in the mask's place, which groups need not know.

        Raises:
            ValueError: for a mask, which groups cannot respect, for no tokens after the prefix, or
                as in :class:`dgt.DGAttention`.
        """
        if isinstance(attn_mask, Tensor) or is_causal:
            raise UserError(
                "attn_mask must be None and is_causal False: "
                "DG-Attention does not support pairwise masks"
            )
        return super().forward(x)

    def inspect(self, x: Tensor, mask: Tensor | None = None) -> DynamicGroupAttentionOutput:
        """Return what :meth:`dgt.DGAttention.inspect` does.

        Raises:
            ValueError: for a mask.
        """
        if mask is not None:
            raise UserError(
                "mask must be None: models with replaced attention do not support padding"
            )
        return super().inspect(x)

    def merge_heads(self, attended: Tensor, x: Tensor) -> Tensor:
        """Project (B, H, L, D) back to the shape of ``x``, with the model's norm and dropout."""
        merged = self.norm(attended.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(merged)).view(x.shape)

    def split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, ..., C) to query, key and value (B, H, L, D), with the model's norms."""
        query, key, value = super().split_heads(x)
        prefix = self.num_prefix_tokens
        if prefix and prefix >= key.shape[2]:
            raise UserError(
                f"x must have more tokens than the prefix of {prefix}, got {key.shape[2]}"
            )
        # Under autocast norms return float32.
        return self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype), value


class SwinDGBlock(nn.Module):
    """A block of timm's Swin with DG-Attention: (B, H, W, C) in and out, of any size.

    Args:
        old: the block; its modules are shared.
        attention: takes the place of windows, shift, mask and position table.
        cpe: whether the block gets a conditional position encoding, which begins at zero.
    """

    def __init__(self, old: Any, attention: TimmDGAttention, cpe: bool) -> None:
        super().__init__()
        weight = old.norm1.weight
        self.cpe = None
        if cpe:
            factory = {"device": weight.device, "dtype": weight.dtype}
            self.cpe = ConditionalPositionEncoding(len(weight), **factory)
            nn.init.zeros_(self.cpe.conv.weight)
            nn.init.zeros_(cast(Tensor, self.cpe.conv.bias))
        self.norm1 = old.norm1
        self.attn = attention
        self.drop_path1 = old.drop_path1
        self.norm2 = old.norm2
        self.mlp = old.mlp
        self.drop_path2 = old.drop_path2
        self.train(old.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        if self.cpe is not None:
            x = x + self.cpe(x)
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def set_input_size(self, *_: Any, **__: Any) -> None:
        """Do nothing: timm calls this to resize windows, and there are none."""


def replace_attention(
    model: nn.Module, num_prefix_tokens: int | None = None, cpe: bool = True, **settings: Any
) -> list[str]:
    """Put DG-Attention into a timm model in place, keeping its weights.

    Args:
        model: ViT, DeiT, Swin or Twins of timm, or any module built of their attention.
        num_prefix_tokens: class and register tokens before the patches; None asks the model (0 if
            it does not say).
        cpe: whether Swin's blocks get a conditional position encoding for the table of positions
            that they lose.
        settings: ``num_groups``, ``top_k``, ``tau``, ``tau_weighs``, ``backend`` and
            ``residual_keys``, as in :class:`dgt.DGAttention`. With residual keys a model keeps what
            it learned with global attention (with :func:`calibrate`, without training).

    Returns:
        The names of the modules replaced, in order.

    Raises:
        TypeError: if ``model`` is no module, or for an unknown setting or one of a wrong type.
        ValueError: naming the module, for an attention of another kind, or one with parts that
            DG-Attention lacks (dropout of the attention, gates, heads of another width, hooks); for a
            model without attention; for a setting out of range. The model is then as it was.

    Example:
        >>> model = timm.create_model("deit_small_patch16_224")
        >>> len(dgt.replace_attention(model, top_k=98))
        12
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if num_prefix_tokens is not None:
        check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(f"settings must be among {', '.join(SETTINGS)}, got {name!r}")
    found = dict(_attentions(model))
    if not found:
        kind = type(model).__name__
        raise UserError(
            f"model must contain attention to replace ({SUPPORTED}), got a {kind} without any"
        )
    new: dict[int, nn.Module] = {}  # by identity: a module used in two places is replaced by one
    for name, old in found.items():
        prefix = num_prefix_tokens
        if prefix is None:
            prefix = count_prefix_tokens(model, name) or 0
        if num_prefix_tokens and not isinstance(old, Attention):
            raise UserError(
                f"num_prefix_tokens must be 0 or None at {name!r}, which has windows and no such tokens, "
                f"got {num_prefix_tokens}"
            )
        if id(old) not in new:
            new[id(old)] = _make_replacement(old, prefix, cpe, settings)
    for name, old in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[id(old)])
    return list(found)


def calibrate(model: nn.Module, images: Tensor) -> list[str]:
    """Seed the centroids of a model from images instead of from training, in one forward pass.

    Layers are seeded as the images pass through them, each after those before it.

    Args:
        model: after :func:`replace_attention`, or a DGT. Its mode stays.
        images: its inputs, (B, C, H, W); a few dozen images of the kind that it will
            see are enough.

    Returns:
        The names of the layers, in the order in which they ran.

    Raises:
        TypeError, ValueError: as :func:`dgt.models.capture`; for no images, and for NaN or infinities.

    Example:
        >>> dgt.replace_attention(model, num_groups=48, top_k=98, residual_keys=1)
        >>> dgt.calibrate(model, images)
    """

    def seed(seen: LayerInput) -> str:
        query, _, _ = seen.layer.split_heads(seen.x)
        query = query[:, :, seen.prefix :]
        if not query.numel() or not query.isfinite().all():
            raise UserError(
                f"images must give some queries at {seen.name!r}, all finite, got {describe(images)}"
            )
        real = None if seen.mask is None else seen.mask.flatten(1)
        seen.layer.seed(query, real, anew=True)
        return seen.name

    return capture(model, images, seed)[0]


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what is to be replaced, by name, having checked that all of it can be."""
    inside = None  # prefix of the names inside a block that is replaced as a whole
    for name, module in model.named_modules(remove_duplicate=False):
        if inside is not None and name.startswith(inside):
            continue
        kind = original_class(module)  # accelerated attention is replaced, too
        if kind in (Attention, LocallyGroupedAttn, SwinTransformerBlock):
            if not name:
                raise UserError(f"model must contain attention, got a bare {kind.__name__}")
            attention = module.attn if isinstance(module, SwinTransformerBlock) else module
            _check_parts(name, attention)
            for part in {module, attention}:
                _check_calls(name, part)
            inside = f"{name}."
            yield name, module
        elif isinstance(module, DGAttention) or kind.__name__ in KEPT:
            inside = f"{name}."
        elif IS_ATTENTION.search(kind.__name__):
            raise UserError(
                f"model must contain only attention that can be replaced ({SUPPORTED}), "
                f"got {kind.__module__}.{kind.__name__} at {name!r}"
            )


def _check_parts(name: str, old: Any) -> None:
    """Check that an attention has no part that DG-Attention lacks."""
    dim = old.qkv.in_features
    widths = (old.qkv.out_features, old.proj.in_features, old.proj.out_features)
    if widths != (3 * dim, dim, dim):
        raise UserError(
            f"attention to replace must be as wide as its input, got {old.qkv} and {old.proj} "
            f"at {name!r}"
        )
    if old.attn_drop.p > 0:
        raise UserError(
            f"attention to replace must have no dropout (attn_drop_rate=0), got {old.attn_drop.p} "
            f"at {name!r}"
        )
    if getattr(old, "gate", None) is not None:
        raise UserError(f"attention to replace must have no gate, got one at {name!r}")


def _check_calls(name: str, old: nn.Module) -> None:
    """Check that nothing but its class decides what a call of a module does: it would go with the module."""
    if any(getattr(old, hooks) for hooks in HOOKS) or "forward" in vars(old):
        raise UserError(
            f"attention to replace must have no hooks and no forward of its own, got one at {name!r}: "
            "set them after it is replaced"
        )


def _make_replacement(
    old: nn.Module, prefix: int, cpe: bool, settings: dict[str, Any]
) -> nn.Module:
    """Make what takes the place of an attention, or of a block of Swin."""
    if isinstance(old, SwinTransformerBlock):
        return SwinDGBlock(old, TimmDGAttention(old.attn, **settings), cpe)
    return TimmDGAttention(old, prefix if isinstance(old, Attention) else 0, **settings)
