"""Arguments of attention calls besides tensors: options by name, and settings as passed to backends.

Options of the public functions are typed dictionaries (PEP 692): a type checker knows each by name, and so does
:func:`check_options` at run time. The settings are checked and complete.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack  # which torch brings

__all__ = [
    "AttentionCall",
    "AttentionOptions",
    "ClusteredCall",
    "ClusteredOptions",
    "ResidualKeys",
    "Unpack",
    "check_options",
]


class ResidualKeys(NamedTuple):
    """Residual keys for the keys that a group does not select: M keys, one per cluster (:mod:`dgt.ops.remainder`).

    Example:
        >>> clusters = dgt.cluster_tokens(key, 16).ids
        >>> rest = dgt.ResidualKeys(16, clusters)
        >>> dgt.dynamic_group_attention(query, key, value, centroids, top_k=49, remainder=rest)
    """

    num_keys: int
    """M, residual keys per group; 0 for none."""
    cluster_ids: Tensor | None = None
    """(B, H, S) int64, the cluster of every key, 0 to M - 1; a key of cluster -1 is part of no residual key.

    None: :func:`dgt.cluster_tokens` finds them where M > 1.
    """


class AttentionOptions(TypedDict, total=False):
    """Options of :func:`dgt.dynamic_group_attention`, which says what they mean."""

    num_prefix_tokens: int
    remainder: bool | int | ResidualKeys


class ClusteredOptions(TypedDict, total=False):
    """Options of :func:`dgt.clustered_attention`, which says what they mean."""

    scale: float | None
    key_mask: Tensor | None
    share_key_clusters: bool


class AttentionCall(NamedTuple):
    """The settings of :func:`dgt.dynamic_group_attention`."""

    top_k: int
    scale: float
    key_mask: Tensor | None = None  # bool (B, S)
    num_prefix_tokens: int = 0
    residual: ResidualKeys = ResidualKeys(0)


class ClusteredCall(NamedTuple):
    """The settings of :func:`dgt.clustered_attention`."""

    num_groups: int
    top_k: int
    num_residual_keys: int
    num_prefix_tokens: int
    scale: float
    key_mask: Tensor | None  # bool (B, S)
    share_key_clusters: bool


def check_options(
    function: Callable[..., Any], options: Iterable[str], known: Iterable[str]
) -> None:
    """Check the names of a call's options.

    Args:
        function: what was called.
        options: the names that came.
        known: those that it takes besides its parameters.

    Raises:
        TypeError: for a name that it does not take; names all that it takes.
    """
    unknown = [name for name in options if name not in known]
    if not unknown:
        return
    parameters = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    raise TypeError(
        f"{function.__name__} takes no argument {unknown[0]!r}; it takes {', '.join([*named, *known])}"
    )
