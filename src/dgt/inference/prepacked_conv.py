"""Convolutions whose weights stay in the layout that oneDNN computes in: for models that only predict, on CPUs.

``F.conv2d`` brings a weight into that layout at every call, which on few tokens takes a fifth of the time, and GELU
reads and writes the result once more. oneDNN can keep the one and do the other on its way. PyTorch lends that to its
own compiler alone, through operators without a promise (``torch.ops.mkldnn``): where they are missing, and for
everything that they do not take (gradients, other devices and types), the convolution is the plain one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary


def takes_gradients(x: Tensor) -> bool:
    """Tell whether what is computed from a tensor must be differentiable."""
    return torch.is_grad_enabled() and x.requires_grad


class PackedConv(nn.Conv2d):
    """A convolution that only predicts, followed by GELU if asked to.

    A second copy of the weight, packed, stands beside it from the first call on, until the weight changes or goes. It
    notices what autograd would notice: not values written through ``weight.data``.

    Args:
        conv: whose geometry, and with no others, weight and bias it takes.
        weight, bias: others in their place.
        gelu: apply GELU to the result.
    """

    def __init__(
        self, conv: nn.Conv2d, weight: Tensor | None = None, bias: Tensor | None = None, gelu: bool = False
    ) -> None:
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
        geometry: dict[str, Any] = {name: getattr(conv, name) for name in names}
        super().__init__(**geometry, bias=False, device="meta")
        weight, bias = conv.weight if weight is None else weight, conv.bias if bias is None else bias
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.gelu = gelu

    def train(self, mode: bool = True) -> "PackedConv":
        """Stay in evaluation mode; RuntimeError when asked to train."""
        if mode:
            raise RuntimeError("the inference form of a model cannot be trained: train the model it was made from")
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H', W')."""
        compiled: Any = torch.ops.dgt.convolve
        convolve = _plain if not self._can_pack(x) else compiled if torch.compiler.is_compiling() else _packed
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        convolved: Tensor = convolve(x, self.weight, self.bias, self.gelu, *geometry)
        return convolved

    def _can_pack(self, x: Tensor) -> bool:
        suits = x.device.type == "cpu" and x.dtype == self.weight.dtype and x.dtype in PACKABLE and x.numel() > 0
        watched = torch.is_autocast_enabled("cpu") or takes_gradients(x)
        return suits and not watched and bool(torch.backends.mkldnn.enabled)


# Weight -> it packed, what it was then (address, version, type), and its storage: while that lives, no other one has
# its address.
PACKED = WeakIdKeyDictionary()


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, *geometry: Any) -> Tensor:
    """A convolution of this stride, padding, dilation and groups, then GELU or nothing."""
    convolved = F.conv2d(x, weight, bias, *geometry)
    return F.gelu(convolved) if gelu else convolved


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, *geometry: Any) -> Tensor:
    """The same with a packed weight."""
    if weight.is_inference():  # nothing tells when it changes
        return _plain(x, weight, bias, gelu, *geometry)
    stride, padding, dilation, groups = geometry
    version = (weight.data_ptr(), weight._version, weight.dtype)
    kept = PACKED.get(weight)
    if kept is None or kept[1] != version or kept[2].expired():
        packed = torch.ops.aten.mkldnn_reorder_conv2d_weight(
            weight.detach().to_mkldnn(),
            padding,
            stride,
            dilation,
            groups,
            x.shape,  # of which any other will do too
        )
        kept = PACKED[weight] = (packed, version, StorageWeakRef(weight.untyped_storage()))
    after: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")
    result: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, kept[0], bias, padding, stride, dilation, groups, *after
    )
    return result


# A compiler sees one operator, and leaves packing to it.
torch.library.define(
    "dgt::convolve",
    "(Tensor x, Tensor weight, Tensor? bias, bool gelu, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
)
torch.library.impl("dgt::convolve", "CPU", _packed)
torch.library.register_fake("dgt::convolve", _plain)

# The types that oneDNN takes on this processor with this PyTorch.
PACKABLE: tuple[torch.dtype, ...] = ()
if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
    PACKABLE = (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)
