"""The four group-wise matrix products of the paper's appendix, in plain PyTorch and Triton.

Form 1 serves Eqs. 11 and 16 of the appendix, form 2 Eqs. 13 and 14, form 3 Eq. 15 and form 4 Eq.
17. The gradient of each is made of the others, so they may be differentiated any number of times.
The paper builds the attention of them, form 1, a softmax, form 2, and keeps P (L x k) in memory:
``tests/ops/test_group_matmul.py`` does it again.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dgt.ops import flops
from dgt.ops.checks import (
    check_count,
    check_device,
    check_ids,
    check_key_ids,
    check_shape,
    check_tensor,
    full_precision,
    has_tangent,
    is_transformed,
)
from dgt.ops.dispatch import check_backend, resolve_backend
from dgt.ops.registry import differentiate, load_triton, operator

CHUNK_ELEMENTS = 1 << 20  # of the largest temporary tensor of the plain version
# The arguments of each form; D channels, K places, L queries.
LETTERS = {1: ("BHLD", "BHMD"), 2: ("BHLK", "BHMD"), 3: ("BHLD", "BHLK"), 4: ("BHLK", "BHLD")}


def group_matmul(
    form: Literal[1, 2, 3, 4],
    left: Tensor,
    right: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    tokens: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiply matrices group by group: each query with the keys of its group only.

    Query i works with keys ``ids_i = key_ids[b, h, group_ids[b, h, i]]``.

    ====  ==================  ==================  ==================================================
    form  left                right               result
    ====  ==================  ==================  ==================================================
    1     queries (B,H,L,D)   keys (B,H,M,D)      (B,H,L,K): ``left[i] . right[ids_i[p]]``
    2     weights (B,H,L,K)   values (B,H,M,D)    (B,H,L,D): sum over p of
                                                  ``left[i,p] right[ids_i[p]]``
    3     queries (B,H,L,D)   weights (B,H,L,K)   (B,H,D,M): form 4 of (right, left), transposed
    4     weights (B,H,L,K)   rows (B,H,L,D)      (B,H,M,D): in row j the sum of
                                                  ``left[i,p] right[i]`` over all i, p with
                                                  ``ids_i[p] = j``
    ====  ==================  ==================  ==================================================

    Args:
        form: 1 to 4, as numbered in the paper's appendix.
        left, right: float tensors of one type, as in the table. Differentiable.
        group_ids: (B, H, L) int64; a query of group -1 yields zero and adds nothing.
        key_ids: (B, H, G, K) int64, no key twice in one list; -1 marks an empty place, which yields
            zero and adds nothing.
        tokens: M, the number of keys; for forms 3 and 4 only, whose arguments do not tell it.
        backend: ``"auto"``, ``"torch"`` (PyTorch's own operators) or ``"triton"``; one that is
            named is never exchanged for another.

    Returns:
        As in the table, of the type of ``left``.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> query, key = torch.randn(2, 1, 2, 196, 32)
        >>> group_ids = torch.randint(48, (1, 2, 196))
        >>> key_ids = torch.rand(1, 2, 48, 196).topk(98).indices
        >>> group_matmul(1, query, key, group_ids, key_ids).shape
        torch.Size([1, 2, 196, 98])
    """
    _check(form, left, right, group_ids, key_ids, tokens)
    if has_tangent(left, right) or is_transformed():
        raise ValueError(
            "left and right must be plain tensors: there is no forward-mode differentiation and no "
            "torch.func of group_matmul, but torch.autograd.grad as often as one likes"
        )
    count = tokens or right.shape[2]
    check_ids("group_ids", group_ids, key_ids.shape[2])
    check_key_ids(key_ids, count)
    backend = check_backend(backend)
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be one of auto, torch, triton, got {backend!r}")
    if backend == "auto":
        backend = "torch"
    backend = resolve_backend(backend, right if form in (2, 4) else left)  # what holds channels
    product: Tensor = _product(form, left, right, group_ids, key_ids, count, backend=backend)
    return product


def _check(
    form: int, left: Tensor, right: Tensor, group_ids: Tensor, key_ids: Tensor, tokens: int | None
) -> None:
    """Check all but the values of ids."""
    if not isinstance(form, int) or form not in LETTERS:
        raise ValueError(f"form must be 1, 2, 3 or 4, got {form!r}")
    for name, tensor, letters in (
        ("left", left, LETTERS[form][0]),
        ("right", right, LETTERS[form][1]),
    ):
        check_tensor(name, tensor, letters, floating=True)
    if left.dtype != right.dtype:
        raise TypeError(f"right must have left's type {left.dtype}, got {right.dtype}")
    check_tensor("group_ids", group_ids, "BHL", floating=False)
    check_tensor("key_ids", key_ids, "BHGK", floating=False)
    check_device("left", left, right=right, group_ids=group_ids, key_ids=key_ids)
    check_shape("group_ids", group_ids, "BHL", tuple(left.shape[:3]), "left")
    check_shape("key_ids", key_ids, "BHGK", (*left.shape[:2], *key_ids.shape[2:]), "left")
    if form >= 3:
        check_count("tokens", tokens)  # type: ignore[arg-type]  # None is what it refuses
    elif tokens is not None:
        raise ValueError(
            f"tokens must be None for form {form}, where right determines it, got {tokens}"
        )
    places = key_ids.shape[3]
    expected = {
        1: (*left.shape[:2], right.shape[2], left.shape[3]),
        2: (*left.shape[:2], *right.shape[2:]),
        3: (*left.shape[:3], places),
        4: (*left.shape[:3], right.shape[3]),
    }
    check_shape("right", right, LETTERS[form][1], expected[form], "left")
    if form in (2, 4):
        check_shape("left", left, "BHLK", (*left.shape[:3], places), "key_ids")
    if 0 in left.shape or 0 in right.shape or 0 in key_ids.shape:
        came = f"{tuple(left.shape)}, {tuple(right.shape)} and {tuple(key_ids.shape)}"
        raise ValueError(f"left, right and key_ids must not be empty, got {came}")


