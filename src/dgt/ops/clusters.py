"""Clusters of the tokens of one image: Lloyd's k-means of every head, deterministic and without gradients.

Groups of queries and clusters of keys for :func:`dgt.clustered_attention` come from the image
itself: a few steps on a sample of its tokens, then one on all. This is as good as all steps on all
tokens, and better than centroids from other images.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgt.ops.checks import check_count, check_mask, check_no_nan, check_tensor
from dgt.ops.dispatch import Steps, choose_steps
from dgt.ops.lloyd import EVERY, STEPS, sample_distance


class Clusters(NamedTuple):
    """The result of :func:`cluster_tokens`."""

    centroids: Tensor
    """(B, H, M, D) float32: the means of the members; an empty cluster keeps its centroid."""
    ids: Tensor
    """(B, H, N) int64: the cluster of every token; -1 where a mask hides it."""


def cluster_tokens(
    tokens: Tensor,
    num_clusters: int,
    *,
    steps: int = STEPS,
    every: int = EVERY,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Clusters:
    """Cluster the tokens of every head of every image: Lloyd's k-means with Euclidean distances.

    The first centroids are tokens spread evenly. ``steps`` steps on one of ``every`` tokens
    follow, and one on all: every token joins the nearest centroid,
    ``ids = argmin_m |token - centroid_m|`` (of equal ones the first), and the centroids become the
    means of their members. Computed in float32 whatever the type; the same in every run.

    Args:
        tokens: (B, H, N, D) float tensor.
        num_clusters: M, from 1 to N.
        steps: steps on the sample.
        every: sample one of this many tokens; more if it would hold fewer than four per cluster.
        mask: optional bool (B, N), True where a token is real; others are of no cluster.
        backend: as in :func:`dgt.dynamic_group_attention`.

    Returns:
        :class:`Clusters`: ``centroids`` and ``ids``, without gradients.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed; on
            CPUs also for NaN in ``tokens``.

    Example:
        >>> tokens = torch.randn(1, 2, 196, 32)
        >>> centroids, ids = cluster_tokens(tokens, 16)
        >>> centroids.shape, ids.shape
        (torch.Size([1, 2, 16, 32]), torch.Size([1, 2, 196]))
    """
    check_tensor("tokens", tokens, "BHND", floating=True)
    if 0 in tokens.shape:
        raise ValueError(f"tokens must not be empty, got shape {tuple(tokens.shape)}")
    check_count("num_clusters", num_clusters)
    if num_clusters > tokens.shape[2]:
        raise ValueError(
            f"num_clusters must be at most the {tokens.shape[2]} tokens, got {num_clusters}"
        )
    check_count("steps", steps, least=0)
    check_count("every", every)
    check_mask("mask", mask, "tokens", tokens)
    chosen = choose_steps(backend, tokens)
    return find_clusters(chosen, "tokens", tokens, num_clusters, mask, steps=steps, every=every)


@torch.no_grad()
def find_clusters(
    backend: Steps,
    name: str,
    tokens: Tensor,
    num_clusters: int,
    mask: Tensor | None,
    steps: int = STEPS,
    every: int = EVERY,
) -> Clusters:
    """As :func:`cluster_tokens` on a backend's module, of arguments that are right; ``name`` is that of the tokens."""
    every = sample_distance(tokens.shape[2], num_clusters, every)
    centroids, ids = backend.cluster_tokens(tokens, num_clusters, steps, every, mask)
    check_no_nan(name, centroids)
    return Clusters(centroids, ids)


def cluster_keys(
    backend: Steps,
    key: Tensor,
    num_clusters: int,
    num_prefix_tokens: int,
    key_mask: Tensor | None,
) -> Tensor:
    """(B, H, S) int64 clusters of the keys; -1 for the prefix, and for what (B, S) ``key_mask`` hides."""
    mask = None if key_mask is None else key_mask[:, num_prefix_tokens:]
    ids = find_clusters(backend, "key", key[:, :, num_prefix_tokens:], num_clusters, mask).ids
    return F.pad(ids, (num_prefix_tokens, 0), value=-1) if num_prefix_tokens else ids
