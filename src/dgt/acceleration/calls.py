"""The calls of ``F.scaled_dot_product_attention`` in any model, read.

Attention in timm, transformers and most other libraries ends in this one function, whatever comes
before it (norms of query and key, rotary positions, biases). So the call is replaced and the module
around it stays what it is, with its weights under their names. ``nn.MultiheadAttention``
(torchvision's and open_clip's ViT) calls it out of sight, so there the function around it is read
instead, ``F.multi_head_attention_forward``.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from dgt.ops.dispatch import is_writing_file

SDPA = F.scaled_dot_product_attention
PAIRS = "a pairwise mask or bias"
NO_KEYS = "an image without keys"
TRANSFORMED = "inside of vmap or forward-mode differentiation"
UNREADABLE = (
    "a mask in a recorded graph that does not show by its shape alone that it is one of keys"
)
HIDDEN = -1e4  # a float mask below this hides a key: float16's least number is -65504
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)  # tensors that hold what they show
MOST_FORMS = 512  # of calls, that are kept


class CallForm(NamedTuple):
    """What all calls of these shapes, types and flags have in common, whatever their values."""

    scale: float
    """On the scores, where the call does not say otherwise."""
    reason: str | None
    """Why they cannot be answered in groups; None where that depends on the mask's values at most."""
    is_plain: bool
    """Whether anything but PyTorch can compute them."""
    mask: str
    """"none"; "row", bool, of one row for all heads and queries of an image; "values", whose values
    say whether it is one of keys.
    """


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
    """bool (B, S), True where a key is real; None where all are. It says nothing of queries."""
    shape: torch.Size
    """Of the output: (..., L, D) as the model expects it."""
    reason: str | None
    """Why it cannot be answered in groups; None where it can be."""
    run: Callable[[], Any]
    """The call itself."""
    arguments: dict[str, Any] | None
    """Those of ``F.scaled_dot_product_attention``; None for a call of another function, or one that
    PyTorch alone can compute.
    """
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
    """Read the arguments of ``F.scaled_dot_product_attention``.

    What depends on shapes, types and flags is read once and kept; a mask's values in every call.
    """
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
    shapes: Sequence[tuple[int, ...]] = (query.shape, key.shape, value.shape)
    types: tuple[type, ...] = (type(query), type(key), type(value))
    mask_strides: tuple[int, ...] = ()
    if attn_mask is not None:
        shapes = (*shapes, attn_mask.shape)
        types = (*types, type(attn_mask))
        mask_strides = attn_mask.stride()
    read: Callable[..., CallForm] = kept_form
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or type(query) is FakeTensor:  # sizes may be symbols
        read = read_form
    elif torch.jit.is_tracing():  # there they are tensors
        shapes = [tuple(map(int, shape)) for shape in shapes]
    form = read(
        *shapes,
        types=types,
        devices=(query.device, key.device, value.device),
        mask_dtype=None if attn_mask is None else attn_mask.dtype,
        mask_strides=mask_strides,
        has_dropout=dropout_p > 0,
        is_causal=is_causal,
        scale_needs_gradients=isinstance(scale, Tensor) and scale.requires_grad,
        has_one_dtype=query.dtype == key.dtype == value.dtype or has_autocast(query),
    )
    reason, is_plain, key_mask = form.reason, form.is_plain, None
    is_plain_pytorch = is_compiling or (
        forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None
    )
    if not is_plain_pytorch and is_transformed(query, key, value):
        reason, is_plain = TRANSFORMED, False
    elif attn_mask is not None and reason is None:
        key_mask, reason = read_mask(attn_mask, form, query.shape[0], key.shape[-2])
    if scale is not None:
        scale = float(scale.detach()) if isinstance(scale, Tensor) else scale
    return Call(
        query=query if query.dim() == 4 else view_4d(query),
        key=key if key.dim() == 4 else view_4d(key),
        value=value if value.dim() == 4 else view_4d(value),
        scale=form.scale if scale is None else scale,
        key_mask=key_mask,
        shape=query.shape,
        reason=reason,
        run=partial(SDPA, **arguments),
        arguments=arguments if is_plain else None,
    )


