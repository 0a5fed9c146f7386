"""How models of different libraries are entered: what they are called with, and which of their tokens are no patches.

And transformers' own door: an attention under a name of ours, ``attn_implementation="dgt"``.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from dgt.acceleration.sdpa import CHILD, Call, Intercept, attend_in_groups, watched
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import UserError

Inputs: TypeAlias = Tensor | Mapping[str, Any]  # what a model is called with: model(images) or model(**images)

STEPS = 3  # of k-means, from queries evenly spaced over the image
TOKENS = {  # parameters that become tokens before the patches: timm's, Hugging Face's, torchvision's, those of DINO
    *("cls_token", "class_token", "class_embedding", "dist_token", "distillation_token"),
    *("reg_token", "register_tokens", "storage_tokens"),
}


def count_images(images: Inputs) -> int:
    """N: the length of the tensor, or of the first one among the inputs; what is no input of a model is refused."""
    parts = images.values() if isinstance(images, Mapping) else (images,)
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None or first.dim() < 2:
        raise TypeError(f"images must be a tensor (N, ...), or such inputs by their names, got {describe(images)}")
    return len(first)


def take(images: Inputs, which: slice) -> Inputs:
    """Some of the images: of inputs by name those parts of every tensor that is as long as there are images."""
    if not isinstance(images, Mapping):
        return images[which]
    count = count_images(images)
    parts = {name: isinstance(part, Tensor) and part.dim() > 0 and len(part) == count for name, part in images.items()}
    return {name: part[which] if parts[name] else part for name, part in images.items()}


def call_model(model: nn.Module, images: Inputs) -> Any:
    """What the model returns for the images."""
    return model(**images) if isinstance(images, Mapping) else model(images)


def count_prefix_tokens(model: nn.Module, name: str) -> int | None:
    """Class and register tokens before the patches of a module; None where nothing tells.

    The innermost part around the module that tells counts: by ``num_prefix_tokens``, as timm's models have it, or by
    parameters of its own or of its embeddings that become tokens.
    """
    while name:
        name = name.rpartition(".")[0]
        part = model.get_submodule(name)
        if isinstance(count := getattr(part, "num_prefix_tokens", None), int):
            return count
        places = (part, *(child for child_name, child in part.named_children() if "embed" in child_name))
        found = [tensor for place in places for own, tensor in place.named_parameters(recurse=False) if own in TOKENS]
        if found:
            return sum(tensor.shape[-2] if tensor.dim() > 1 else 1 for tensor in found)
    return None


def register_attention(
    name: str = "dgt", num_groups: int | None = None, top_k: int | None = None, num_prefix_tokens: int = 0
) -> None:
    """Make ``attn_implementation=name`` known to transformers, for any model that takes such names.

    Without numbers it is ``"sdpa"``, to the bit, until :func:`dgt.accelerate` or :func:`dgt.apply_plan` have a layer
    done in groups. With numbers every attention is done in groups at once, with the remainder and centroids found in
    each image, without measuring anything: no error is promised, nor that it is faster. Masked and causal attention,
    across sequences, with dropout, or of fewer than 4 ``top_k`` or 8 ``num_groups`` tokens remains ``"sdpa"``.

    Args:
        name: what models are then loaded with.
        num_groups, top_k: groups of each head, and keys of each group; both or neither.
        num_prefix_tokens: class and register tokens: with numbers nothing else tells of them.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if (num_groups is None) != (top_k is None):
        raise UserError(f"num_groups and top_k must be given both or neither, got {num_groups} and {top_k}")
    if name in ("eager", "sdpa"):
        raise UserError(f"name must be one of its own, got {name!r}, which is one of transformers")
    for argument, count in (("num_groups", num_groups), ("top_k", top_k)):
        check_count(argument, 1 if count is None else count)
    check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def answer(call: Call) -> Tensor | None:
        patches, groups, keys = call.query[..., num_prefix_tokens:, :], num_groups or 1, top_k or 1
        if call.reason is not None or patches.shape[2] < max(4 * keys, 8 * groups):
            return None
        if watched:
            raise UserError('model must attend as it was trained: load it with attn_implementation="sdpa"')
        seeds = F.normalize(patches[:, :, :: patches.shape[2] // groups][:, :, :groups].float(), dim=-1)
        return attend_in_groups(call, seeds, keys, num_prefix_tokens, STEPS).output

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
        with contextlib.nullcontext() if num_groups is None or hasattr(module, CHILD) else Intercept(answer):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)  # else transformers leaves masks out for names that it knows not
