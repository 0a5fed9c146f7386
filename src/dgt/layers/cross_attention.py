"""Dynamic Group Attention across two sets of tokens: queries of one, keys and values of the other.

The paper has it within one image (section 3.1). Nothing in Eqs. 1 to 4 says that queries and keys are of
the same tokens: here those of one image, points of a matcher or learned queries form groups, and each
group selects its k keys among the tokens of another.
"""

from typing import Any

from timm.models import register_notrace_module
from torch import Tensor, nn

from dgt.layers.attention import GroupAttention
from dgt.layers.checks import check_layer_input
from dgt.ops import DynamicGroupAttentionOutput
from dgt.ops.checks import describe


@register_notrace_module
class DGCrossAttention(GroupAttention):
    """Dynamic Group Attention of tokens to those of a context: each query to the ``top_k`` keys of its group.

    The same as :class:`dgt.DGAttention` from queries, keys and values on. The centroids belong to the
    queries' side: queries seed them (of the first batch), and move them to their means (Eqs. 3 and 4).
    ``top_k``, ``residual_keys`` and ``backend`` may be set at any time.

    Args:
        dim: channels C of the tokens and of the context.
        num_heads: H; divides ``dim``.
        num_groups: G >= 1.
        top_k: k >= 1, clamped to the number of tokens of the context.
        residual_keys: M >= 0, at most the number of tokens of the context.
        qkv_bias: whether query, key and value have a bias.
        cosine: compare normalized queries and keys, with a learned scale per head.
        tau, tau_weighs, backend: as in :class:`dgt.DGAttention`.
        device, dtype: of the parameters; centroids stay float32.

    Attributes:
        q: the projection to queries.
        kv: the projection to keys, then values.
        proj: the projection out.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed.

    Example:
        >>> layer = DGCrossAttention(64, num_heads=2, num_groups=48, top_k=64)
        >>> layer(torch.randn(1, 1000, 64), torch.randn(1, 1200, 64)).shape
        torch.Size([1, 1000, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_groups: int = 48,
        top_k: int = 98,
        residual_keys: int = 0,
        *,
        qkv_bias: bool = True,
        cosine: bool = False,
        tau: float | None = None,
        tau_weighs: str = "old",
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            num_groups,
            top_k,
            qkv_bias=qkv_bias,
            cosine=cosine,
            tau=tau,
            tau_weighs=tau_weighs,
            backend=backend,
            residual_keys=residual_keys,
            device=device,
            dtype=dtype,
        )

    def init_projections(self, **options: Any) -> None:
        """Make the projections ``q`` and ``kv``."""
        self.q = nn.Linear(self.dim, self.dim, **options)
        self.kv = nn.Linear(self.dim, 2 * self.dim, **options)

    def split_heads(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, ..., C) tokens to queries (B, H, L, D), and those of the context to keys and values
        (B, H, S, D).
        """
        query = self.q(x).flatten(1, -2)
        key, value = self.kv(context).flatten(1, -2).chunk(2, dim=-1)
        return self.into_heads(query, key, value)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from tokens to those of a context.

        In evaluation an image with NaN in either, or infinities that make NaN, gets NaN, and the others
        their results; training refuses it.

        Args:
            x: (B, H, W, C) or (B, L, C) tokens, which queries are of.
            context: (B, S, C), or a map of any size, which keys and values are of.
            mask: bool (B, L), True where a token of ``x`` is real; the others get the output
                of zeros, are of no group, and are part of no mean of queries.
            context_mask: bool (B, S), True where a token of the context is real; nothing sees the
                others.

        Returns:
            The shape of ``x``. Where there is no token to attend to the attention is zero.

        Raises:
            TypeError, ValueError: with the argument's name, what was expected, and what was passed.
        """
        self._check(x, context, mask, context_mask)
        query, key, value = self.split_heads(x, context)
        real = None if mask is None else mask.flatten(1)
        seen = None if context_mask is None else context_mask.flatten(1)
        return self.merge_heads(self.attend(query, key, value, real, seen), x)

    def inspect(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> DynamicGroupAttentionOutput:
        """Return groups, keys and the output before projection, without changing any state; arguments as
        in :meth:`forward`.
        """
        real = None if mask is None else mask.flatten(1)
        seen = None if context_mask is None else context_mask.flatten(1)
        return self.inspect_heads(*self.split_heads(x, context), real, seen)

    def _check(
        self, x: Tensor, context: Tensor, mask: Tensor | None, context_mask: Tensor | None
    ) -> None:
        check_layer_input(x, self.dim, mask, may_be_empty=True)
        check_layer_input(
            context,
            self.dim,
            context_mask,
            name="context",
            mask_name="context_mask",
            may_be_empty=True,
        )
        if context.shape[0] != x.shape[0]:
            raise ValueError(
                f"context must have as many images as x, {x.shape[0]}, got {describe(context)}"
            )
