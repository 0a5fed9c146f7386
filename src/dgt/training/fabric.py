"""Devices, precision and strategy of a training, by Lightning Fabric.

Processes are started by Fabric itself, torchrun or Slurm. Under "ddp" each holds the whole network,
under "fsdp2" a share of the weights, gradients and optimizer's moments.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dgt.ops.cpu.library import cpu_capabilities
from dgt.runs.recipe import TrainerSettings
from dgt.utils.distributed import world_size
from dgt.utils.errors import UserError


def build_fabric(settings: TrainerSettings) -> Fabric:
    """Build a Fabric with the recipe's devices and precision, not yet launched.

    Raises:
        UserError: the machine lacks what the settings ask for.
    """
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    # Gradients of depthwise weights (C, 1, 3, 3) differ from them in the stride of the 1, which costs a small copy.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    strategy: Any = settings.strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(_shard)
    precision: Any = _precision(settings)
    devices: Any = settings.devices
    try:
        return Fabric(
            accelerator=settings.accelerator,
            strategy=strategy,
            precision=precision,
            devices=devices,
            num_nodes=settings.num_nodes,
        )
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"recipe section 'trainer' does not fit this machine: {error}") from error


def _precision(settings: TrainerSettings) -> str:
    """The precision that a recipe asks for, where the machine has it.

    Its `auto` is bf16-mixed on a GPU that has it. On a CPU 16-mixed is 32-true, as float16 is for
    GPUs, and so is bf16-mixed without units for it, where it takes many times as long.
    """
    precision = settings.precision
    on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if precision == "auto":
        return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    on_cpu = settings.accelerator == "cpu" or (
        settings.accelerator == "auto" and not torch.accelerator.is_available()
    )
    if on_cpu and precision == "16-mixed":
        return "32-true"
    if on_cpu and precision == "bf16-mixed" and not has_bfloat16_units():
        return "32-true"
    return precision


def precision_note(settings: TrainerSettings, fabric: Fabric) -> str | None:
    """A line for a precision that is not the recipe's; None where it is."""
    used = fabric.strategy.precision.precision
    if settings.precision in ("auto", used):
        return None
    reason = "this CPU has no units for bfloat16"
    if settings.precision == "16-mixed":
        reason = "mixed precision in float16 is for GPUs"
    return f"trainer.precision {settings.precision} is {used} here: {reason}"


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 itself, and not by way of float32."""
    units = cpu_capabilities()
    return any(units.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _shard(objective: nn.Module, _: Any) -> nn.Module:
    """Shard every block of the network, and the rest as one unit.

    Its `forward_methods` gather weights as well.
    """
    network = cast(nn.Module, objective.network)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (world_size(),))
    blocks = [module for module in network.modules() if "Block" in type(module).__name__]
    for module in [*blocks, network]:
        fully_shard(module, mesh=mesh)
    for name in getattr(network, "forward_methods", ()):
        register_fsdp_forward_method(network, name)
    return objective
