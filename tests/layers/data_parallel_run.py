"""The ranks of a data-parallel training, run by ``test_data_parallel.py``.

Arguments: number of ranks, folder for the final states (``RANK.pt``), and the ways to
    accumulate, one run each: "no" accumulation, two micro-batches under "no_sync", or two that each
        synchronize ("plain").
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def train(rank: int, ranks: int, accumulate: str) -> Network:
    """Train on this rank's share of every batch."""
    torch.manual_seed(3)
    model = Network()
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    # Adam would amplify rounding errors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batch = (
            torch.randn(IMAGES, HEIGHT, WIDTH, DIM, generator=torch.Generator().manual_seed(step))
            + 0.3
        )
        share = batch.chunk(ranks)[rank]
        parts = share.chunk(1 if accumulate == "no" or step == 0 else 2)
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            waits = accumulate == "no_sync" and ranks > 1 and i < len(parts) - 1
            with parallel.no_sync() if waits else contextlib.nullcontext():
                (parallel(part).square().mean() / len(parts)).backward()
        optimizer.step()
    return model


def join(rank: int, ranks: int, folder: Path, ways: list[str]) -> None:
    """Join the other ranks, train in every way, and write the states."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks
    )
    torch.save({way: train(rank, ranks, way).state_dict() for way in ways}, folder / f"{rank}.pt")
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
