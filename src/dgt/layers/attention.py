"""Attention layers with projections: DG-Attention (section 3.1) and global attention.

Both take (B, H, W, C) or (B, L, C) and return the same shape. With ``cosine=True`` (DGT-S and -B)
queries and keys are compared normalized, times a learned scale per head, as in Swin v2; keys are
then ranked normalized as well. :class:`GroupAttention` is DG-Attention from queries, keys and values
on, wherever these come from.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.centroid_steps import enlist
from dgt.layers.centroids import CentroidState
from dgt.layers.checks import check_layer_input
from dgt.layers.plain import can_be_skipped
from dgt.layers.reset import reset_parts
from dgt.ops import DynamicGroupAttentionOutput, dense_attention, dynamic_group_attention
from dgt.ops.attention import attend_in_groups
from dgt.ops.checks import check_count, check_residual_keys
from dgt.ops.dispatch import check_backend
from dgt.ops.gradients import split_projection
from dgt.utils.errors import NonFiniteInput

LOGIT_SCALE = math.log(10.0)  # at the start, as in Swin v2


class MultiHeadAttention(nn.Module):
    """Base of all kinds of attention: the projections in and out, and cosine similarity.

    Args:
        dim: channels C.
        num_heads: H; divides ``dim``.
        qkv_bias: whether query, key and value have a bias.
        cosine: compare normalized queries and keys, with a learned scale per head.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: for a count below 1, or ``dim`` not divisible by ``num_heads``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        cosine: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_count("dim", dim)
        check_count("num_heads", num_heads)
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads, got {dim} and {num_heads}")
        factory = {"device": device, "dtype": dtype}
        self.dim = dim
        self.num_heads = num_heads
        self.cosine = cosine
        self.init_projections(bias=qkv_bias, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        if cosine:
            self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), LOGIT_SCALE, **factory))
        self.scale = 1.0 if cosine else (dim // num_heads) ** -0.5

    def init_projections(self, **options: Any) -> None:
        """Make what projects to query, key and value, before the projection out; called once, from the
        constructor, with the options of ``nn.Linear``.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set all parameters and buffers anew, whatever they hold."""
        reset_parts(self)
        if self.cosine:
            nn.init.constant_(self.logit_scale, LOGIT_SCALE)

    def into_heads(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Divide (B, L, C) projections among heads, (B, H, L, D), ready for their dot products."""
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key = key.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        value = value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.cosine:
            query, key = self.comparable(query, key)
        return query, key, value

    def comparable(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare (B, H, L, D) queries and keys for their dot products.

        With ``cosine`` they are normalized, and queries are scaled.
        """
        if self.cosine:
            scale = self.logit_scale.exp().clamp(max=100.0)
            # A norm that is no zero in this type.
            least = 1e-4 if key.dtype == torch.float16 else 1e-12
            query = (F.normalize(query, dim=-1, eps=least) * scale).to(key.dtype)
            key = F.normalize(key, dim=-1, eps=least).to(key.dtype)
        return query, key

    def merge_heads(self, attended: Tensor, x: Tensor) -> Tensor:
        """Project (B, H, L, D) back to the shape of ``x``."""
        return self.proj(attended.transpose(1, 2).flatten(2).view(x.shape))


class SelfAttention(MultiHeadAttention):
    """Base of attention within one sequence: one projection makes query, key and value.

    Args:
        dim, num_heads, qkv_bias, cosine, device, dtype: as in :class:`MultiHeadAttention`.
    """

    def init_projections(self, **options: Any) -> None:
        """Make the projection ``qkv``."""
        self.qkv = nn.Linear(self.dim, 3 * self.dim, **options)

    def split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, ..., C) tokens to query, key and value, each (B, H, L, D)."""
        query, key, value = split_projection(self.qkv(x).flatten(1, -2))  # (B, L, C)
        return self.into_heads(query, key, value)


@register_notrace_module
class GlobalAttention(SelfAttention):
    """Attention of every token to every token.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`.

    Raises:
        TypeError, ValueError: as :class:`SelfAttention`.

    Example:
        >>> layer = GlobalAttention(64, num_heads=2)
        >>> layer(torch.randn(2, 7, 7, 64)).shape
        torch.Size([2, 7, 7, 64])
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) or (B, L, C) to the same shape.

        ``mask`` is True where a token is real.
        """
        check_layer_input(x, self.dim, mask)
        query, key, value = self.split_heads(x)
        # Padding sees everything, so that no row of the softmax is empty; nothing real sees
        # padding.
        sees = (
            None
            if mask is None
            else mask.flatten(1)[:, None, None, :] | ~mask.flatten(1)[:, None, :, None]
        )
        if not x.shape[0]:
            nothing = query.sum() + key.sum()  # with gradients, which DDP waits for
            return self.merge_heads(value + nothing, x)
        attended = dense_attention(query, key, value, sees, scale=self.scale)
        return self.merge_heads(attended, x)


def attend_image_by_image(
    attend: Callable[..., DynamicGroupAttentionOutput],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """(B, H, L, D): the output of a batch some of whose images hold NaN, which is all that these get."""
    outputs = []
    for image in range(query.shape[0]):
        one = slice(image, image + 1)
        masks = {
            "query_mask": None if query_mask is None else query_mask[one],
            "key_mask": None if key_mask is None else key_mask[one],
        }
        try:
            outputs.append(attend(query[one], key[one], value[one], **masks).output)
        except NonFiniteInput:
            outputs.append(torch.full_like(query[one], torch.nan))
    return torch.cat(outputs)


class GroupAttention(MultiHeadAttention, CentroidState):
    """Base of DG-Attention within one sequence and across two: all from queries, keys and values on.

    The centroids belong to the queries' side: they are seeded by queries, and move to their means.

    Args:
        dim, num_heads, qkv_bias, cosine, device, dtype: as in :class:`MultiHeadAttention`; centroids
            stay float32.
        num_groups, top_k, tau, tau_weighs, backend, residual_keys: as in :class:`DGAttention`.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.
    """

    num_prefix_tokens = 0

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_groups: int = 48,
        top_k: int = 98,
        qkv_bias: bool = True,
        cosine: bool = False,
        tau: float | None = None,
        tau_weighs: str = "old",
        backend: str = "auto",
        residual_keys: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, cosine, device, dtype)
        check_count("num_groups", num_groups)
        check_count("top_k", top_k)
        check_count("residual_keys", residual_keys, least=0)
        self.top_k, self.backend = top_k, check_backend(backend)
        self.residual_keys = residual_keys
        self.init_centroids((num_heads, num_groups, dim // num_heads), tau, tau_weighs, device)
        enlist(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        enlist(self)  # a copy (deepcopy, pickle) is a separate layer

    def reset_parameters(self) -> None:
        """Set all parameters and buffers anew, whatever they hold."""
        super().reset_parameters()
        self.reset_centroids()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Attention of (B, H, L, D) queries to (B, H, S, D) keys and values: (B, H, L, D).

        Masks are bool, (B, L) and (B, S), True where a token is real. In training the queries are
        observed; then NaN is refused. Without a token on either side the attention is zero.
        """
        prefix = self.num_prefix_tokens
        learns = self.training and self.learns()
        if learns and (torch.compiler.is_compiling() or not self.seeded):
            self.seed(query[:, :, prefix:], query_mask)
        if 0 in (query.shape[0], query.shape[2], key.shape[2]):
            nothing = 0.0 * (key.sum() + value.sum())  # with gradients, which DDP waits for
            return query * 0.0 + nothing
        if 1 < self.residual_keys > key.shape[2] - prefix:
            check_residual_keys(self.residual_keys, key.shape[2] - prefix)
        attend = functools.partial(
            attend_in_groups,
            centroids=self.unit_centroids(),
            top_k=self.top_k,
            scale=self.scale,
            backend=self.backend,
            num_prefix_tokens=prefix,
            residual_keys=self.residual_keys,
            return_ids=learns,
        )
        try:
            attention = attend(query, key, value, query_mask=query_mask, key_mask=key_mask)
        except NonFiniteInput:
            if self.training:  # centroids would take it in
                raise
            return attend_image_by_image(attend, query, key, value, query_mask, key_mask)
        if learns:
            self.observe(query[:, :, prefix:], attention.group_ids[:, :, prefix:])
        return attention.output

    def inspect_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
    ) -> DynamicGroupAttentionOutput:
        """What :meth:`attend` would do, with groups and keys, without changing any state."""
        return dynamic_group_attention(
            query,
            key,
            value,
            self.unit_centroids(),
            self.top_k,
            self.scale,
            key_mask,
            self.backend,
            query_mask=query_mask,
            num_prefix_tokens=self.num_prefix_tokens,
            residual_keys=self.residual_keys,
        )

    def extra_repr(self) -> str:
        heads, groups, channels = self.centroids.shape
        residual = f"residual_keys={self.residual_keys}, " if self.residual_keys else ""
        return (
            f"heads={heads}, groups={groups}, channels={channels}, top_k={self.top_k}, {residual}"
            f"backend={self.backend}"
        )


@register_notrace_module
@can_be_skipped
class DGAttention(GroupAttention, SelfAttention):
    """Dynamic Group Attention: every query attends to the ``top_k`` keys of its group.

    With ``residual_keys=M`` a group attends to M keys more, which sum up the keys that it did not
    select, U, in M clusters; with the mean m of the group's queries and the scale s,

        p = softmax_U(s m.k),  k' = sum_U p k,  v' = sum_U p v,  b = log sum_U exp(s m.k) - s m.k',

    and s q.k' + b is the score of such a key. M = 0 is the paper (Eqs. 1 and 2).

    No weight depends on ``top_k``, ``residual_keys`` and ``backend``: they may be set at any time,
    but a model that was trained with residual keys gives other results without them. The centroids
    need no call from a training loop; :mod:`dgt.layers.centroids` says how they are updated.

    Args:
        dim, num_heads, qkv_bias, cosine: as in :class:`SelfAttention`.
        num_groups: G >= 1.
        top_k: k >= 1, clamped to the number of tokens.
        tau: the paper's tau; None is 0.1 times the current learning rate of the layer's weights.
        tau_weighs: the term of Eq. 4 that tau is the weight of: ``"old"`` centroid (as printed) or
            ``"new"`` mean.
        backend: as in :func:`dgt.dynamic_group_attention`.
        residual_keys: M >= 0, at most the number of tokens.
        device, dtype: of the parameters; centroids stay float32.

    Attributes:
        num_prefix_tokens: class and register tokens before all others; they belong to no group. 0
            but in models after :func:`dgt.replace_attention`, which take no mask.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> layer = DGAttention(64, num_heads=2, num_groups=48, top_k=98)
        >>> layer(torch.randn(2, 28, 28, 64)).shape
        torch.Size([2, 28, 28, 64])
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) or (B, L, C) to the same shape.

        ``mask`` is bool, True where a token is real. In evaluation an image with NaN, or infinities
        that make NaN, gets NaN, and the others their results; training refuses it.
        """
        check_layer_input(x, self.dim, mask)
        query, key, value = self.split_heads(x)
        real = None if mask is None else mask.flatten(1)
        return self.merge_heads(self.attend(query, key, value, real, real), x)

    def inspect(self, x: Tensor, mask: Tensor | None = None) -> DynamicGroupAttentionOutput:
        """Return groups, keys and the output before projection, without changing any state.

        Prefix tokens are of group -1, and the first keys of every group.
        """
        real = None if mask is None else mask.flatten(1)
        return self.inspect_heads(*self.split_heads(x), real, real)
