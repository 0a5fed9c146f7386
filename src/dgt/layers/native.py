"""When a layer may leave its work to the native CPU kernels, which predict and have no gradients."""

import torch
from torch import Tensor, nn

from dgt.ops.checks import has_tangent
from dgt.ops.native_loader import reason_against_native

PLAIN = (Tensor, nn.Parameter)  # neither quantized, nor distributed, nor followed by torch.fx


@torch.jit.ignore
def predicts_natively(x: Tensor, *parameters: Tensor | None) -> bool:
    """Tell whether the native kernels take this input of a layer with these parameters.

    They do in float32 on a CPU, where nobody asks for gradients. Files that other processes run,
    exported or traced, keep PyTorch's operators.
    """
    if type(x) not in PLAIN or not _is_float32_on_cpu(x):
        return False
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    asked = torch.is_grad_enabled()
    if asked and x.requires_grad:
        return False
    for parameter in parameters:
        if parameter is None:
            continue
        if type(parameter) not in PLAIN or not _is_float32_on_cpu(parameter):
            return False
        if asked and parameter.requires_grad:
            return False
    return x.numel() > 0 and not has_tangent(x) and reason_against_native() is None


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"
