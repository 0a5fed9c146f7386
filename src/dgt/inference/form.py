"""The form of a model that only predicts: the same outputs from fewer and larger steps.

Normalisations move into convolutions (:mod:`dgt.inference.fuse_bn`), which keep their weights packed
(:mod:`dgt.inference.prepacked_conv`); the attention is one operator (:mod:`dgt.inference.attention`), its centroids are
brought to unit norm once and for all; residuals are added in place. Linears are 1x1 convolutions, which oneDNN runs on
channels-last tokens without copies, and about twice as fast as the matrix product of linears on processors that the
vendor's BLAS does not favour.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.inference.attention import attention
from dgt.inference.fuse_bn import FoldedConv, affine, fold_after, fold_before
from dgt.inference.prepacked_conv import PackedConv, takes_gradients
from dgt.layers.attention import DGAttention, GlobalAttention
from dgt.layers.baselines.cmt import CMTBlock
from dgt.layers.block import Block
from dgt.layers.convolution import ConvStem, InvertedResidualFFN, PatchMerging
from dgt.layers.head import Head
from dgt.layers.scripting import check_layer_input
from dgt.ops.backends import resolve_backend
from dgt.utils.errors import UserError


def optimize_for_inference(model: nn.Module) -> nn.Module:
    """Return a copy of a model in the form that only predicts: faster, equal outputs up to rounding.

    The model itself, which is what to train, save and export, stays as it is. On a CPU convolutions keep a packed copy
    of their weights, from their first call on.

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
    with torch.inference_mode(False):  # else nobody could tell when its weights change
        twin = nn.ModuleList([copy.deepcopy(model).eval().requires_grad_(False)])
        _replace_parts(twin)
        return twin[0].to(memory_format=torch.channels_last)


def pack_weights(model: nn.Module) -> nn.Module:
    """Return a copy of any model whose linears and convolutions keep packed weights, and nothing else changed.

    What :func:`optimize_for_inference` gains by this alone, for comparison with models that have no such form.
    """
    with torch.inference_mode(False):
        twin = copy.deepcopy(model).eval().requires_grad_(False)
        for parent in list(twin.modules()):
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    setattr(parent, name, TokenLinear(child))
                elif type(child) is nn.Conv2d:
                    setattr(parent, name, PackedConv(child))
        return twin.to(memory_format=torch.channels_last)


def inference_form(module: nn.Module) -> nn.Module:
    """Return a module in the form that only predicts, or as it is where there is none; may change it in place."""
    form = FORMS.get(type(module))
    return module if form is None else form(module)


def _replace_parts(module: nn.Module) -> None:
    """Bring every part of a module, at any depth, into the form that only predicts, in place."""
    for name, child in list(module.named_children()):
        if type(child) in FORMS:
            setattr(module, name, inference_form(child))
        else:
            _replace_parts(child)


def _gelu(x: Tensor) -> Tensor:
    """GELU of a tensor that nobody else holds: in place, unless gradients ask for it."""
    return F.gelu(x) if takes_gradients(x) else torch.ops.aten.gelu_(x)


