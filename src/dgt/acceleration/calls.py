"""The calls of ``F.scaled_dot_product_attention`` in any model, read.

Attention in timm, transformers and most other libraries ends in this one function, whatever comes
before it (norms of query and key, rotary positions, biases). So the call is replaced and the module
around it stays what it is, with its weights under their names. ``nn.MultiheadAttention``
(torchvision's and open_clip's ViT) calls it out of sight, so there the function around it is read
instead, ``F.multi_head_attention_forward``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SDPA = F.scaled_dot_product_attention
PAIRS = "a pairwise mask or bias"
HIDDEN = -1e4  # a float mask below this hides a key: float16's least number is -65504


class Call(NamedTuple):
    """One call of attention."""

    query: Tensor
    """(B, H, L, D); a call of fewer or more dimensions is viewed with four."""
    key: Tensor
    """(B, Hk, S, D), where Hk divides H."""
    value: Tensor
    """(B, Hk, S, D)."""
    scale: float
    key_mask: Tensor | None
    """bool (B, S), True where a key is real; None where all are."""
    shape: torch.Size
    """Of the output: (..., L, D) as the model expects it."""
    reason: str | None
    """Why it cannot be answered in groups; None where it can be."""
    run: Callable[[], Any]
    """The call itself."""
    arguments: dict[str, Any] | None
    """Those of ``F.scaled_dot_product_attention``; None for a call that is of another function."""
    finish: Callable[[Tensor], Any] | None = None
    """What makes the output of the function that was called of the attention's; None where they are
    the same.
    """


def first_reason(reasons: dict[str, bool]) -> str | None:
    """Return the first key whose value is True."""
    return next((reason for reason, applies in reasons.items() if applies), None)


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Call:
    """Read the arguments of ``F.scaled_dot_product_attention``."""
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    heads, key_heads = view_4d(query).shape[1], view_4d(key).shape[1]
    key_mask, mask_reason = None, None
    if attn_mask is not None:
        key_mask, mask_reason = simplify_mask(*read_mask(attn_mask, query, key))
    reason = first_reason(
        {
            "causal": is_causal,
            "dropout of the attention": dropout_p > 0,
            mask_reason or PAIRS: mask_reason is not None,
            f"{query.dim()} dimensions": query.dim() < 2,
            "queries and keys differ in batch size": query.shape[:-3] != key.shape[:-3],
            "queries and keys differ in number of heads": heads % key_heads > 0,
            "values and keys differ in width": value.shape != key.shape,
            "queries and keys differ in width": query.shape[-1] != key.shape[-1],
            "operands differ in type or device": not fit_together(query, key, value),
            "a scale that needs gradients": isinstance(scale, Tensor) and scale.requires_grad,
        }
    )
    return Call(
        query=view_4d(query),
        key=view_4d(key),
        value=view_4d(value),
        scale=read_scale(scale, query),
        key_mask=key_mask,
        shape=query.shape,
        reason=reason,
        run=partial(SDPA, **arguments),
        arguments=arguments,
    )


def fit_together(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether operands are on one device and, once autocast has cast them, of one type."""
    if not query.device == key.device == value.device:
        return False
    if query.dtype == key.dtype == value.dtype:
        return True
    return torch.is_autocast_enabled(query.device.type)


def read_scale(scale: float | Tensor | None, query: Tensor) -> float:
    """The factor on the scores as a number, which in a trace comes as a tensor, as sizes do."""
    if isinstance(scale, Tensor):
        return float(scale.detach())
    return float(int(query.shape[-1]) ** -0.5) if scale is None else scale


def view_4d(tensor: Tensor) -> Tensor:
    """View (L, D) and (H, L, D) as one image, more dimensions before the heads as so many
    images.
    """
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


def read_mask(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, str | None]:
    """Read a mask of pairs, which broadcasts to (..., H, L, S), as one of keys.

    A mask that holds a row for every query counts as well if its rows are equal, as those that
    transformers makes of padding are.

    Returns:
        bool (B, S), True where a key is real; and, where it is no such mask, why not.
    """
    if mask.dim() > 4 or query.dim() != 4:
        return None, PAIRS
    mask = view_4d(mask)
    row = mask[:, 0, 0]
    has_own_heads = mask.shape[1] != 1 and mask.stride(1) != 0
    has_own_rows = mask.shape[2] != 1 and mask.stride(2) != 0
    if has_own_heads or (has_own_rows and not holds(mask[:, 0] == row[:, None])):
        return None, PAIRS
    real = row
    if mask.dtype != torch.bool:
        real = row == 0
        if not holds(real | (row < HIDDEN)):
            return None, "a bias per key"
    return real.expand(query.shape[0], key.shape[-2]), None


def simplify_mask(key_mask: Tensor | None, reason: str | None) -> tuple[Tensor | None, str | None]:
    """No mask where all keys are real; a reason where an image has none."""
    if key_mask is None or key_mask.is_meta:
        return key_mask, reason
    if bool(key_mask.all()):
        return None, None
    if not bool(key_mask.any(-1).all()):
        return None, "an image without keys"
    return key_mask, reason


def holds(test: Tensor) -> bool:
    """Whether a test holds everywhere; on the meta device, which has no values, it is taken to."""
    return test.is_meta or bool(test.all())


def read_multi_head(*operands: Any, **named: Any) -> Call:
    """Read the arguments of ``F.multi_head_attention_forward``, whose tensors are (L, B, C).

    Where groups cannot answer it, the call's operands are not projected, only their sizes are
    right, and the call itself is that of the whole function, whose output its answer is.
    """
    query, key, value, _, heads, weight, bias, bias_k, _, add_zero_attn, dropout_p, *output = (
        operands
    )
    reason = first_reason(
        {
            PAIRS: named.get("attn_mask") is not None,
            "called with need_weights": named.get("need_weights", True),
            "dropout of the attention": named.get("training", True) and dropout_p > 0,
            "extra keys, or separate projections": bias_k is not None
            or add_zero_attn
            or weight is None,
        }
    )
    mask = None
    if reason is None:
        parts = project((query, key, value), weight, bias)
        mask = padding_mask(named.get("key_padding_mask"))
    else:
        parts = [query, query, query]  # only their sizes count
    parts = [part if part.dim() == 3 else part[:, None] for part in parts]  # no batch: one image
    by_head = [part.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for part in parts]
    call = read_call(by_head[0], by_head[1], by_head[2], mask)
    if reason is not None:
        whole = partial(F.multi_head_attention_forward, *operands, **named)
        return call._replace(reason=reason, run=whole, arguments=None)

    def finish(attended: Tensor) -> tuple[Tensor, None]:
        joined = attended.permute(2, 0, 1, 3).flatten(2)
        return F.linear(joined if query.dim() == 3 else joined[:, 0], *output), None

    return call._replace(finish=finish)


def project(operands: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Project query, key and value by their thirds of a weight."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    thirds = zip(operands, weight.chunk(3), biases, strict=True)
    return [F.linear(operand, third, third_bias) for operand, third, third_bias in thirds]


def padding_mask(padding: Tensor | None) -> Tensor | None:
    """The mask that ``key_padding_mask`` (B, S) or (S,) is, whose True hides a key: bool (B, 1, 1,
    S).
    """
    if padding is None:
        return None
    hidden = padding if padding.dtype == torch.bool else padding < HIDDEN
    return ~hidden.view(-1, 1, 1, hidden.shape[-1])
