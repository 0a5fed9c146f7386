"""Training in several processes: Fabric as a recipe asks for it, sharded weights (FSDP2), BatchNorm over all of them.

Processes are started by Fabric itself, by torchrun or by SLURM; each trains on its share of every batch, and centroids
move by the statistics of all (`dgt.layers.centroids`). Under "ddp" every process holds the whole network; under
"fsdp2" each holds a share of the weights, gradients and optimizer's moments.
"""

from __future__ import annotations

import os
import re
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


def build_fabric(settings: TrainerSettings, task: Task) -> Fabric:
    """Fabric with the recipe's devices and precision, not yet launched; sets what torch has of it for the process.

    Raises UserError, naming the section, where the machine or the task has not what it asks for.
    """
    precision: Any = settings.precision
    if precision == task.refused_precision:
        mixed = precision.replace("true", "mixed")
        raise UserError(f"trainer.precision must not be {precision!r} for task {task.name!r}; {mixed!r} is possible")
    if precision == "auto":
        on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        precision = "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    strategy: Any = ModelParallelStrategy(_shard) if settings.strategy == SHARDED else settings.strategy
    try:
        places: dict[str, Any] = {"devices": settings.devices, "num_nodes": settings.num_nodes}
        return Fabric(accelerator=settings.accelerator, strategy=strategy, precision=precision, **places)
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"recipe section 'trainer' does not fit this machine: {error}") from error


def _shard(objective: nn.Module, _: Any) -> nn.Module:
    """Shard every block of the network, and what is left as one; its `forward_methods` gather weights as well."""
    network = cast(nn.Module, objective.network)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (world_size(),))
    for module in [*(each for each in network.modules() if "Block" in type(each).__name__), network]:
        fully_shard(module, mesh=mesh)
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
    def forward(_: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _SumOverProcesses.forward(_, gradient)


class SummedBatchNorm(nn.BatchNorm2d):
    """BatchNorm whose training statistics are those of all processes' batches, on any device: two collectives each."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, H, W) by the mean and variance of each channel."""
        if not self.training or world_size() == 1:
            return super().forward(input)
        count = input.new_tensor([input.numel() / input.shape[1]])
        sums = _SumOverProcesses.apply(torch.cat([input.sum((0, 2, 3)), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - mean.view(1, -1, 1, 1)
        variance = _SumOverProcesses.apply(centred.square().sum((0, 2, 3))) / total
        kept: Any = self  # not None, as `synchronise_batchnorm` saw
        with torch.no_grad():
            kept.num_batches_tracked += 1
            kept.running_mean.lerp_(mean.to(kept.running_mean), kept.momentum)
            kept.running_var.lerp_((variance * total / (total - 1)).to(kept.running_var), kept.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def synchronise_batchnorm(network: nn.Module, device: torch.device) -> nn.Module:
    """Let BatchNorm count over the batches of all processes: a training step is then that of one process with it all.

    `network` is changed in place: to torch's SyncBatchNorm on a GPU, to `SummedBatchNorm` elsewhere, where that is not
    known. Raises UserError for a kind of BatchNorm that cannot be converted on this device.
    """
    if device.type == "cuda":
        return convert_sync_batchnorm(network)
    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            usual = module.affine and module.track_running_stats and module.momentum is not None
            if type(module) is not nn.BatchNorm2d or not usual:
                raise UserError(f"trainer.sync_batchnorm: {name} is a {type(module).__name__}, not known on {device}")
            module.__class__ = SummedBatchNorm
    return network


def join_broken_images(reports: dict[str, BrokenImages]) -> None:
    """Put the broken images that any process met into the reports of all; a matter of all processes.

    BrokenImagesError on all of them, where together they are too many.
    """
    for of_one in gather_objects({part: report.broken for part, report in reports.items()}):
        for part, report in reports.items():
            report.record(BrokenImage(*each) for each in of_one[part].items())


def lost_process(error: Exception) -> LostProcess | None:
    """What a collective says when another process has gone, as a sentence; None for any other error."""
    told_by_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _LOST.search(str(error)))
    if world_size() == 1 or not told_by_torch:
        return None
    return LostProcess(
        f"process {rank()} of {world_size()} lost another one, whose own output says why it ended; started again with "
        f"`--resume auto` the run resumes from its last checkpoint ({' '.join(str(error).split())[:200]})"
    )
