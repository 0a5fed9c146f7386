"""Training in several processes: Fabric as a recipe asks for it, sharded weights (FSDP2), BatchNorm over all of them.

Processes are started by Fabric itself, by torchrun or by SLURM; each trains on its share of every batch, and centroids
move by the statistics of all (`dgt.layers.centroids`). Under "ddp" every process holds the whole network; under
"fsdp2" each holds a share of the weights, gradients and optimizer's moments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from dgt.data.image_io import BrokenImage, BrokenImages
from dgt.tasks import Task
from dgt.training.recipe import TrainerSettings
from dgt.utils.distributed import gather_objects, rank, world_size
from dgt.utils.errors import LostProcess, UserError

SHARDED = "fsdp2"
# What gloo, NCCL and the store say of a process that is no longer there: plain RuntimeErrors, some of them.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|remote process|TCPStore|heartbeat", re.I)


def build_fabric(settings: TrainerSettings, task: Task, **alone: Any) -> Fabric:
    """Fabric with the recipe's devices and precision, not yet launched; sets what torch has of it for the process.

    Args:
        settings: the recipe's section `trainer`.
        task: the recipe's.
        alone: `devices=1` and the like, in place of the recipe's.

    Raises:
        UserError: naming the section, where the machine or the task has not what it asks for.
    """
    if settings.precision == task.refused_precision:
        mixed = settings.precision.replace("true", "mixed")
        raise UserError(
            f"trainer.precision must not be {settings.precision!r} for task {task.name!r}; {mixed!r} is possible"
        )
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    places: dict[str, Any] = {"devices": settings.devices, "num_nodes": settings.num_nodes}
    sharded = settings.strategy == SHARDED and not alone
    strategy: Any = ModelParallelStrategy(_shard) if sharded else "auto" if alone else settings.strategy
    try:
        where = {"accelerator": settings.accelerator, "strategy": strategy, **places, **alone}
        return Fabric(precision=choose_precision(settings), **where)
    except (ValueError, MisconfigurationException) as error:
        raise UserError(f"recipe section 'trainer' does not fit this machine: {error}") from error


def choose_precision(settings: TrainerSettings) -> Any:
    """Fabric's precision: the recipe's; auto is bf16-mixed on a GPU that has it and 32-true elsewhere."""
    if settings.precision != "auto":
        return settings.precision
    on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"


def _shard(objective: nn.Module, _: Any) -> nn.Module:
    """Shard every block of the network, and what is left as one; its `forward_methods` gather weights as well."""
    network = cast(nn.Module, objective.network)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (world_size(),))
    for block in [module for module in network.modules() if "Block" in type(module).__name__]:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    for name in getattr(network, "forward_methods", ()):
        register_fsdp_forward_method(network, name)
    return objective


def any_process(fabric: Fabric, decision: bool) -> bool:
    """Whether any process decides so; all must ask at the same place."""
    if fabric.world_size == 1:
        return decision
    return bool(fabric.all_reduce(torch.tensor(float(decision), device=fabric.device), reduce_op="sum"))


def full_weights(network: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a network, sharded or not; all processes must ask, only the first gets sharded ones."""
    if not isinstance(network, FSDPModule):
        return dict(network.state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(network, options=options))


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class SummedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose training statistics are those of all processes' batches, on any device: two collectives each.

    On a GPU torch's own `SyncBatchNorm` is faster; it refuses other devices.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (B, C, ...) will do."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, ...) by the mean and variance of each channel."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = input.new_tensor([input.numel() / input.shape[1]])
        sums = _SumOverProcesses.apply(torch.cat([input.sum(dims), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - mean.view(shape)
        variance = _SumOverProcesses.apply(centred.square().sum(dims)) / total
        self._follow(mean.detach(), variance.detach() * total / (total - 1))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        return normal if self.weight is None else normal * self.weight.view(shape) + self.bias.view(shape)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def synchronise_batchnorm(network: nn.Module, device: torch.device) -> nn.Module:
    """Let BatchNorm count over the batches of all processes: a training step is then that of one process with it all.

    Args:
        network: any network; changed in place.
        device: what it trains on: torch's SyncBatchNorm on a GPU, `SummedBatchNorm` elsewhere.

    Raises:
        ValueError: a kind of BatchNorm that cannot be converted on this device.
    """
    if device.type == "cuda":
        return convert_sync_batchnorm(network)
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                raise UserError(f"trainer.sync_batchnorm: {name} is a {type(module).__name__}, not known on {device}")
            module.__class__ = SummedBatchNorm
    return network


def join_ledgers(ledgers: dict[str, BrokenImages]) -> None:
    """Put the broken images that any process met into the ledgers of all; a matter of all processes.

    Raises:
        BrokenImagesError: on all of them, where together they are too many.
    """
    if world_size() == 1:
        return
    found = gather_objects({part: ledger.broken for part, ledger in ledgers.items()})
    for part, ledger in ledgers.items():
        joined = {path: reason for of_one in found for path, reason in of_one[part].items()}
        ledger.record(BrokenImage(path, reason) for path, reason in joined.items())


@contextmanager
def explain_lost_processes() -> Iterator[None]:
    """Turn what a collective says when another process has gone into a sentence.

    Raises:
        LostProcess: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1 or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            raise
        reason = " ".join(str(error).split())[:200]
        raise LostProcess(
            f"process {rank()} of {world_size()} lost another one, whose own output says why it ended; "
            f"started again with `--resume auto` the run goes on from its last checkpoint ({reason})"
        ) from error
