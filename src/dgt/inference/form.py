"""Models optimized for inference: the same outputs from fewer and larger steps.

Every BatchNorm of the network is between a GELU and a convolution. Its affine map moves into
that convolution; with zero padding this is exact inside the image, and at its borders once the part
of the shift that would come from outside is taken off again. ``x + depthwise(x)`` is one depthwise
convolution whose center tap is one larger. Packing of weights is a compiler's or another runtime's
(docs/export.md).
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.layers.attention import SelfAttention
from dgt.layers.batch_norm import are_evaluated
from dgt.layers.block import Block
from dgt.layers.convolution import ConvStem, InvertedResidualFFN, TokenLinear
from dgt.layers.head import Head
from dgt.layers.native import Prepared, convolution, feed_forward, predicts_natively
from dgt.utils.errors import UserError

ENDS, INNER = slice(None, None, 2), slice(1, 2)  # of three rows or columns


def optimize_for_inference(model: nn.Module) -> nn.Module:
    """Return a copy of a model optimized for inference: faster, and equal up to rounding.

    The model itself, which is what to train, save and export, stays as it is. The copy is in
    evaluation mode and cannot be trained.

    Args:
        model: any module that contains parts of this package: a model of :func:`timm.create_model`,
            a backbone, a detector around one. Everything else in it stays as it is.

    Returns:
        A copy of the model, in evaluation mode.

    Raises:
        TypeError, ValueError: ``model`` is no module, or contains nothing that has such a form.

    Example:
        >>> model = timm.create_model("dgt_tiny").eval()
        >>> fast = dgt.optimize_for_inference(model)
        >>> images = torch.randn(1, 3, 224, 224)
        >>> torch.allclose(fast(images), model(images), atol=1e-3)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if not any(type(module) in FORMS for module in model.modules()):
        raise UserError(f"model must contain DGT modules, got a {type(model).__name__} without any")
    with torch.inference_mode(False):
        twin = inference_form(copy.deepcopy(model))
        return twin.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def inference_form(module: nn.Module) -> nn.Module:
    """Return a module with all submodules optimized for inference. May change it in place."""
    if isinstance(module, PredictsOnly):
        return module
    if type(module) in FORMS:
        return FORMS[type(module)](module)
    for name, child in list(module.named_children()):
        setattr(module, name, inference_form(child))
    if type(module) is Block and isinstance(module.attn, SelfAttention):
        module.joins_in_place = isinstance(module.ffn, FoldedFFN)
    return module


def _gelu(x: Tensor) -> Tensor:
    """GELU of a tensor that nothing else refers to: in place, unless gradients need it."""
    return F.gelu(x) if torch.is_grad_enabled() and x.requires_grad else torch.ops.aten.gelu_(x)


def affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return scale and shift, float64 (C,), of a BatchNorm in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError(
            "BatchNorm must track running statistics to be folded, got track_running_stats=False"
        )
    scale = (norm.running_var.double() + norm.eps).rsqrt() * norm.weight.double()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def fold_after(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return ``norm(conv(x))`` as one convolution: exact for any kernel and padding."""
    scale, shift = affine(norm)
    return _conv_like(
        conv, conv.weight.double() * scale[:, None, None, None], _bias(conv) * scale + shift
    )


def fold_before(norm: nn.BatchNorm2d, conv: nn.Conv2d) -> nn.Conv2d:
    """Return ``conv(norm(x))`` as one convolution, for a 1x1 convolution: exact because it has no
    padding.
    """
    (scale, shift), weight = affine(norm), conv.weight.double()
    return _conv_like(conv, weight * scale[:, None, None], _bias(conv) + weight[..., 0, 0] @ shift)


def _bias(conv: nn.Conv2d) -> Tensor:
    return (
        conv.weight.new_zeros(conv.out_channels).double()
        if conv.bias is None
        else conv.bias.double()
    )


def _conv_like(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution of the same geometry and type with this weight and bias."""
    like = copy.deepcopy(conv)
    like.weight = nn.Parameter(weight.detach().to(conv.weight.dtype))
    like.bias = nn.Parameter(bias.detach().to(conv.weight.dtype))
    return like


class PredictsOnly(nn.Module):
    """A module that cannot be trained."""

    def train(self, mode: bool = True) -> "PredictsOnly":
        """Stay in evaluation mode; RuntimeError when asked to train."""
        if mode:
            raise RuntimeError("an optimized model cannot be trained: train the original model")
        return super().train(False)


class FoldedConv(PredictsOnly):
    """``conv(norm(x))``, or ``y + conv(y)`` with ``y = norm(x)``, as one convolution with exact
    borders.

    ``conv`` is 3x3, stride 1, padding 1, dense or depthwise. Zero padding comes *after* the
    normalization: what is outside has no shift. The folded bias holds the shift of all nine taps,
    so at the borders the taps outside are taken off again. Under a mask the same holds for every
    padded place, and the shift becomes a convolution of the mask.
    """

    inner_bias: Tensor
    taps: Tensor  # (C', 1, 3, 3): what the shift contributes through every tap
    # (1, C', 3, 3): what it would contribute from outside to an image of 3 x 3, which tell all
    # sizes
    edges: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, residual: bool = False) -> None:
        super().__init__()
        weight, bias = conv.weight.double().clone(), _bias(conv)
        scale, shift = (value[:, None, None] for value in affine(norm))
        depthwise = conv.groups > 1
        if residual:
            weight[range(len(weight)), 0 if depthwise else range(len(weight)), 1, 1] += 1
        if depthwise:
            scale, shift = scale[:, None], shift[:, None]
        taps = (weight * shift).sum(1, keepdim=True)
        self.conv = _conv_like(conv, weight * scale, bias + taps.sum((1, 2, 3)))
        edges = taps.sum((2, 3)).view(1, -1, 1, 1) - F.conv2d(
            taps.new_ones(1, 1, 3, 3), taps, padding=1
        )
        for name, value in (("inner_bias", bias), ("taps", taps), ("edges", edges)):
            self.register_buffer(name, value.detach().to(conv.weight.dtype))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W).

        ``mask`` is bool (B, H, W), True where a token is real.
        """
        height, width = x.shape[2:]
        if mask is not None or min(height, width) < 3:
            real = (
                x.new_ones(1, 1, height, width) if mask is None else mask.unsqueeze(1).to(x.dtype)
            )
            x = F.conv2d(
                x * real, self.conv.weight, self.inner_bias, padding=1, groups=self.conv.groups
            )
            return x + F.conv2d(real, self.taps, padding=1)
        x = self.conv(x)
        if torch.compiler.is_compiling():
            down, across = (torch.arange(size, device=x.device) for size in (height, width))
            down, across = ((p > 0).long() + (p == len(p) - 1) for p in (down, across))
            return x - self.edges[:, :, down[:, None], across]
        rows, columns, corners = (
            self.edges[:, :, i, j] for i, j in ((ENDS, INNER), (INNER, ENDS), (ENDS, ENDS))
        )
        x[:, :, :: height - 1] -= rows
        x[..., :: width - 1] -= columns
        x[:, :, :: height - 1, :: width - 1] += rows + columns - corners
        return x


class FoldedStem(PredictsOnly):
    """A :class:`ConvStem` whose first two normalizations are folded into the convolutions after
    them.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, stem: ConvStem) -> None:
        super().__init__()
        (first, *convs), (*norms, last) = cast(Any, stem.convs), cast(Any, stem.norms)
        self.first = first
        self.others = nn.ModuleList(FoldedConv(*pair) for pair in zip(convs, norms, strict=True))
        self.stem = stem  # for the native kernel
        for name, value in zip(("scale", "shift"), affine(last), strict=True):
            self.register_buffer(name, value.detach()[:, None, None].to(first.weight.dtype))

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, H', W', width); ``mask`` is (B, H', W')."""
        if self.stem.runs_natively(image):
            return self.stem(image, mask)
        x = _gelu(self.first(image.contiguous(memory_format=torch.channels_last)))
        for conv in self.others:
            x = _gelu(conv(x, mask))
        x = torch.addcmul(self.shift, x, self.scale)
        return (x if mask is None else x * mask.unsqueeze(1)).permute(0, 2, 3, 1)


class FoldedFFN(PredictsOnly):
    """An :class:`InvertedResidualFFN` whose three normalizations and residual are folded into its
    convolutions.
    """

    def __init__(self, ffn: InvertedResidualFFN) -> None:
        super().__init__()
        self.expand = ffn.expand
        self.norm = ffn.norm1
        self.plain_depthwise = ffn.depthwise  # the native kernel folds nothing into it
        self.depthwise = FoldedConv(ffn.depthwise, ffn.norm1, residual=True)
        self.prepared = Prepared()
        self.project = fold_after(fold_before(ffn.norm2, ffn.project), ffn.norm3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        weights = self.weights()
        parameters = weights.parameters()
        if are_evaluated((self.norm,)) and predicts_natively(x, *parameters):
            prepared = self.prepared.of(parameters, lambda: feed_forward.prepare(weights))
            return feed_forward.feed_forward(x, weights, mask, prepared)
        x = self.depthwise(_gelu(self.expand(x.permute(0, 3, 1, 2))), mask)
        projected: Tensor = self.project(_gelu(x))
        return projected.permute(0, 2, 3, 1)

    def weights(self) -> feed_forward.Weights:
        """Return the parameters as the native kernel takes them."""
        depthwise = self.plain_depthwise
        return feed_forward.Weights(
            self.expand.weight,
            self.expand.bias,
            convolution.statistics(self.norm),
            depthwise.weight,
            depthwise.bias,
            [],
            self.project.weight,
            self.project.bias,
            [],
            [self.norm.eps, 0.0, 0.0],
        )


class PreparedLinear(PredictsOnly):
    """A :class:`TokenLinear` whose weights are prepared for the native kernel."""

    def __init__(self, linear: TokenLinear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.prepared = Prepared()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., in_features) to (B, ..., out_features)."""
        weight, bias = self.linear.weight, self.linear.bias
        if not predicts_natively(x, weight, bias):
            found: Tensor = self.linear(x)
            return found
        prepared = self.prepared.of(
            (weight, bias), lambda: convolution.prepare_linear(weight, bias)
        )
        return convolution.linear(x, weight, bias, prepared)


def _with_folded_norm(head: Head) -> Head:
    if isinstance(head.conv, nn.Conv2d) and isinstance(head.norm, nn.BatchNorm2d):
        head.conv, head.norm = fold_after(head.conv, head.norm), nn.Identity()
    return head


FORMS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    ConvStem: FoldedStem,
    InvertedResidualFFN: FoldedFFN,
    Head: _with_folded_norm,
    TokenLinear: PreparedLinear,
}
