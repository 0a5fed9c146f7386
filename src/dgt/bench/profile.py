"""``dgt profile``: which way of attending pays at one size on this machine, beside PyTorch's own over all keys."""

from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F

from dgt.bench.attention import GLOBAL, WAYS, Case, time_ways
from dgt.models import DynamicGroupTransformer, capture
from dgt.utils.errors import UserError

COLUMNS = {
    **{"attention": "{case}", "way": "{way}", "forward ms": "{ms:.2f}", "times as fast": "**{ratio:.2f}**"},
    **{"with backward ms": "{backward_ms:.2f}", "so many times": "**{ratio_backward:.2f}**"},
    "peak extra MiB": "{peak_mib:.1f}",
}


def profile_attention(case: Case, device: str = "cpu", rounds: int = 7) -> list[dict[str, Any]]:
    """One row a way of attending, the first PyTorch's over all keys: times, ratios to the first, MiB a forward adds."""
    return time_ways(case, [GLOBAL, *(way for way in WAYS if way != "triton" or device == "cuda")], device, rounds)


def advice(rows: list[dict[str, Any]]) -> str:
    """One sentence on the rows of one case: what to take for predicting, and for training."""
    words = []
    for purpose, ratio in (("predict", "ratio"), ("train", "ratio_backward")):
        best = max(rows, key=lambda row: row[ratio])
        taken = f"take {best['way']}, {best[ratio]:.1f} times as fast"
        words.append(f"to {purpose} {taken if best[ratio] > 1.05 else 'keep all keys'}")
    return f"{rows[0]['case']}: {'; '.join(words)}."


def cases_of_model(name: str, size: int, groups: int, top_k: int) -> list[Case]:
    """The sizes of attention in a timm model on one image, in a DGT those of groups; UserError where there are none."""
    if not timm.is_model(name):
        raise UserError(f"{name!r} is no model of timm: give a name, or --shape B,H,L,D")
    model, images = timm.create_model(name).eval(), torch.zeros(1, 3, size, size)
    found: list[Case] = []
    if isinstance(model, DynamicGroupTransformer):
        for layer, (_, h, w, dim) in capture(model, images, lambda seen: (seen.layer, seen.x.shape))[0]:
            found.append(((1, layer.num_heads, h * w, dim // layer.num_heads), layer.centroids.shape[1], layer.top_k))
    else:
        attend = F.scaled_dot_product_attention
        with torch.inference_mode(), patch.object(F, attend.__name__, wraps=attend) as seen:
            model(images)
        shapes = [[tuple(tensor.shape) for tensor in call.args[:2]] for call in seen.call_args_list]
        found = [(query, groups, top_k) for query, key in shapes if query == key]
    if not found:
        raise UserError(f"{name!r} attends nowhere through PyTorch's function with a query for each key: give --shape")
    return list(dict.fromkeys(found))
