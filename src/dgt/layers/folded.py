"""The layers as a model that only predicts wants them: normalisations folded into convolutions, residuals in place.

Every BatchNorm of the network stands between a GELU and a convolution. Its affine map moves into that convolution; with
zero padding this is exact inside the image, and at its borders once the part of the shift that would come from outside
is taken off again. ``x + depthwise(x)`` is one depthwise convolution whose centre tap is one larger. Linears are 1x1
convolutions, which oneDNN runs on channels-last tokens without copies, and about twice as fast as the matrix product
of linears on processors that the vendor's BLAS does not favour.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.layers.attention import DGAttention, GlobalAttention, check_mask, check_tokens_in
from dgt.layers.block import Block
from dgt.layers.convolution import ConvStem, InvertedResidualFFN, PatchMerging
from dgt.layers.head import Head
from dgt.layers.packed import PackedConv, takes_gradients
from dgt.ops import eager_inference
from dgt.ops.backends import resolve_backend


def affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return scale and shift, float64 (C,), of a BatchNorm in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("BatchNorm must track running statistics to be folded, got track_running_stats=False")
    scale = (norm.running_var.double() + norm.eps).rsqrt() * norm.weight.double()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def fold_after(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return ``norm(conv(x))`` as one convolution: exact for any kernel and padding."""
    scale, shift = affine(norm)
    weight = conv.weight.double() * scale[:, None, None, None]
    return _conv_like(conv, weight, _bias(conv) * scale + shift)


def fold_before(norm: nn.BatchNorm2d, conv: nn.Conv2d) -> nn.Conv2d:
    """Return ``conv(norm(x))`` as one convolution, for a 1x1 convolution: exact because it has no padding."""
    scale, shift = affine(norm)
    weight = conv.weight.double()
    return _conv_like(conv, weight * scale[:, None, None], _bias(conv) + weight[..., 0, 0] @ shift)


def _bias(conv: nn.Conv2d) -> Tensor:
    return conv.weight.new_zeros(conv.out_channels).double() if conv.bias is None else conv.bias.double()