class FoldedStem(nn.Module):
    """A :class:`ConvStem` whose first two normalisations are folded into the convolutions after them."""

    scale: Tensor
    shift: Tensor

    def __init__(self, stem: ConvStem) -> None:
        super().__init__()
        convs, norms = cast(list[nn.Conv2d], list(stem.convs)), cast(list[nn.BatchNorm2d], list(stem.norms))
        first, *others = convs
        self.first = PackedConv(first, gelu=True)
        self.others = nn.ModuleList(FoldedConv(*pair) for pair in zip(others, norms[:-1], strict=True))
        for name, value in zip(("scale", "shift"), affine(norms[-1]), strict=True):
            self.register_buffer(name, value.detach()[:, None, None].to(first.weight.dtype))

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, H', W', width); ``mask`` is (B, H', W')."""
        x = self.first(image.contiguous(memory_format=torch.channels_last))
        for conv in self.others:
            x = _gelu(conv(x, mask))
        x = torch.addcmul(self.shift, x, self.scale)
        return (x if mask is None else x * mask.unsqueeze(1)).permute(0, 2, 3, 1)


class FoldedFFN(nn.Module):
    """An :class:`InvertedResidualFFN` whose three normalisations and residual are folded into its convolutions."""

    def __init__(self, ffn: InvertedResidualFFN) -> None:
        super().__init__()
        self.expand = PackedConv(ffn.expand, gelu=True)
        self.depthwise = FoldedConv(ffn.depthwise, ffn.norm1, residual=True)
        self.project = fold_after(fold_before(ffn.norm2, ffn.project), ffn.norm3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        x = self.depthwise(self.expand(x.permute(0, 3, 1, 2)), mask)
        projected: Tensor = self.project(_gelu(x))
        return projected.permute(0, 2, 3, 1)


class TokenLinear(PackedConv):
    """A linear of channels-last tokens, computed as the 1x1 convolution that it is."""

    def __init__(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None, device="meta")
        super().__init__(conv, linear.weight[:, :, None, None], linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., C) to the same shape with other channels."""
        tokens = x if x.dim() == 4 else x.reshape(len(x), 1, -1, x.shape[-1])
        tokens = super().forward(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return tokens if x.dim() == 4 else tokens.reshape(*x.shape[:-1], self.out_features)


class InferenceDGAttention(DGAttention):
    """A :class:`DGAttention` that only predicts: unit centroids once and for all, the whole attention one operator."""

    def __init__(self, source: DGAttention) -> None:
        heads, groups, channels = source.centroids.shape
        settings: dict[str, Any] = {"cosine": source.cosine, "backend": source.backend, "device": "meta"}
        super().__init__(heads * channels, heads, groups, source.top_k, **settings)
        self.qkv, self.proj = TokenLinear(source.qkv), TokenLinear(source.proj)  # type: ignore[assignment]
        if source.cosine:
            self.logit_scale = nn.Parameter(source.logit_scale.detach(), requires_grad=False)
        self.centroids, self.num_updates, self.seeded = source.unit_centroids(), source.num_updates, source.seeded

    def unit_centroids(self) -> Tensor:
        """Return the centroids, which have unit norm here."""
        return self.centroids

    def split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, ..., C) tokens to query, key and value, each (B, H, L, D)."""
        query, key, value = self._project(x).unbind(0)
        return query, key, value

    def _project(self, x: Tensor) -> Tensor:
        """Project (B, ..., C) tokens to (3, B, H, L, D)."""
        qkv = self.qkv(x).flatten(1, -2)
        qkv = qkv.unflatten(-1, [3, self.num_heads, qkv.shape[-1] // (3 * self.num_heads)])
        qkv = qkv.permute(2, 0, 3, 1, 4).contiguous()
        return torch.stack([*self.comparable(qkv[0], qkv[1]), qkv[2]]) if self.cosine else qkv

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) or (B, L, C) to the same shape; ``mask`` is bool, True where a token is real."""
        if x.device.type != "cpu" or takes_gradients(x) or resolve_backend(self.backend, x) != "eager":
            return super().forward(x, mask)
        check_layer_input(x, self.qkv.in_features, mask)
        real = None if mask is None else mask.flatten(1)
        attended = attention(self._project(x), self.centroids, self.top_k, self.scale, real)
        projected: Tensor = self.proj(attended.view(x.shape))
        return projected


class InferenceBlock(Block):
    """A :class:`Block` that only predicts: its parts folded, position encoding and residuals without extra tensors."""

    def __init__(self, source: Block) -> None:
        nn.Module.__init__(self)
        self.post_norm = source.post_norm
        encoding = source.cpe
        folded = None if encoding is None else FoldedConv(encoding.conv, residual=True)
        self.cpe = folded  # type: ignore[assignment]
        self.norm1, self.norm2 = source.norm1, source.norm2
        self.attn: nn.Module = inference_form(source.attn)
        self.ffn: nn.Module = inference_form(source.ffn)
        self.eval()

    def train(self, mode: bool = True) -> "InferenceBlock":
        """Stay in evaluation mode.

        Raises:
            RuntimeError: when asked to train.
        """
        if mode:
            raise RuntimeError("the inference form of a model cannot be trained: train the model it was made from")
        super().train(False)
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None, *position: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C); arguments as in :class:`Block`, or of CMT's."""
        x = self.positioned(x, mask)
        attended = self.attn(x if self.post_norm else self.norm1(x), mask, *position)
        attended = self.norm1(attended) if self.post_norm else attended
        kept = self.cpe is None or takes_gradients(x)  # without an encoding x is still the caller's
        x = x + attended if kept else x.add_(attended)
        forwarded = self.ffn(x if self.post_norm else self.norm2(x), mask)
        forwarded = self.norm2(forwarded) if self.post_norm else forwarded
        return x + forwarded if takes_gradients(x) else x.add_(forwarded)

    def positioned(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Apply the position encoding, if there is one (Eq. 8); the result is then a new tensor."""
        if self.cpe is None:
            return super().positioned(x, mask)
        encoded: Tensor = self.cpe(x.permute(0, 3, 1, 2), mask)
        return encoded.permute(0, 2, 3, 1)


def fold_head(head: Head) -> Head:
    """Fold the normalisation behind the head's convolution into it, in place, if there is one."""
    if isinstance(head.conv, nn.Conv2d) and isinstance(head.norm, nn.BatchNorm2d):
        head.conv, head.norm = fold_after(head.conv, head.norm), nn.Identity()
    return head


def _with_packed_conv(merging: PatchMerging) -> PatchMerging:
    merging.conv = PackedConv(merging.conv)
    return merging


def _with_token_linears(attention: GlobalAttention) -> GlobalAttention:
    if not isinstance(attention.qkv, TokenLinear):
        attention.qkv, attention.proj = TokenLinear(attention.qkv), TokenLinear(attention.proj)  # type: ignore[assignment]
    return attention


FORMS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    ConvStem: FoldedStem,
    Block: InferenceBlock,
    CMTBlock: InferenceBlock,
    DGAttention: InferenceDGAttention,
    GlobalAttention: _with_token_linears,
    InvertedResidualFFN: FoldedFFN,
    PatchMerging: _with_packed_conv,
    Head: fold_head,
}
