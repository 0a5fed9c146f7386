"""Layers of several processes joined: their statistics of Eq. 3 are summed over a process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import mark_static


class Statistics:
    """Sums of the normalized queries of every group, (H, G, D), and how many they are, (H, G)."""

    def __init__(self, centroids: Tensor) -> None:
        self.sums = torch.zeros_like(centroids)
        self.counts = torch.zeros_like(centroids[..., 0])
        # Or compiled code would take a batch of as many images as there are groups for their number.
        mark_static(self.sums)
        mark_static(self.counts)

    def add(self, sums: Tensor, counts: Tensor) -> None:
        """Add the statistics of other queries."""
        self.sums.add_(sums)
        self.counts.add_(counts)

    def clear(self) -> None:
        """Set them to those of no query."""
        self.sums.zero_()
        self.counts.zero_()


class Joint:
    """What the layers of a model, the same in every process of a group, are joined by.

    Args:
        process_group: of :mod:`torch.distributed`; None for all processes.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group

    def __deepcopy__(self, _: Any) -> "Joint":
        return Joint(self.process_group)  # the layers of a copied model are joined with each other

    def group_name(self) -> str:
        """Return the name of the process group; "" for a process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        group: Any = dist.group.WORLD if self.process_group is None else self.process_group
        return group.group_name if dist.get_world_size(group) > 1 else ""

    def sum_over_processes(self, statistics: list[Statistics]) -> None:
        """Sum the statistics of layers over the processes, in place, in one collective."""
        if not self.group_name():
            return
        parts = [part for each in statistics for part in (each.sums, each.counts)]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=self.process_group)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
