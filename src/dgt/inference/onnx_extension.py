"""DG-Attention as one ONNX node of the domain `dgt`, for runtimes that an extension teaches it.

In a recorded graph a DG-Attention is three operators: group, select, attend. Here they are joined
into one of two forms of the node `DGAttention`, with the attributes `top_k` and `scale`:

    (query, key, value, centroids) -> output    (B, H, L, D) three times, (H, G, D) -> (B, H, L, D)
    (qkv, centroids) -> output                  (B, L, 3 H D), (H, G, D) -> (B, L, H D)

The second takes the projections of a layer as they are, so nothing is transposed before or after.
`openvino_extension.cpp` is the node in OpenVINO.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import onnx
import torch
from onnxscript import FLOAT
from onnxscript.values import Op, Opset
from torch import Tensor
from torch.export import ExportedProgram

from dgt.ops import dynamic_group_attention

DOMAIN = Opset("dgt", 1)
HEADS_FIRST = [2, 0, 3, 1, 4]  # (B, L, 3, H, D) -> (3, B, H, L, D)
VIEWS_OF_ALL = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
_SCHEMA = onnx.defs.OpSchema(
    name="DGAttention",
    domain=DOMAIN.domain,
    since_version=DOMAIN.version,
    inputs=[onnx.defs.OpSchema.FormalParameter("inputs", "T", param_option=_VARIADIC)],
    outputs=[onnx.defs.OpSchema.FormalParameter("output", "T")],
    type_constraints=[("T", ["tensor(float)"], "float32")],
    attributes=[
        onnx.defs.OpSchema.Attribute("top_k", onnx.defs.OpSchema.AttrType.INT),
        onnx.defs.OpSchema.Attribute("scale", onnx.defs.OpSchema.AttrType.FLOAT),
    ],
)
_NODE = Op(DOMAIN, _SCHEMA.name, _SCHEMA)


@torch.library.custom_op("dgt::joined_attention", mutates_args=())
def _joined_attention(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int, scale: float
) -> Tensor:
    return dynamic_group_attention(query, key, value, centroids, top_k, scale).output.contiguous()


@_joined_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("dgt::joined_attention_of_projection", mutates_args=())
def _joined_attention_of_projection(
    qkv: Tensor, centroids: Tensor, top_k: int, scale: float
) -> Tensor:
    heads, _, channels = centroids.shape
    parts = qkv.unflatten(-1, [3, heads, channels]).permute(HEADS_FIRST)
    query, key, value = parts.unbind()
    output = dynamic_group_attention(query, key, value, centroids, top_k, scale).output
    return output.transpose(1, 2).flatten(2).contiguous()


@_joined_attention_of_projection.register_fake
def _(qkv: Tensor, centroids: Tensor, *_: Any) -> Tensor:
    heads, channels = centroids.shape[0], centroids.shape[2]
    return qkv.new_empty((*qkv.shape[:2], heads * channels))


def joined_attention(
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    centroids: FLOAT[...],
    top_k: int,
    scale: float,
) -> FLOAT[...]:
    """The node for (B, H, L, D) queries, keys and values."""
    return _NODE(query, key, value, centroids, top_k=top_k, scale=scale)


def joined_attention_of_projection(
    qkv: FLOAT[...], centroids: FLOAT[...], top_k: int, scale: float
) -> FLOAT[...]:
    """The node for (B, L, 3 H D) projections."""
    return _NODE(qkv, centroids, top_k=top_k, scale=scale)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.dgt.joined_attention.default: joined_attention,
    torch.ops.dgt.joined_attention_of_projection.default: joined_attention_of_projection,
}


class _Attention(NamedTuple):
    """A DG-Attention in a graph: the nodes and the numbers that its three steps are called with."""

    query: Any
    key: Any
    value: Any
    centroids: Any
    top_k: int
    scale: float


def join_steps(program: ExportedProgram) -> int:
    """Make one operator of the three steps of every DG-Attention of a graph, in place.

    Steps that are of no DG-Attention as a layer of this package does it, such as those with a mask
    of padding, stay as they are.

    Returns:
        How many there were.
    """
    count = 0
    for node in list(program.graph.nodes):
        attention = _find_attention(node)
        if attention is None:
            continue
        count += 1
        projection = _find_projection(attention)
        merged = _find_merged_heads(node)
        if projection is None or merged is None:
            node.target = torch.ops.dgt.joined_attention.default
            node.args = tuple(attention)
        else:
            merged.target = torch.ops.dgt.joined_attention_of_projection.default
            merged.args = (projection, attention.centroids, attention.top_k, attention.scale)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return count


def _find_attention(node: Any) -> _Attention | None:
    """The DG-Attention that a node is the last step of; None where it is of none."""
    if node.target != torch.ops.dgt.attend.default or _optional(node, 6) is not None:
        return None
    query, key, value, groups, keys, scale = node.args[:6]
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
    return _Attention(query, key, value, centroids, keys.args[2], scale)


def _find_projection(attention: _Attention) -> Any:
    """The (B, L, 3 H D) projections that query, key and value are views of; None where not."""
    parts = (attention.query, attention.key, attention.value)
    split: Any = parts[0].args[0] if parts[0].args else None
    for place, part in enumerate(parts):
        if part.op != "call_function" or part.args != (split, place):
            return None
    if split.target != torch.ops.aten.unbind.int or _optional(split, 1) not in (None, 0):
        return None
    turned = split.args[0]
    if turned.target != torch.ops.aten.permute.default or list(turned.args[1]) != HEADS_FIRST:
        return None
    cut = turned.args[0]
    if cut.target != torch.ops.aten.unflatten.int:
        return None
    projection = cut.args[0]
    heads, _, channels = attention.centroids.meta["val"].shape
    fits = projection.meta["val"].dim() == 3 and list(cut.args[2]) == [3, heads, channels]
    return projection if fits else None


def _find_merged_heads(node: Any) -> Any:
    """The node that makes (B, L, H D) of an attention's (B, H, L, D); None where there is none, or
    something else is made of it, too.
    """
    for target, places in (
        (torch.ops.aten.transpose.int, (1, 2)),
        (torch.ops.aten.flatten.using_ints, (2,)),
    ):
        users = list(node.users)
        if len(users) != 1 or users[0].target != target or users[0].args != (node, *places):
            return None
        node = users[0]
    return node


def _origin(node: Any) -> Any:
    """What a node is without the views of all of it that lie before it."""
    while node.target in VIEWS_OF_ALL or _is_whole_slice(node):
        node = node.args[0]
    return node


def _is_whole_slice(node: Any) -> bool:
    if node.target != torch.ops.aten.slice.Tensor or _optional(node, 4) not in (None, 1):
        return False
    begin, end = _optional(node, 2), _optional(node, 3)
    return begin in (None, 0) and end in (None, torch.iinfo(torch.int64).max)


def _optional(node: Any, place: int) -> Any:
    """An argument of a node; None where it is left out."""
    return node.args[place] if place < len(node.args) else None
