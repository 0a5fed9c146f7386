"""The ranks of a data-parallel training, run by ``test_data_parallel.py``.

Arguments: number of ranks, folder for the final states (``RANK.pt``), and the ways to train, one run
    each; see ``train``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import dgt

STEPS, IMAGES, HEIGHT, WIDTH, DIM = 4, 8, 6, 5, 16


class Network(nn.Module):
    """Two attention layers with the other parts of a block, without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dgt.DGAttention(DIM, 2, num_groups=5, top_k=6, tau=0.3)
        self.norm = nn.LayerNorm(DIM)
        self.second = dgt.DGAttention(DIM, 2, num_groups=4, top_k=6, cosine=True)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, 3)."""
        x = x + self.first(x)
        x = x + self.second(self.norm(x))
        return self.head(x.mean((1, 2)))


def train(rank: int, ranks: int, way: str) -> dict[str, Tensor]:
    """Train on this rank's share of every batch; return the state, without shards.

    Ways: DDP with "one batch" a step, two micro-batches under "no_sync", or two that each
    synchronize ("two batches"); "ZeRO", which shares out the optimizer; parameters shared out
    ("fully_shard"), or flat as well ("flat"). In these, centroids are joined, and every rank has
    what one process alone has. "local": DDP without joining them. "uneven": the second rank has
    fewer batches. "own models": no DDP. "first alone": nor does the second rank train.
    """
    torch.manual_seed(3 + (rank if way == "own models" else 0))
    model = Network()
    if way not in ("local", "uneven", "own models", "first alone"):
        dgt.convert_sync_centroids(model)
    parallel: nn.Module = model
    if ranks > 1 and way == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif ranks > 1 and way == "flat":
        parallel = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif ranks > 1 and way not in ("own models", "first alone"):
        parallel = DistributedDataParallel(model)
    # Adam would amplify rounding errors.
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = make_optimizer(parallel.parameters())
    if ranks > 1 and way == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )
    steps = STEPS - 2 * (way == "uneven" and rank == 1) - STEPS * (way == "first alone" and rank)
    is_uneven = ranks > 1 and way == "uneven"
    with Join([parallel]) if is_uneven else contextlib.nullcontext():
        for step in range(steps):
            batch = make_batch(step).chunk(2 if way == "own models" else ranks)[rank]
            parts = batch.chunk(2 if way in ("no_sync", "two batches") and step > 0 else 1)
            optimizer.zero_grad()
            for i, part in enumerate(parts):
                waits = way == "no_sync" and ranks > 1 and i < len(parts) - 1
                with parallel.no_sync() if waits else contextlib.nullcontext():
                    (parallel(part).square().mean() / len(parts)).backward()
            optimizer.step()
            if way == "flat":
                dgt.step_centroids(model, learning_rate=0.1)
    states = {
        **dict(model.named_buffers()),
        **({} if "flat" in way or "shard" in way else model.state_dict()),
    }
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in states.items()}


def make_batch(step: int) -> Tensor:
    """The images of a step, over all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(IMAGES, HEIGHT, WIDTH, DIM, generator=generator) + 0.3


def join(rank: int, ranks: int, folder: Path, ways: list[str]) -> None:
    """Join the other ranks, train in every way, and write the states."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks
    )
    torch.save({way: train(rank, ranks, way) for way in ways}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, which need not import everything again, and fail if one of them does."""
    ranks, folder, ways = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    processes = list[int]()
    for rank in range(ranks):
        processes.append(os.fork())
        if processes[-1] == 0:
            join(rank, ranks, folder, ways)
            return
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    if any(statuses):
        sys.exit(f"the ranks ended with {statuses}")


if __name__ == "__main__":
    main()
