"""Attention in groups as ONNX nodes of the domain `dgt`, for runtimes with an extension.

`DGAttention` is Dynamic Group Attention, with residual keys or without: in a recorded graph it is
three operators, group, select and attend, and a fourth that clusters keys for several residual keys
a group, which are joined here. `DGClusteredAttention` is :func:`dgt.clustered_attention`. Each
takes its tokens in one of two forms:

    (query, key, value) -> output    (B, H, L, D) and twice (B, H, S, D) -> (B, H, L, D)
    (qkv) -> output                  (B, L, 3 H D) -> (B, L, H D)

The second takes the projections of a layer as they are, so nothing is transposed before or after.
The centroids (H, G, D) of `DGAttention` are its last input. `openvino_extension.cpp` has the nodes
for OpenVINO.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import onnx
import torch
from onnxscript import FLOAT
from onnxscript.values import Op, Opset
from torch import Tensor
from torch.export import ExportedProgram

from dgt.inference.onnx_operators import named_argument
from dgt.ops import clustered_attention, dynamic_group_attention, lloyd
from dgt.utils.errors import UserError

DOMAIN = Opset("dgt", 1)
HEADS_FIRST = [2, 0, 3, 1, 4]  # (B, L, 3, H, D) -> (3, B, H, L, D)
RESHAPES = (
    torch.ops.aten.unflatten.int,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
)
SPLITS = (torch.ops.aten.split.Tensor, torch.ops.aten.chunk.default)
VIEWS_OF_ALL = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

_ATTENTION = {"top_k": "INT", "residual_keys": "INT", "scale": "FLOAT"}
_SETTINGS = (
    "num_heads",
    "num_groups",
    "top_k",
    "residual_keys",
    "num_prefix_tokens",
    "first_order",
)
_CLUSTERED_ATTENTION = {"scale": "FLOAT", **dict.fromkeys(_SETTINGS, "INT")}


def _node(name: str, attributes: dict[str, str]) -> Op:
    """A node with any number of inputs, by name and attribute types."""
    schema = onnx.defs.OpSchema
    variadic = schema.FormalParameterOption.Variadic
    described = schema(
        name=name,
        domain=DOMAIN.domain,
        since_version=DOMAIN.version,
        inputs=[schema.FormalParameter("inputs", "T", param_option=variadic)],
        outputs=[schema.FormalParameter("output", "T")],
        type_constraints=[("T", ["tensor(float)"], "float32")],
        attributes=[
            schema.Attribute(attribute, getattr(schema.AttrType, kind))
            for attribute, kind in attributes.items()
        ],
    )
    return Op(DOMAIN, name, described)


_attention_node = _node("DGAttention", _ATTENTION)
_clustered_attention_node = _node("DGClusteredAttention", _CLUSTERED_ATTENTION)


@torch.library.custom_op("dgt::joined_attention", mutates_args=())
def _joined_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centroids: Tensor,
    top_k: int,
    residual_keys: int,
    scale: float,
) -> Tensor:
    output = dynamic_group_attention(
        query, key, value, centroids, top_k, scale, residual_keys=residual_keys
    ).output
    return output.contiguous()


@_joined_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("dgt::joined_attention_of_projection", mutates_args=())
def _joined_attention_of_projection(
    qkv: Tensor, centroids: Tensor, top_k: int, residual_keys: int, scale: float
) -> Tensor:
    query, key, value = _split_heads(qkv, centroids.shape[0])
    output = dynamic_group_attention(
        query, key, value, centroids, top_k, scale, residual_keys=residual_keys
    ).output
    return output.transpose(1, 2).flatten(2).contiguous()


@_joined_attention_of_projection.register_fake
def _(qkv: Tensor, centroids: Tensor, *_: Any) -> Tensor:
    heads, channels = centroids.shape[0], centroids.shape[2]
    return qkv.new_empty((*qkv.shape[:2], heads * channels))


@torch.library.custom_op("dgt::joined_clustered_attention", mutates_args=())
def _joined_clustered_attention(tokens: list[Tensor], settings: list[int], scale: float) -> Tensor:
    """`tokens` are the inputs of the node, `settings` its attributes in order of `_SETTINGS`."""
    num_heads, num_groups, top_k, residual_keys, num_prefix_tokens, first_order = settings
    is_projection = len(tokens) == 1
    query, key, value = _split_heads(tokens[0], num_heads) if is_projection else tokens
    output = clustered_attention(
        query,
        key,
        value,
        num_groups=num_groups,
        top_k=top_k,
        residual_keys=residual_keys,
        num_prefix_tokens=num_prefix_tokens,
        scale=scale,
        first_order=bool(first_order),
    )
    if is_projection:
        output = output.transpose(1, 2).flatten(2)
    return output.contiguous()


@_joined_clustered_attention.register_fake
def _(tokens: list[Tensor], *_: Any) -> Tensor:
    first = tokens[0]
    if len(tokens) == 1:
        return first.new_empty((*first.shape[:2], first.shape[2] // 3))
    return first.new_empty(first.shape)


def _split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, each (B, H, L, D), of (B, L, 3 H D) projections."""
    parts = qkv.unflatten(-1, [3, heads, qkv.shape[-1] // (3 * heads)])
    query, key, value = parts.permute(HEADS_FIRST).unbind()
    return query, key, value


def joined_attention(
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    centroids: FLOAT[...],
    top_k: int,
    residual_keys: int,
    scale: float,
) -> FLOAT[...]:
    """DG-Attention of (B, H, L, D) queries, keys and values."""
    numbers = {"top_k": top_k, "residual_keys": residual_keys, "scale": scale}
    return _attention_node(query, key, value, centroids, **numbers)


def joined_attention_of_projection(
    qkv: FLOAT[...], centroids: FLOAT[...], top_k: int, residual_keys: int, scale: float
) -> FLOAT[...]:
    """DG-Attention of (B, L, 3 H D) projections."""
    numbers = {"top_k": top_k, "residual_keys": residual_keys, "scale": scale}
    return _attention_node(qkv, centroids, **numbers)


def joined_clustered_attention(
    tokens: Sequence[FLOAT[...]], settings: Sequence[int], scale: float
) -> FLOAT[...]:
    """Clustered attention of tokens in either form."""
    attributes = dict(zip(_SETTINGS, settings, strict=True))
    return _clustered_attention_node(*tokens, scale=scale, **attributes)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.dgt.joined_attention.default: joined_attention,
    torch.ops.dgt.joined_attention_of_projection.default: joined_attention_of_projection,
    torch.ops.dgt.joined_clustered_attention.default: joined_clustered_attention,
}


class _Attention(NamedTuple):
    """A DG-Attention in a graph: the nodes and the numbers that its steps are called with."""

    query: Any
    key: Any
    value: Any
    centroids: Any
    top_k: int
    residual_keys: int
    scale: float


def join_steps(program: ExportedProgram) -> int:
    """Make one operator of every attention in groups of a graph, in place.

    Steps that are of no DG-Attention as a layer of this package does it, such as those with a mask
    of padding, stay as they are.

    Returns:
        How many there were.

    Raises:
        UserError: for clustered attention with a mask of padding.
    """
    count = 0
    for node in list(program.graph.nodes):
        if node.target == torch.ops.dgt.attend_in_clusters.default:
            count += 1
            _join_clustered(node)
        attention = _find_attention(node)
        if attention is not None:
            count += 1
            _join(node, attention)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return count


def _join(node: Any, attention: _Attention) -> None:
    """Make a node, the output of a DG-Attention, or the one that merges its heads, all of it."""
    projection = _find_projection(attention.query, attention.key, attention.value)
    merged = _find_merged_heads(node)
    if projection is None or merged is None:
        node.target = torch.ops.dgt.joined_attention.default
        node.args = tuple(attention)
        node.kwargs = {}
    else:
        merged.target = torch.ops.dgt.joined_attention_of_projection.default
        merged.args = (projection, *attention[3:])
        merged.kwargs = {}


def _join_clustered(node: Any) -> None:
    """Make a clustered attention take the projections directly, if they are its inputs."""
    tokens = list(node.args[:3])
    if any(named_argument(node, name) is not None for name in ("query_mask", "key_mask")):
        raise UserError(
            "clustered attention with a padding mask cannot be exported as one operator"
        )
    heads = tokens[0].meta["val"].shape[1]
    settings = [heads, *(int(named_argument(node, name)) for name in _SETTINGS[1:])]
    scale = named_argument(node, "scale")
    projection = _find_projection(*map(_origin, tokens))
    merged = _find_merged_heads(node)
    if projection is not None and merged is not None:
        tokens = [projection]
        node = merged
    node.target = torch.ops.dgt.joined_clustered_attention.default
    node.args = (tokens, settings, scale)
    node.kwargs = {}


def _find_attention(node: Any) -> _Attention | None:
    """The DG-Attention whose output a node is; None where it is of none."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    last = node.args[0]
    if last.target != torch.ops.dgt.attend.default or named_argument(last, "key_bias") is not None:
        return None
    residual_keys = named_argument(last, "residual_keys")
    if residual_keys and not _has_clusters_of_keys(last, residual_keys):
        return None
    query, key, value, groups, keys, scale = last.args[:6]
    if groups.target != torch.ops.dgt.group_queries.default or _optional(groups, 2) is not None:
        return None
    if keys.target != torch.ops.dgt.select_keys.default or _optional(keys, 3) is not None:
        return None
    parts = (query, key, value, groups.args[1])
    query, key, value, centroids = (_origin(part) for part in parts)
    same = (
        _origin(groups.args[0]) is query
        and _origin(keys.args[0]) is centroids
        and _origin(keys.args[1]) is key
    )
    if not same:
        return None
    return _Attention(query, key, value, centroids, keys.args[2], residual_keys, scale)


def _has_clusters_of_keys(node: Any, residual_keys: int) -> bool:
    """Whether attention to residual keys has the clusters of keys that it finds without being given any."""
    key, clusters = node.args[1], named_argument(node, "key_cluster_ids")
    if clusters is None:
        return residual_keys == 1
    if clusters.target is not operator.getitem or clusters.args[1] != 1:
        return False
    found = clusters.args[0]
    if found.target != torch.ops.dgt.cluster_tokens.default:
        return False
    tokens, count, steps, every, mask = found.args
    usual = lloyd.sample_distance(key.meta["val"].shape[2], residual_keys, lloyd.EVERY)
    is_usual = (count, steps, every, mask) == (residual_keys, lloyd.STEPS, usual, None)
    return is_usual and _origin(tokens) is _origin(key)


def _find_projection(*parts: Any) -> Any:
    """The (B, L, 3 H D) projections that query, key and value are views of; None where not."""
    split = _find_split(*map(_undo_heads, parts))
    if split is None:
        split = _find_split(*parts)  # cut into heads before, as in timm
    if split is None:
        return None
    projection = split.args[0]
    _, heads, _, channels = parts[0].meta["val"].shape
    if split.target == torch.ops.aten.unbind.int:
        if _optional(split, 1) not in (None, 0):
            return None
        turned = projection
        if turned.target != torch.ops.aten.permute.default or list(turned.args[1]) != HEADS_FIRST:
            return None
        cut = turned.args[0]
        if cut.target not in RESHAPES or not _ends_with(cut, 5, 3, heads, channels):
            return None
        projection = cut.args[0]
    return projection if _ends_with(projection, 3, 3 * heads * channels) else None


def _find_split(*parts: Any) -> Any:
    """The node that makes three parts, in their order; None where there is none."""
    split: Any = parts[0].args[0] if parts[0].args else None
    for place, part in enumerate(parts):
        if part.op != "call_function" or part.args != (split, place):
            return None
    is_split = split.target in (*SPLITS, torch.ops.aten.unbind.int)
    return split if is_split else None


def _undo_heads(part: Any) -> Any:
    """The (B, L, H D) that (B, H, L, D) is a view of; the node itself where it is of none."""
    _, heads, _, channels = part.meta["val"].shape
    if part.target != torch.ops.aten.transpose.int or part.args[1:] != (1, 2):
        return part
    cut = part.args[0]
    if cut.target not in RESHAPES or not _ends_with(cut.args[0], 3, heads * channels):
        return part
    return cut.args[0]


def _find_merged_heads(node: Any) -> Any:
    """The node that makes (B, L, H D) of an attention's (B, H, L, D); None where there is none, or
    something else is made of it, too.
    """
    _, heads, _, channels = node.meta["val"].shape
    turned = _only_user(node)
    if turned is None or turned.target != torch.ops.aten.transpose.int:
        return None
    merged = _only_user(turned)
    if turned.args[1:] != (1, 2) or merged is None or merged.target not in RESHAPES:
        return None
    return merged if _ends_with(merged, 3, heads * channels) else None


def _only_user(node: Any) -> Any:
    """The node that takes a node's result, views of all of it aside, if there is one alone."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if not _is_view_of_all(node):
            return node
    return None


def _ends_with(node: Any, rank: int, *sizes: int) -> bool:
    """Whether a node's result has this many dimensions, the last of these sizes."""
    shape = node.meta["val"].shape
    return len(shape) == rank and tuple(shape[-len(sizes) :]) == sizes


def _origin(node: Any) -> Any:
    """What a node is without the views of all of it that lie before it."""
    while _is_view_of_all(node):
        node = node.args[0]
    return node


def _is_view_of_all(node: Any) -> bool:
    if node.target in RESHAPES:
        before, after = (str(part.meta["val"].shape) for part in (node.args[0], node))
        return before == after  # as text: comparing free sizes might fix them
    return node.target in VIEWS_OF_ALL or _is_whole_slice(node)


def _is_whole_slice(node: Any) -> bool:
    if node.target != torch.ops.aten.slice.Tensor or _optional(node, 4) not in (None, 1):
        return False
    begin, end = _optional(node, 2), _optional(node, 3)
    return begin in (None, 0) and end in (None, torch.iinfo(torch.int64).max)


def _optional(node: Any, place: int) -> Any:
    """An argument of a node; None where it is left out."""
    return node.args[place] if place < len(node.args) else None
