"""Training in several processes, which Fabric, torchrun or Slurm starts; each trains on its share of every batch.

Centroids move by the statistics of all (`dgt.layers.centroids`). Under "ddp" every process holds the whole network;
under "fsdp2" a share of the weights, gradients and optimizer's moments.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dgt.data.image_io import BrokenImage, BrokenImages
from dgt.tasks import Task
from dgt.training.recipe import TrainerSettings
from dgt.utils.distributed import gather_objects, rank, world_size
from dgt.utils.errors import LostProcess, UserError

SHARDED = "fsdp2"
# What gloo, NCCL and the store say of a process that is no longer there: plain RuntimeErrors, some of them.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|remote process|TCPStore|heartbeat", re.I)


def build_fabric(settings: TrainerSettings, task: Task) -> Fabric:
    """Fabric with the recipe's devices and precision, not yet launched; UserError where machine or task lacks them."""
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


def join_broken_images(reports: dict[str, BrokenImages]) -> None:
    """Put the broken images that any process met into the reports of all; BrokenImagesError where they are too many."""
    for of_one in gather_objects({part: report.broken for part, report in reports.items()}):
        for part, report in reports.items():
            report.record(BrokenImage(*each) for each in of_one[part].items())


def lost_process(error: Exception) -> LostProcess | None:
    """What a collective says when another process has gone, as a sentence; None for any other error."""
    told = " ".join(str(error).split())
    if world_size() == 1 or not (isinstance(error, dist.DistError) or _LOST.search(told)):
        return None
    return LostProcess(
        f"process {rank()} of {world_size()} lost another one, whose own output says why it ended; started again with "
        f"`--resume auto` the run resumes from its last checkpoint ({told[:200]})"
    )