def read_form(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    mask: tuple[int, ...] | None = None,
    *,
    types: tuple[type, ...],
    devices: tuple[torch.device, ...],
    mask_dtype: torch.dtype | None,
    mask_strides: tuple[int, ...],
    has_dropout: bool,
    is_causal: bool,
    scale_needs_gradients: bool,
    has_one_dtype: bool,
) -> CallForm:
    """Read what the shapes, types and flags of a call say."""
    heads = query[-3] if len(query) > 2 else 1
    key_heads = key[-3] if len(key) > 2 else 1
    mask_kind = None if mask is None else kind_of_mask(mask, mask_strides, mask_dtype)
    is_empty = any(isinstance(size, int) and size == 0 for size in (*query, *key))
    is_plain = not is_empty and all(kind in PLAIN for kind in types)
    reason = first_reason(
        {
            "no images, or no tokens": is_empty,
            "tensors of another class": not is_plain,
            "causal": is_causal,
            "dropout of the attention": has_dropout,
            PAIRS: mask is not None and (mask_kind is None or len(query) != 4),
            f"{len(query)} dimensions": len(query) < 2,
            "queries and keys differ in batch size": query[:-3] != key[:-3],
            "queries and keys differ in number of heads": not is_empty and heads % key_heads > 0,
            "values and keys differ in width": value != key,
            "queries and keys differ in width": query[-1:] != key[-1:],
            "operands differ in type or device": not devices[0] == devices[1] == devices[2]
            or not has_one_dtype,
            "a scale that needs gradients": scale_needs_gradients,
        }
    )
    scale = 1.0 if is_empty or not query else float(query[-1] ** -0.5)
    return CallForm(scale, reason, is_plain, mask_kind or "none")


kept_form = functools.lru_cache(MOST_FORMS)(read_form)


def has_autocast(tensor: Tensor) -> bool:
    """Whether autocast casts the operands of attention where this tensor is."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def is_transformed(*operands: Tensor) -> bool:
    """Whether operands are of transforms for which neither groups nor their guard have rules."""
    if _functorch.peek_interpreter_stack() is not None:
        levels = _functorch.get_interpreter_stack()
        return any(level.key() != _functorch.TransformType.Grad for level in levels)
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(operand).tangent is not None for operand in operands)


def view_4d(tensor: Tensor) -> Tensor:
    """View (L, D) and (H, L, D) as one image, more dimensions before the heads as so many
    images.
    """
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


def kind_of_mask(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype | None
) -> str | None:
    """The kind of a mask of pairs, which broadcasts to (..., H, L, S), as :class:`CallForm` has it;
    None where it can be none of keys.
    """
    if len(shape) > 4:
        return None
    shape = (1,) * (4 - len(shape)) + tuple(shape)
    strides = (0,) * (4 - len(strides)) + tuple(strides)
    has_own_heads = shape[1] != 1 and strides[1] != 0
    has_own_rows = shape[2] != 1 and strides[2] != 0
    if has_own_heads:
        return None
    return "row" if dtype == torch.bool and not has_own_rows else "values"


def read_mask(
    mask: Tensor, form: CallForm, images: int, keys: int
) -> tuple[Tensor | None, str | None]:
    """Read a mask of pairs as one of keys.

    A mask that holds a row for every query counts as well if its rows are equal, as those that
    transformers makes of padding are. A graph holds whatever may be padding later: where that is
    recorded, no value is read.

    Returns:
        bool (B, S), True where a key is real; None where all are. And, where it is no mask of keys
        or leaves an image without any, why groups cannot answer the call.
    """
    mask = view_4d(mask)
    row = mask[:, 0, 0]
    is_kept = is_graph_kept() or type(mask) is FakeTensor
    has_rows = mask.shape[1] != 1 or mask.shape[2] != 1  # which may differ later
    if is_kept and (form.mask == "values" or has_rows):
        return None, UNREADABLE
    if form.mask == "values":
        if mask.shape[2] != 1 and not holds(mask[:, 0] == row[:, None]):
            return None, PAIRS
        if mask.dtype != torch.bool:
            row, values = row == 0, row
            if not holds(row | (values < HIDDEN)):
                return None, "a bias per key"
    key_mask = row.expand(images, keys)
    if is_kept or torch.compiler.is_compiling() or key_mask.is_meta:
        return key_mask, None
    if bool(key_mask.all()):
        return None, None
    if not bool(key_mask.any(-1).all()):
        return None, NO_KEYS
    return key_mask, None


def is_graph_kept() -> bool:
    """Whether a graph is recorded that inputs of other values run through, which no compiler guards."""
    if is_writing_file():
        return True
    return not torch.compiler.is_compiling() and get_proxy_mode() is not None


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
            PAIRS: named.get("attn_mask") is not None or named.get("is_causal", False),
            "called with need_weights": named.get("need_weights", True),
            "dropout of the attention": named.get("training", True) and dropout_p > 0,
            "extra keys, or separate projections": bias_k is not None
            or add_zero_attn
            or named.get("use_separate_proj_weight", False),
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
    """The mask (B, 1, 1, S) that ``key_padding_mask`` (B, S) or (S,) is: bool ones are True where a key
    is hidden, others are added to the scores.
    """
    if padding is None:
        return None
    mask = ~padding if padding.dtype == torch.bool else padding
    return mask.view(-1, 1, 1, mask.shape[-1])
