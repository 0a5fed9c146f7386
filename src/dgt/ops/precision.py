"""Autocast switched off, where it exists: the operator's steps choose their types themselves."""

import contextlib

import torch


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which nothing is cast; a device without autocast (meta) needs none."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
