"""The convolutional parts: stem, patch merging, position encoding (CPE), feed-forward (IRFFN).

Everything outside attention is CMT's (stem, inverted residual feed-forward network) or CPVT's
(conditional position encoding). Every convolution has a bias, which reproduces the paper's
parameter counts. Tensors are (B, H, W, C): LayerNorm and linears need no copy, and convolutions see
the same memory as channels-last NCHW. A ``mask`` (B, H, W), True where a token is real, zeroes
padding before every spatial convolution, so that a padded image gives the same result as the image
alone.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.batch_norm import (
    activate_and_norm,
    are_evaluated,
    take_batch_statistics,
    update_running_statistics,
)
from dgt.layers.native import (
    are_ordinary,
    convolution,
    convolves_natively,
    feed_forward,
    feed_forward_training,
    predicts_natively,
    runs_natively,
)
from dgt.layers.scripting import scripting


def mask_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding of a map.

    Args:
        x: (B, H, W, C).
        mask: bool (B, H, W), True where a token is real, or None.

    Returns:
        (B, H, W, C), zero where ``mask`` is False; ``x`` itself without a mask.

    Example:
        >>> mask = torch.tensor([[[True, False]]])
        >>> mask_padding(torch.ones(1, 1, 2, 1), mask).flatten()
        tensor([1., 0.])
    """
    return x if mask is None else x * mask.unsqueeze(-1)


def _nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


# What torch has on x86: MKL for matrix products, which is not fast on every processor, and oneDNN
# for convolutions.
ONEDNN_BESIDE_MKL = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
# Pixels below which oneDNN, which first reorders the weights, takes longer than MKL.
FEW = 64


@register_notrace_module
class TokenLinear(nn.Linear):
    """A linear layer of tokens; on x86 in float32 it runs as the equivalent 1x1 convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., in_features) to (B, ..., out_features)."""
        if scripting():
            return F.linear(x, self.weight, self.bias)
        if predicts_natively(x, self.weight, self.bias):
            return convolution.linear(x, self.weight, self.bias)
        if not self.as_convolution(x):
            return F.linear(x, self.weight, self.bias)
        maps = x if x.dim() == 4 else x.flatten(1, -2).unsqueeze(1)
        weight = self.weight[:, :, None, None]
        out = _nhwc(convolve_pixels(_nchw(maps), weight, self.bias))
        return out.reshape(x.shape[:-1] + out.shape[-1:])

    @torch.jit.ignore
    def as_convolution(self, x: Tensor) -> bool:
        """Tell whether oneDNN is to run this input.

        Exported files keep linears: other runtimes have matrix products of their own.
        """
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return False
        if not ONEDNN_BESIDE_MKL or torch.is_autocast_enabled("cpu"):
            return False
        if x.device.type != "cpu" or x.dim() <= 2:
            return False
        if not x.dtype == self.weight.dtype == torch.float32:
            return False
        return type(self.weight) in (nn.Parameter, Tensor)  # not quantized or distributed


