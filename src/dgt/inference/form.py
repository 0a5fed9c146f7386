"""The form of a model that only predicts: the same outputs from fewer and larger steps.

Normalisations move into convolutions (:mod:`dgt.inference.fuse_bn`); the attention is one operator
(:mod:`dgt.inference.attention`), its centroids are brought to unit norm once and for all. Linears are 1x1 convolutions,
which oneDNN runs on channels-last tokens without copies, and about twice as fast as the matrix product of linears on
processors that the vendor's BLAS does not favour. Packing of weights is a compiler's or another runtime's
(docs/export.md).
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.inference.attention import attention
from dgt.inference.fuse_bn import FoldedConv, PredictsOnly, affine, fold_after, fold_before
from dgt.layers.attention import DGAttention, GlobalAttention
from dgt.layers.convolution import ConvStem, InvertedResidualFFN
from dgt.layers.head import Head
from dgt.layers.scripting import check_layer_input
from dgt.ops.backends import resolve_backend
from dgt.utils.errors import UserError


def optimize_for_inference(model: nn.Module) -> nn.Module:
    """Return a copy of a model in the form that only predicts: faster, equal outputs up to rounding.

    The model itself, which is what to train, save and export, stays as it is.

    Args:
        model: any module that contains parts of this package: a model of :func:`timm.create_model`, a backbone, a
            detector around one. Everything else in it stays as it is.

    Returns:
        The copy, in evaluation mode, without gradients; it cannot be trained.

    Raises:
        TypeError: if ``model`` is no module.
        ValueError: if it contains nothing that has such a form.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if not any(type(module) in FORMS for module in model.modules()):
        raise UserError(f"model must contain parts of a DGT, got a {type(model).__name__} without any")
    with torch.inference_mode(False):
        twin = inference_form(copy.deepcopy(model))
        return twin.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def inference_form(module: nn.Module) -> nn.Module:
    """Return a module with every part, at any depth, in the form that only predicts; may change it in place."""
    if type(module) in FORMS:
        return FORMS[type(module)](module)
    for name, child in list(module.named_children()):
        setattr(module, name, inference_form(child))
    return module


def takes_gradients(x: Tensor) -> bool:
    """Tell whether what is computed from a tensor must be differentiable."""
    return torch.is_grad_enabled() and x.requires_grad


def _gelu(x: Tensor) -> Tensor:
    """GELU of a tensor that nobody else holds: in place, unless gradients ask for it."""
    return F.gelu(x) if takes_gradients(x) else torch.ops.aten.gelu_(x)


class FoldedStem(PredictsOnly):
    """A :class:`ConvStem` whose first two normalisations are folded into the convolutions after them."""

    scale: Tensor
    shift: Tensor

    def __init__(self, stem: ConvStem) -> None:
        super().__init__()
        (first, *convs), (*norms, last) = cast(Any, stem.convs), cast(Any, stem.norms)
        self.first = first
        self.others = nn.ModuleList(FoldedConv(*pair) for pair in zip(convs, norms, strict=True))
        for name, value in zip(("scale", "shift"), affine(last), strict=True):
            self.register_buffer(name, value.detach()[:, None, None].to(first.weight.dtype))

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, H', W', width); ``mask`` is (B, H', W')."""
        x = _gelu(self.first(image.contiguous(memory_format=torch.channels_last)))
        for conv in self.others:
            x = _gelu(conv(x, mask))
        x = torch.addcmul(self.shift, x, self.scale)
        return (x if mask is None else x * mask.unsqueeze(1)).permute(0, 2, 3, 1)


class FoldedFFN(PredictsOnly):
    """An :class:`InvertedResidualFFN` whose three normalisations and residual are folded into its convolutions."""

    def __init__(self, ffn: InvertedResidualFFN) -> None:
        super().__init__()
        self.expand = ffn.expand
        self.depthwise = FoldedConv(ffn.depthwise, ffn.norm1, residual=True)
        self.project = fold_after(fold_before(ffn.norm2, ffn.project), ffn.norm3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        x = self.depthwise(_gelu(self.expand(x.permute(0, 3, 1, 2))), mask)
        projected: Tensor = self.project(_gelu(x))
        return projected.permute(0, 2, 3, 1)


class TokenLinear(PredictsOnly):
    """A linear of channels-last tokens, computed as the 1x1 convolution that it is."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = nn.Parameter(linear.weight.detach()[:, :, None, None]), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., C) to the same shape with other channels."""
        tokens = x if x.dim() == 4 else x.reshape(len(x), 1, -1, x.shape[-1])
        tokens = F.conv2d(tokens.permute(0, 3, 1, 2), self.weight, self.bias).permute(0, 2, 3, 1)
        return tokens if x.dim() == 4 else tokens.reshape(*x.shape[:-1], self.out_features)


class InferenceDGAttention(DGAttention):
    """A :class:`DGAttention` that only predicts: unit centroids once and for all, the whole attention one operator."""

    def __init__(self, source: DGAttention) -> None:
        heads, groups, channels = source.centroids.shape
        settings: dict[str, Any] = {"cosine": source.cosine, "backend": source.backend, "device": "meta"}
        super().__init__(heads * channels, heads, groups, source.top_k, **settings)
        self.qkv, self.proj = TokenLinear(source.qkv), TokenLinear(source.proj)  # type: ignore[assignment]
        if source.cosine:
            self.logit_scale = source.logit_scale
        self.centroids, self.num_updates, self.seeded = source.unit_centroids(), source.num_updates, source.seeded

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) or (B, L, C) to the same shape; ``mask`` is bool, True where a token is real."""
        if x.device.type != "cpu" or takes_gradients(x) or resolve_backend(self.backend, x) != "eager":
            return super().forward(x, mask)
        check_layer_input(x, self.qkv.in_features, mask)
        qkv = self.qkv(x).flatten(1, -2).unflatten(-1, [3, self.num_heads, x.shape[-1] // self.num_heads])
        qkv = qkv.permute(2, 0, 3, 1, 4).contiguous()  # (3, B, H, L, D)
        qkv = torch.stack([*self.comparable(qkv[0], qkv[1]), qkv[2]]) if self.cosine else qkv
        real = None if mask is None else mask.flatten(1)
        projected: Tensor = self.proj(attention(qkv, self.centroids, self.top_k, self.scale, real).view(x.shape))
        return projected


def _with_token_linears(attention: GlobalAttention) -> GlobalAttention:
    if not isinstance(attention.qkv, TokenLinear):
        attention.qkv, attention.proj = TokenLinear(attention.qkv), TokenLinear(attention.proj)  # type: ignore[assignment]
    return attention


def _with_folded_norm(head: Head) -> Head:
    if isinstance(head.conv, nn.Conv2d) and isinstance(head.norm, nn.BatchNorm2d):
        head.conv, head.norm = fold_after(head.conv, head.norm), nn.Identity()
    return head


FORMS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    ConvStem: FoldedStem,
    DGAttention: InferenceDGAttention,
    GlobalAttention: _with_token_linears,
    InvertedResidualFFN: FoldedFFN,
    Head: _with_folded_norm,
}
