"""Training in several processes: strategies, weights shared out among them (FSDP2), BatchNorm over all of them.

Processes are started by Lightning itself, by torchrun or by SLURM; each trains on its share of every batch
(`dgt.data.loader.EpochBatches`), and centroids move by the statistics of all (`dgt.layers.centroids`). Under "ddp"
every process holds the whole network; under "fsdp2" each holds a share of the weights, gradients and optimizer's
moments, and a checkpoint is a folder with a file from each (`torch.distributed.checkpoint`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from dgt.data.image_io import BrokenImage, BrokenImages
from dgt.tasks import TrainingTask
from dgt.utils.distributed import rank as process_rank
from dgt.utils.distributed import world_size as processes

SHARDED = "fsdp2"
# What gloo, NCCL and the store say of a process that is no longer there.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|remote process|TCPStore|heartbeat", re.I)


class ShardedWeights(ModelParallelStrategy):
    """FSDP2 over all processes, through Lightning; a checkpoint's folder gets its name once it is complete."""

    def setup_environment(self) -> None:
        """Make one group of all processes."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint's folder under another name, then let it take the place of an older one."""
        path = Path(self.broadcast(filepath))
        partial, old = (path.with_name(f".{path.name}.{word}") for word in ("part", "old"))
        if self.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
        self.barrier()
        super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        if self.is_global_zero:
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                os.replace(path, old)
            os.replace(partial, path)
            shutil.rmtree(old, ignore_errors=True)
        self.barrier()


def build_strategy(name: str) -> str | Strategy:
    """Lightning's strategy of a recipe's `trainer.strategy`: "fsdp2" is built here, all else is Lightning's by name."""
    return ShardedWeights() if name == SHARDED else name


def task_class(task: type[TrainingTask], strategy: str) -> type[TrainingTask]:
    """The class of a task under a strategy: under "fsdp2", one that shards its network before the first step."""
    return type(f"Sharded{task.__name__}", (_Sharding, task), {}) if strategy == SHARDED else task


class _Sharding(LightningModule):
    """Shards the attribute `network` over the processes."""

    network: nn.Module

    def configure_model(self) -> None:
        """Shard every block, and what is left as one; once. A network's `forward_methods` gather weights as well."""
        if self.device_mesh is None or isinstance(self.network, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in [module for module in self.network.modules() if "Block" in type(module).__name__]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)
        for name in getattr(self.network, "forward_methods", ()):
            register_fsdp_forward_method(self.network, name)


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
        if not self.training or processes() == 1:
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
                raise ValueError(f"trainer.sync_batchnorm: {name} is a {type(module).__name__}, not known on {device}")
            module.__class__ = SummedBatchNorm
    return network


class BrokenImagesOfAll(Callback):
    """At the end of every epoch, and before a checkpoint, tell all processes which images any of them could not read.

    So the first one's list is complete, and the share that stops the run is that of the whole split.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the ledgers after the training images."""
        join_ledgers(trainer.datamodule.ledgers)  # type: ignore[attr-defined]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the ledgers after the validation images."""
        join_ledgers(trainer.datamodule.ledgers)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Join the ledgers that the checkpoint will hold."""
        join_ledgers(trainer.datamodule.ledgers)  # type: ignore[attr-defined]


def join_ledgers(ledgers: dict[str, BrokenImages]) -> None:
    """Put the broken images that any process met into the ledgers of all; a matter of all processes.

    Raises:
        BrokenImagesError: on all of them, where together they are too many.
    """
    if processes() == 1:
        return
    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, {part: ledger.broken for part, ledger in ledgers.items()})
    for part, ledger in ledgers.items():
        joined = {path: reason for of_one in found for path, reason in of_one[part].items()}
        ledger.record(BrokenImage(path, reason) for path, reason in joined.items())


@contextmanager
def telling_lost_processes() -> Iterator[None]:
    """Turn what a collective says when another process has gone into a sentence.

    Raises:
        RuntimeError: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        rank, world_size = process_rank(), processes()
        if world_size == 1 or not _LOST.search(str(error)):
            raise
        reason = " ".join(str(error).split())[:200]
        raise RuntimeError(
            f"process {rank} of {world_size} lost another one, whose own output says why it ended; "
            f"started again with `--resume auto` the run goes on from its last checkpoint ({reason})"
        ) from error