@register_notrace_module
class PixelConv2d(nn.Conv2d):
    """A 1x1 convolution of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        if scripting():
            return F.conv2d(x, self.weight, self.bias)
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if channels_last and predicts_natively(x, self.weight, self.bias):
            return _nchw(convolution.linear(_nhwc(x), self.weight.flatten(1), self.bias))
        return convolve_pixels(x, self.weight, self.bias)


@torch.jit.ignore
def convolve_pixels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """1x1 convolution: on x86 by oneDNN, unless there are few pixels.

    With one thread PyTorch gives fewer than 16 maps to MKL, unless the kernel is dilated, which
    changes nothing for one pixel; one map of up to 20480 numbers it never gives to oneDNN.

    Args:
        x: (B, C, H, W).
        weight: (C', C, 1, 1).
        bias: (C',) or None.

    Returns:
        (B, C', H, W).
    """
    plain = ONEDNN_BESIDE_MKL and x.dtype == torch.float32 and x.device.type == "cpu"
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not plain:
        return F.conv2d(x, weight, bias)
    if x.numel() < FEW * x.shape[1]:
        return _nchw(F.linear(_nhwc(x), weight.flatten(1), bias))
    dilated = torch.get_num_threads() == 1 and (x.numel() > 20480 or 1 < len(x) < 16)
    return F.conv2d(x, weight, bias, dilation=2 if dilated else 1)


class ConvStem(nn.Module):
    """Three 3x3 convolutions, the first with a stride, each followed by GELU and BatchNorm.

    Args:
        in_chans: channels of the image.
        width: channels of the result.
        stride: of the first convolution.
        factory: ``device`` and ``dtype``.

    Example:
        >>> ConvStem(3, 32)(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 32, 32, 32])
    """

    def __init__(self, in_chans: int, width: int, stride: int = 2, **factory: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(in_chans, width, 3, stride, 1, **factory)])
        for _ in range(2):
            self.convs.append(nn.Conv2d(width, width, 3, 1, 1, **factory))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, **factory) for _ in range(3))
        self.act = nn.GELU()

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, in_chans, H, W) images to (B, H', W', width); ``mask`` is (B, H', W')."""
        x = image.contiguous(memory_format=torch.channels_last)
        if not scripting() and self.runs_natively(x):
            return self.run_natively(_nhwc(x), mask)
        for conv, norm in zip(self.convs, self.norms):  # noqa: B905 (TorchScript knows no strict=)
            x = conv(x)
            if scripting():  # noqa: SIM108 (TorchScript compiles both sides of an expression)
                x = norm(self.act(x))
            else:
                x = activate_and_norm(x, self.act, norm)
            x = x if mask is None else x * mask.unsqueeze(1)
        return _nhwc(x)

    @torch.jit.ignore
    def runs_natively(self, x: Tensor) -> bool:
        """Tell whether the native kernel takes the (B, C, H, W) image: in evaluation, with the
        parts that were built.
        """
        if type(self.act) is not nn.GELU or any(type(conv) is not nn.Conv2d for conv in self.convs):
            return False
        if not are_ordinary(*self.convs, *self.norms, self.act):
            return False
        return are_evaluated(self.norms) and predicts_natively(x, *self.convs.parameters())

    @torch.jit.ignore
    def run_natively(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (B, H, W, in_chans) to (B, H', W', width) by the native kernel."""
        convs = cast(list[nn.Conv2d], self.convs)
        for conv, norm in zip(convs, self.norms, strict=True):
            x = convolution.convolution(x, conv.weight, conv.bias, conv.stride[0], True, norm, mask)
        return x


class PatchMerging(nn.Module):
    """Halve height and width (rounding up): 3x3 convolution of stride 2, then LayerNorm.

    Args:
        in_dim: channels of the input.
        dim: channels of the result.
        factory: ``device`` and ``dtype``.

    Example:
        >>> PatchMerging(32, 64)(torch.randn(1, 15, 15, 32)).shape
        torch.Size([1, 8, 8, 64])
    """

    def __init__(self, in_dim: int, dim: int, **factory: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, 2, 1, **factory)
        self.norm = LayerNorm(dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, in_dim) to (B, ceil(H / 2), ceil(W / 2), dim)."""
        conv = self.conv
        if not scripting() and convolves_natively(x, conv.weight, conv.bias):
            return self.norm(convolution.convolution(x, conv.weight, conv.bias, 2))
        return self.norm(_nhwc(conv(_nchw(x))))


class ConditionalPositionEncoding(nn.Module):
    """Position from content (Eq. 8): a depthwise 3x3 convolution with zero padding.

    The residual is the block's.

    Args:
        dim: channels C.
        factory: ``device`` and ``dtype``.

    Example:
        >>> ConditionalPositionEncoding(64)(torch.randn(1, 7, 7, 64)).shape
        torch.Size([1, 7, 7, 64])
    """

    def __init__(self, dim: int, **factory: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        return _nhwc(self.conv(_nchw(x)))

    def add_to(self, x: Tensor) -> Tensor:
        """Add the encoding of (B, H, W, C) to itself."""
        if not scripting() and self.runs_natively(x):
            return convolution.depthwise_convolution(x, self.conv.weight, self.conv.bias, True)
        return x + self(x)

    @torch.jit.ignore
    def runs_natively(self, x: Tensor) -> bool:
        """Tell whether the native kernel takes (B, H, W, C), in prediction or training."""
        conv = self.conv
        if type(conv) is not nn.Conv2d or not are_ordinary(conv):
            return False
        return runs_natively(x, conv.weight, conv.bias)


class InvertedResidualFFN(nn.Module):
    """CMT's feed-forward network (Eq. 10): expand, residual depthwise 3x3, project.

    The residual comes before the second GELU.

    Args:
        dim: channels C.
        ratio: expansion R.
        drop: rate of dropout after the projection.
        factory: ``device`` and ``dtype``.

    Example:
        >>> InvertedResidualFFN(64)(torch.randn(1, 7, 7, 64)).shape
        torch.Size([1, 7, 7, 64])
    """

    def __init__(self, dim: int, ratio: float = 4.0, drop: float = 0.0, **factory: Any) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.expand = PixelConv2d(dim, hidden, 1, **factory)
        self.norm1 = nn.BatchNorm2d(hidden, **factory)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **factory)
        self.norm2 = nn.BatchNorm2d(hidden, **factory)
        self.project = PixelConv2d(hidden, dim, 1, **factory)
        self.norm3 = nn.BatchNorm2d(dim, **factory)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C)."""
        if not scripting() and self.runs_natively(x):
            return self.run_natively(x, mask)
        if not scripting() and self.trains_natively(x):
            return self.drop(self.train_natively(x, mask))
        x = self.expand(_nchw(x))
        if scripting():
            x = self.project(self.norm2(self.act(self.mix(self.norm1(self.act(x)), mask))))
        else:
            x = activate_and_norm(x, self.act, self.norm1, self.mix, mask)
            x = activate_and_norm(x, self.act, self.norm2, self.project)
        return _nhwc(self.drop(self.norm3(x)))

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Add to (B, hidden, H, W) its depthwise convolution, between neighbors."""
        x = x if mask is None else x * mask.unsqueeze(1)
        return x + self.depthwise(x)

    @torch.jit.ignore
    def runs_natively(self, x: Tensor) -> bool:
        """Tell whether the native kernel takes (B, H, W, C): in evaluation, without dropout."""
        if not are_evaluated((self.norm1, self.norm2, self.norm3)) or self.drop.training:
            return False
        if not self.is_as_built():
            return False
        convs = (self.expand, self.depthwise, self.project)
        return predicts_natively(
            x, *(parameter for conv in convs for parameter in conv.parameters())
        )

    @torch.jit.ignore
    def is_as_built(self) -> bool:
        """Return whether no part has a hook, and no other part has been put in its
        place.
        """
        convs = (self.expand, self.depthwise, self.project)
        if not are_ordinary(self.norm1, self.norm2, self.norm3, *convs, self.act):
            return False
        if [type(conv) for conv in convs] != [PixelConv2d, nn.Conv2d, PixelConv2d]:
            return False
        return type(self.act) is nn.GELU and self.act.approximate == "none"

    @torch.jit.ignore
    def run_natively(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C) by the native kernel."""
        return feed_forward.feed_forward(x, self.weights(), mask)

    @torch.jit.ignore
    def trains_natively(self, x: Tensor) -> bool:
        """Tell whether the native kernel takes (B, H, W, C) in training, with its gradients."""
        if not take_batch_statistics((self.norm1, self.norm2, self.norm3)):
            return False
        if not self.is_as_built():
            return False
        if not runs_natively(x, *self.parameters()):
            return False
        # The statistics of one token are an error, which PyTorch raises. Only now is it known that
        # the tensor is one, and not what stands for it while a model is traced.
        return x[..., 0].numel() >= 2

    @torch.jit.ignore
    def train_natively(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (B, H, W, C) to (B, H, W, C) by the native kernel, and follow the statistics."""
        norms = (self.norm1, self.norm2, self.norm3)
        parameters = feed_forward_training.Parameters(
            expand_weight=self.expand.weight,
            expand_bias=self.expand.bias,
            norm1_weight=self.norm1.weight,
            norm1_bias=self.norm1.bias,
            depthwise_weight=self.depthwise.weight,
            depthwise_bias=self.depthwise.bias,
            norm2_weight=self.norm2.weight,
            norm2_bias=self.norm2.bias,
            project_weight=self.project.weight,
            project_bias=self.project.bias,
            norm3_weight=self.norm3.weight,
            norm3_bias=self.norm3.bias,
        )
        epsilons = [norm.eps for norm in norms]
        output, statistics = feed_forward_training.feed_forward_in_training(
            x, parameters, epsilons, mask
        )
        sizes = [norm.num_features for norm in norms]
        of_norms = zip(statistics.mean.split(sizes), statistics.variance.split(sizes), strict=True)
        for norm, (mean, variance) in zip(norms, of_norms, strict=True):
            update_running_statistics(norm, mean, variance, x[..., 0].numel())
        return output

    @torch.jit.ignore
    def weights(self) -> feed_forward.Weights:
        """Return the parameters as the native kernel takes them."""
        return feed_forward.Weights(
            self.expand.weight,
            self.expand.bias,
            convolution.statistics(self.norm1),
            self.depthwise.weight,
            self.depthwise.bias,
            convolution.statistics(self.norm2),
            self.project.weight,
            self.project.bias,
            convolution.statistics(self.norm3),
            [self.norm1.eps, self.norm2.eps, self.norm3.eps],
        )
