"""The processes of a distributed run, as one process sees them.

A process alone is a group of one.
"""

from typing import Any

import torch.distributed as dist


def rank() -> int:
    """The number of this process, from 0."""
    return int(dist.get_rank()) if world_size() > 1 else 0


def world_size() -> int:
    """How many processes there are."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def gather_objects(value: Any) -> list[Any]:
    """The plain value of every process, in their order; all processes must call it."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
