"""Convolutions whose weights stay in the layout that oneDNN computes in: for models that only predict, on CPUs.

``F.conv2d`` brings a weight into that layout at every call, which on few tokens takes a fifth of the time, and GELU
reads and writes the result once more. oneDNN can keep the one and do the other on its way. PyTorch lends that to its
own compiler alone, through operators without a promise (``torch.ops.mkldnn``): where they are missing, and for
everything that they do not take (gradients, other devices, tracing), the convolution is the plain one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedConv(nn.Conv2d):
    """A convolution that only predicts, followed by GELU if asked to.

    The packed weight is a second copy beside ``weight``, made at the first call and again after ``weight`` changed; it
    is neither saved nor copied with the module.

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
        self._packed: tuple[object, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H', W')."""
        if self._can_pack(x):
            name, algorithm = ("gelu", "none") if self.gelu else ("none", "")
            place = (self.padding, self.stride, self.dilation, self.groups)
            convolved: Tensor = torch.ops.mkldnn._convolution_pointwise(
                x, self._pack(x), self.bias, *place, name, [], algorithm
            )
            return convolved
        return F.gelu(super().forward(x)) if self.gelu else super().forward(x)

    def _can_pack(self, x: Tensor) -> bool:
        suits = x.device.type == "cpu" and x.dtype == self.weight.dtype and x.dtype in PACKABLE and x.numel() > 0
        followed = torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad)
        return suits and not followed and not torch.is_autocast_enabled("cpu") and bool(torch.backends.mkldnn.enabled)

    def _pack(self, x: Tensor) -> Tensor:
        weight = self.weight
        version = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if self._packed is None or self._packed[0] != version:
            place = (self.padding, self.stride, self.dilation, self.groups)
            # The size is a hint: the operator takes any other one too.
            packed = torch.ops.aten.mkldnn_reorder_conv2d_weight(weight.detach().to_mkldnn(), *place, x.shape)
            self._packed = (version, packed)
        return self._packed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


def _packable() -> tuple[torch.dtype, ...]:
    """The types that oneDNN takes on this processor with this PyTorch."""
    operators = (torch.ops.mkldnn, "_convolution_pointwise"), (torch.ops.aten, "mkldnn_reorder_conv2d_weight")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(*each) for each in operators):
        return ()
    return (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


PACKABLE = _packable()
