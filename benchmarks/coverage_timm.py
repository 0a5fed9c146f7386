"""What `dgt.accelerate` finds in every architecture of timm that has pretrained weights.

Families are timm's own: the files that its registry names. Each architecture is built without
values (on the "meta" device) and called once at its own size. No weights are downloaded, and nothing
is measured.
"""

from __future__ import annotations

import collections
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Row = dict[str, Any]
SOFTMAX = ("softmax", "_softmax")
LEAST_KEYS = 16  # a softmax over fewer is not over tokens, but over branches or channels
OWN = "a softmax of its own, not F.scaled_dot_product_attention"
NONE = "no attention found"


class SoftmaxCounter(TorchFunctionMode):
    """Counts softmax over the last dimension of matrices: attention without PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in SOFTMAX and isinstance(found, torch.Tensor):
            matrices = found.dim() >= 3 and min(found.shape[-2:]) >= LEAST_KEYS
            self.count += matrices
        return found


def summarize(rows: Any) -> Row:
    """Rows of `inspect_model` as a row of the results."""
    reasons = [reason_of(row) for row in rows]
    return {
        "attentions": len(rows),
        "grouped": sum(not reason for reason in reasons),
        "tokens": max(row.tokens for row in rows),
        "prefix": max(row.num_prefix_tokens for row in rows),
        "reasons": dict(collections.Counter(reason for reason in reasons if reason)),
    }


def reason_of(row: Any) -> str:
    """Why an attention does not gain at any size; empty if it may.

    At larger sizes, windows stay as small, and so does one side of a pooling head.
    """
    if row.tokens != row.key_tokens and not row.reason:
        return "queries and keys are of different tokens"
    if row.sequences > 1 and not row.reason:
        return "in windows"
    return str(row.reason.partition(",")[0])


def refused(reason: str) -> Row:
    """A row of the results for what has nothing that could be grouped."""
    return {"attentions": 0, "grouped": 0, "reasons": {reason: 1}}


def why_refused(model: torch.nn.Module, images: Any, error: Exception) -> str:
    """The reason for a model that never calls PyTorch's function, or the error itself."""
    if "must call F.scaled_dot_product_attention" not in str(error):
        return str(error).partition(", got")[0]
    with SoftmaxCounter() as counter, torch.no_grad():
        model(**images) if isinstance(images, dict) else model(images)
    return OWN if counter.count else NONE


def look(name: str) -> Row:
    """What is found in one architecture: its attentions, which of them can be grouped, and why the
    others cannot.
    """
    import timm

    from dgt.acceleration import inspect_model

    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.empty(1, *model.default_cfg["input_size"])
        try:
            rows = inspect_model(model, images, least_tokens=0)
        except ValueError as error:
            return refused(why_refused(model, images, error))
    return {"pixels": images.shape[-1], **summarize(rows)}


@cache
def architectures() -> dict[str, tuple[str, int]]:
    """Family and number of pretrained tags of every architecture that has any."""
    import timm

    tags = collections.Counter(tag.split(".")[0] for tag in timm.list_pretrained())
    return {
        name: (family, tags[name])
        for family in timm.list_modules()
        for name in timm.list_models(module=family)
        if tags[name] and not name.startswith("dgt_")  # which dgt adds
    }


def look_at_architecture(name: str) -> Row:
    """The row of an architecture in the results."""
    family, tags = architectures()[name]
    try:
        found = look(name)
    except Exception as error:
        # it cannot be built without values: the table says so and continues
        found = refused(f"not tried: {type(error).__name__}")
    return {"family": family, "tags": tags, **found}