def _conv_like(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> PackedConv:
    """A convolution of the same geometry and type with this weight and bias."""
    return PackedConv(conv, weight.to(conv.weight.dtype), bias.to(conv.weight.dtype))


def _constant(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)


class FoldedConv(nn.Module):
    """``conv(norm(x))``, or ``y + conv(y)`` with ``y = norm(x)``, as one 3x3 convolution with exact borders.

    Zero padding stands *behind* the normalisation: what is outside has no shift. The folded bias holds the shift of all
    nine taps, so at the borders the taps outside are taken off again. Under a mask the same holds for every padded
    place, and the shift becomes a convolution of the mask.

    Args:
        conv: 3x3, stride 1, padding 1, dense or depthwise.
        norm: what precedes it, or None.
        residual: add the convolution's input to its output.
    """

    taps: Tensor
    inner_bias: Tensor
    rows: Tensor
    columns: Tensor
    corners: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None, residual: bool = False) -> None:
        super().__init__()
        weight, bias = conv.weight.double(), _bias(conv)
        depthwise = conv.groups > 1
        if residual:
            weight = weight.clone()
            weight[range(len(weight)), 0 if depthwise else range(len(weight)), 1, 1] += 1
        self.has_shift = norm is not None
        taps = torch.zeros_like(weight[:, 0])  # (C, 3, 3): what the shift contributes through every tap
        if norm is not None:
            scale, shift = affine(norm)
            taps = weight[:, 0] * shift[:, None, None] if depthwise else torch.einsum("oikl,i->okl", weight, shift)
            weight = weight * (scale[:, None, None, None] if depthwise else scale[:, None, None])
        self.conv = _conv_like(conv, weight, bias + taps.sum((1, 2)))
        outer = taps[:, ::2].permute(1, 2, 0)  # (2, 3, C): the taps above and below
        constants = {
            "taps": taps[:, None],
            "inner_bias": bias,
            "rows": outer.sum(1, keepdim=True),  # (2, 1, C): what is missing in the first and the last row
            "columns": taps[:, :, ::2].permute(2, 1, 0).sum(1),  # (2, C)
            "corners": outer[:, ::2],  # (2, 2, C): what rows and columns both took off
        }
        for name, value in constants.items():
            self.register_buffer(name, value.detach().to(conv.weight.dtype).contiguous())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W); ``mask`` is bool (B, H, W), True where a token is real."""
        if mask is not None:
            real = mask.unsqueeze(1).to(x.dtype)
            x = F.conv2d(x * real, self.conv.weight, self.inner_bias, padding=1, groups=self.conv.groups)
            return x + F.conv2d(real, self.taps, padding=1) if self.has_shift else x
        x = self.conv(x)
        if self.has_shift:
            tokens = x.permute(0, 2, 3, 1)
            if torch.compiler.is_compiling():
                return (tokens - self._outside(*tokens.shape[1:3])).permute(0, 3, 1, 2)
            self._take_off_outside(tokens)
        return x

    def _take_off_outside(self, x: Tensor) -> None:
        """Subtract from (B, H, W, C), in place, what the shift would contribute from outside the image."""
        rows, columns, corners = self.rows, self.columns, self.corners
        height, width = x.shape[1:3]
        if height == 1:  # the first row is the last one
            rows, corners = rows.sum(0, keepdim=True), corners.sum(0, keepdim=True)
        if width == 1:
            columns, corners = columns.sum(0, keepdim=True), corners.sum(1, keepdim=True)
        down, across = max(height - 1, 1), max(width - 1, 1)  # steps from the first to the last
        x[:, ::down] -= rows
        x[:, :, ::across] -= columns
        x[:, ::down, ::across] += corners

    def _outside(self, height: int, width: int) -> Tensor:
        """What `_take_off_outside` subtracts, as a map (H, W, C) that a compiler computes on its way."""
        row = torch.arange(height, device=self.rows.device)[:, None, None]
        column = torch.arange(width, device=self.rows.device)[:, None]
        rows, columns = (row == 0, row == height - 1), (column == 0, column == width - 1)
        outside = columns[0] * self.columns[0] + columns[1] * self.columns[1]
        for i in range(2):
            outside = outside + rows[i] * self.rows[i]
            for j in range(2):
                outside = outside - (rows[i] & columns[j]) * self.corners[i, j]
        return outside


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
        """Map (B, H, W, C) or (B, L, C) to the same shape with other channels."""
        tokens = x if x.dim() == 4 else x.unsqueeze(1)
        tokens = super().forward(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return tokens if x.dim() == 4 else tokens.squeeze(1)


class InferenceDGAttention(DGAttention):
    """A :class:`DGAttention` that only predicts: unit centroids once and for all, the whole attention one operator."""

    def __init__(self, source: DGAttention) -> None:
        heads, groups, channels = source.centroids.shape
        settings: dict[str, Any] = {"cosine": source.cosine, "backend": source.backend, "device": "meta"}
        super().__init__(heads * channels, heads, groups, source.top_k, **settings)
        self.qkv, self.proj = TokenLinear(source.qkv), TokenLinear(source.proj)  # type: ignore[assignment]
        if source.cosine:
            self.logit_scale = _constant(source.logit_scale)
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
        check_tokens_in(x, self.qkv.in_features)
        check_mask(mask, x)
        real = None if mask is None else mask.flatten(1)
        attended = eager_inference.attention(self._project(x), self.centroids, self.top_k, self.scale, real)
        projected: Tensor = self.proj(attended.view(x.shape))
        return projected


class InferenceBlock(Block):
    """A :class:`Block` that only predicts: its parts folded, position encoding and residuals without extra tensors."""

    def __init__(self, source: Block) -> None:
        nn.Module.__init__(self)
        self.post_norm, self.takes_position = source.post_norm, source.takes_position  # type: ignore[misc]
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

    def forward(self, x: Tensor, mask: Tensor | None = None, position: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C); arguments as in :class:`Block`."""
        x = self.positioned(x, mask)
        attended = self.attend(x if self.post_norm else self.norm1(x), mask, position)
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
    DGAttention: InferenceDGAttention,
    GlobalAttention: _with_token_linears,
    InvertedResidualFFN: FoldedFFN,
    PatchMerging: _with_packed_conv,
    Head: fold_head,
}


def inference_form(module: nn.Module) -> nn.Module:
    """Return a module in the form that only predicts, or as it is where there is none; may change it in place."""
    form = FORMS.get(type(module))
    return module if form is None else form(module)
