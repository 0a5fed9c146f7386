"""One rank of a data-parallel training, run by ``test_data_parallel.py`` once per rank.

Arguments: rank, number of ranks, rendezvous file, file for the final states, and the ways to
    accumulate, one run each: "no" accumulation, two micro-batches under "no_sync", or two that each
        synchronize ("plain").
"""

from __future__ import annotations

import contextlib
import sys

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam would amplify rounding errors
    for step in range(STEPS):
        batch = torch.randn(IMAGES, HEIGHT, WIDTH, DIM, generator=torch.Generator().manual_seed(step)) + 0.3
        share = batch.chunk(ranks)[rank]
        parts = share.chunk(1 if accumulate == "no" or step == 0 else 2)
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            waits = accumulate == "no_sync" and ranks > 1 and i < len(parts) - 1
            with parallel.no_sync() if waits else contextlib.nullcontext():
                (parallel(part).square().mean() / len(parts)).backward()
        optimizer.step()
    return model


def main() -> None:
    """Join the other ranks, train in every way, and write the states."""
    rank, ranks, meeting, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.save({way: train(rank, ranks, way).state_dict() for way in sys.argv[5:]}, result)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
