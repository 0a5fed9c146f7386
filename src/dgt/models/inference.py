"""Models that only predict: the same outputs from fewer and larger steps."""

import copy

import torch
from torch import nn

from dgt.layers.folded import FORMS, inference_form


def optimize_for_inference(model: nn.Module) -> nn.Module:
    """Return a copy of a model in the form that only predicts: faster, equal outputs up to rounding.

    BatchNorm moves into the convolutions beside it, borders included; residuals around depthwise convolutions, unit
    centroids and the choice of keys are folded as told in :mod:`dgt.layers.folded`. On a CPU convolutions keep a packed
    copy of their weights (:mod:`dgt.layers.packed`), from their first call on. The model itself, which is what to
    train, save and export, stays as it is.

    Args:
        model: any module that contains parts of this package: a model of :func:`timm.create_model`, a backbone, a
            detector around one. Everything else in it stays as it is.

    Returns:
        The copy, in evaluation mode, without gradients; it cannot be trained.

    Raises:
        TypeError: if ``model`` is no module.
        ValueError: if it contains nothing that has such a form.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if not any(type(module) in FORMS for module in model.modules()):
        raise ValueError(f"model must contain parts of a DGT, got a {type(model).__name__} without any")
    with torch.inference_mode(False):  # else nobody could tell when its weights change
        twin = nn.ModuleList([copy.deepcopy(model).eval().requires_grad_(False)])
        _replace_parts(twin)
        return twin[0].to(memory_format=torch.channels_last)


def _replace_parts(module: nn.Module) -> None:
    """Bring every part of a module, at any depth, into the form that only predicts, in place."""
    for name, child in list(module.named_children()):
        form = inference_form(child)
        if form is child and type(child) not in FORMS:
            _replace_parts(child)
        else:
            setattr(module, name, form)
