"""DG-Attention as the paper's appendix builds it: form 1, a softmax, form 2; the gradients are forms 1 to 4 again.

The weights P (L x k) go through memory several times. This is the baseline that the fused kernels must beat, and a
readable account of the paper's own system.
"""

from torch import Tensor

from dgt.ops.group_matmul import product

HIDDEN = -1e4  # the score of an empty place: finite in float16, and far below any real one


def attend(
    query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor, scale: float, backend: str = "eager"
) -> Tensor:
    """Softmax attention of every query over the keys of its group (Eq. 2); shapes as in :func:`dgt.attend`.

    Args:
        query, key, value, group_ids, key_ids, scale: as in :func:`dgt.attend`, already checked.
        backend: of the products, ``"eager"`` or ``"triton"``.

    Returns:
        (B, H, L, D); zero at padding, and where a group has no keys.
    """
    tokens = key.shape[2]
    scores = product(1, query * scale, key, group_ids, key_ids, tokens, HIDDEN, backend)
    weights = scores.float().softmax(-1).to(value.dtype) if scores.dtype.itemsize < 4 else scores.softmax(-1)
    return product(2, weights, value, group_ids, key_ids, tokens, 0.0, backend)