def _fake(call: SimpleNamespace) -> Tensor:
    left, last = call.left, call.right.shape[3]
    shapes = {
        1: (*left.shape[:3], call.key_ids.shape[3]),
        2: (*left.shape[:3], last),
        3: (*left.shape[:2], left.shape[3], call.tokens),
        4: (*left.shape[:2], call.tokens, last),
    }
    return cast(Tensor, left.new_empty(shapes[call.form]))


@operator(name="group_matmul", fake=_fake, flops=flops.group_matmul)
def _product(
    form: int,
    left: Tensor,
    right: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    tokens: int,
    backend: str,
) -> Tensor:
    if backend == "triton":
        result: Tensor = load_triton().group_matmul(
            form, left, right, group_ids, key_ids, tokens, fill=0.0
        )
        return result
    with full_precision(left.device):  # the types are the caller's
        if form == 3:
            return (
                _multiply(4, right, left, group_ids, key_ids, tokens).transpose(2, 3).contiguous()
            )
        return _multiply(form, left, right, group_ids, key_ids, tokens)


def _save(ctx: Any, call: SimpleNamespace, _: Tensor) -> None:
    ctx.form, ctx.tokens, ctx.backend = call.form, call.tokens, call.backend
    ctx.save_for_backward(call.left, call.right, call.group_ids, call.key_ids)


def _backward(ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
    """Gradients of a product are products (Eqs. 14-17 of the appendix)."""
    left, right, group_ids, key_ids = ctx.saved_tensors

    def multiply(form: int, a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = _product(form, a, b, group_ids, key_ids, ctx.tokens, backend=ctx.backend)
        return result

    if ctx.form == 1:
        grads = multiply(2, grad, right), multiply(3, left, grad).transpose(2, 3)
    elif ctx.form == 2:
        grads = multiply(1, grad, right), multiply(4, left, grad)
    elif ctx.form == 3:
        columns = grad.transpose(2, 3)
        grads = multiply(2, right, columns), multiply(1, left, columns)
    else:
        grads = multiply(1, right, grad), multiply(2, left, grad)
    return dict(zip(("left", "right"), grads, strict=True))


differentiate(_product, _backward, _save)


def _multiply(
    form: int, left: Tensor, right: Tensor, group_ids: Tensor, key_ids: Tensor, tokens: int
) -> Tensor:
    """Forms 1, 2 and 4; the last is summed in float32 at least."""
    channels, last = right.shape[3], key_ids.shape[3] if form == 1 else right.shape[3]
    wide = torch.promote_types(right.dtype, torch.float32)
    a, b = left.flatten(0, 2), right.flatten(0, 2)
    rows = left.shape[:2].numel() * tokens if form == 4 else len(a)
    result = torch.zeros(rows, last, dtype=wide if form == 4 else right.dtype, device=right.device)
    for run, keys, exist in _runs(group_ids, key_ids, tokens, channels):
        if form == 1:
            result[run] = torch.einsum("id,ipd->ip", a[run], b[keys]).masked_fill(~exist, 0.0)
            continue
        weight = a[run].masked_fill(~exist, 0.0)
        if form == 2:
            result[run] = torch.einsum("ip,ipd->id", weight, b[keys])
        else:
            parts = weight.to(wide)[..., None] * b[run].to(wide)[:, None]
            result.index_add_(0, keys.flatten(), parts.flatten(0, 1))
    return result.view(*left.shape[:2], -1, last).to(right.dtype)


def _runs(
    group_ids: Tensor, key_ids: Tensor, tokens: int, channels: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Cut all queries into runs whose (R, K, D) gathered keys stay small.

    Yields the run, rows of the keys of its groups, (R, K), and which of them exist; rows count
    through batch and heads.
    """
    groups, places = key_ids.shape[2:]
    heads = torch.arange(group_ids.shape[0] * group_ids.shape[1], device=group_ids.device)[:, None]
    rows = (group_ids.flatten(0, 1).clamp(min=0) + heads * groups).flatten()
    ids = key_ids.flatten(0, 2)
    first = (heads * tokens).expand(-1, group_ids.shape[2]).flatten()
    size = max(1, CHUNK_ELEMENTS // (places * channels))
    for start in range(0, len(rows), size):
        run = slice(start, start + size)
        chosen = ids[rows[run]]
        exist = (chosen >= 0) & (group_ids.flatten()[run] >= 0)[:, None]
        yield run, chosen.clamp(min=0) + first[run, None], exist
