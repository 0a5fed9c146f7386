"""The operator's three steps as functions of standard ONNX operators (opset 18), for any batch, height and width.

    group_queries:  ArgMax of the scores                  ties to the lowest group, by ONNX's definition of ArgMax
    select_keys:    TopK of the scores                    ties to the lowest key, by ONNX's definition of TopK
    attend:         dense masked: all keys of a head under a mask whose rows are picked by group, for few tokens
                    gathered: queries sorted by group into tiles, each with the gathered keys of its group

The shapes, and so which way `attend` goes, are known only where the graph runs: both ways are in it, under an `If`, by
the rule of :func:`dgt.ops.eager.is_dense_masked`. Masks of padding are no part of an exported model.

The functions are written in ONNX Script: what looks like Python is read as a graph, names are edges, operators on them
are nodes, and ``/`` of integers rounds down. Letters as in :mod:`dgt.ops`, and S for B H G, the lists of keys.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import FLOAT, INT64, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

DOMAIN = Opset("dgt", 1)


@script(DOMAIN)
def group_queries(query: FLOAT[...], centroids: FLOAT[...]) -> INT64[...]:
    """Assign every (B, H, L, D) query to the nearest of the (H, G, D) centroids: (B, H, L)."""
    scores = op.MatMul(centroids, op.Transpose(query, perm=[0, 1, 3, 2]))
    return op.ArgMax(scores, axis=-2, keepdims=0, select_last_index=0)


@script(DOMAIN)
def select_keys(centroids: FLOAT[...], key: FLOAT[...], top_k: int) -> INT64[...]:
    """Select the (B, H, G, min(top_k, L)) best keys of every group, in no order: `attend` needs none."""
    scores = op.MatMul(key, op.Transpose(centroids, perm=[0, 2, 1]))
    count = op.Min(top_k, op.Shape(key, start=2, end=3))
    _, key_ids = op.TopK(scores, count, axis=-2, largest=1, sorted=0)
    return op.Transpose(key_ids, perm=[0, 1, 3, 2])


@script(DOMAIN)
def _attend_dense_masked(
    query: FLOAT[...], key: FLOAT[...], value: FLOAT[...], group_ids: INT64[...], key_ids: INT64[...]
) -> FLOAT[...]:
    """All queries and keys of a head, under a mask (B, H, G, L) whose rows are picked by group."""
    last = op.Constant(value_ints=[-1])
    lists = op.Concat(op.Shape(key_ids, start=0, end=3), op.Shape(key, start=2, end=3), axis=0)
    hidden = op.Expand(op.Constant(value_float=-1e30), lists)
    shown = op.Expand(op.Constant(value_float=0.0), op.Shape(key_ids))
    rows = op.ScatterElements(hidden, key_ids, shown, axis=-1)
    bias = op.GatherND(rows, op.Unsqueeze(group_ids, last), batch_dims=2)
    score = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])) + bias
    return op.MatMul(op.Softmax(score, axis=-1), value)


@script(DOMAIN)
def _cut_into_tiles(
    group: INT64[...], groups: INT64[...], size: INT64[...]
) -> tuple[INT64[...], INT64[...], INT64[...]]:
    """Cut queries, sorted by ``group`` (B H, L), into tiles of ``size`` that straddle no two groups.

    As many tiles as there could be at most, T = L // size + G, so that shapes do not depend on values. Returns the
    group of every tile (B H, T), the sorted queries in its slots (B H, T size), those of a neighbour in empty ones,
    and the slot of every sorted query (B H, L).
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    last = op.Constant(value_ints=[-1])
    heads, tokens = op.Shape(group, start=0, end=1), op.Shape(group, start=1, end=2)
    token = op.Range(zero, op.Squeeze(tokens), one)
    none = op.Expand(zero, op.Concat(heads, groups, axis=0))
    lengths = op.ScatterElements(none, group, op.Expand(one, op.Shape(group)), axis=-1, reduction="add")
    tiles = (lengths + size - one) / size
    ends = op.CumSum(tiles, one)
    starts, first = ends - tiles, op.CumSum(lengths, one, exclusive=1)
    tile = op.Range(zero, op.Squeeze(tokens / size + groups), one)
    # A tile's group is the number of groups whose tiles have ended before it.
    ended = op.Cast(op.LessOrEqual(op.Unsqueeze(ends, last), tile), to=INT64.dtype)
    owner = op.Min(op.ReduceSum(ended, op.Constant(value_ints=[1]), keepdims=0), groups - one)
    corner = op.GatherElements(first, owner, axis=-1) + (tile - op.GatherElements(starts, owner, axis=-1)) * size
    slots = op.Unsqueeze(corner, last) + op.Range(zero, op.Squeeze(size), one)
    slots = op.Reshape(op.Min(slots, tokens - one), op.Concat(heads, last, axis=0))
    nth = token - op.GatherElements(first, group, axis=-1)
    return owner, slots, op.GatherElements(starts, group, axis=-1) * size + nth


@script(DOMAIN)
def _attend_gathered(
    query: FLOAT[...], key: FLOAT[...], value: FLOAT[...], group_ids: INT64[...], key_ids: INT64[...]
) -> FLOAT[...]:
    """Tiles of queries of one group, each with the selected keys of that group, gathered."""
    last = op.Constant(value_ints=[-1])
    size = op.Constant(value_ints=[32])
    shape = op.Shape(query, start=2, end=4)
    rows = op.Concat(last, shape, axis=0)
    tokens, channels = op.Shape(query, start=2, end=3), op.Shape(query, start=3, end=4)
    groups = op.Shape(key_ids, start=2, end=3)
    # One integer for group and token: no two are equal, and the sorted values alone tell both.
    token = op.Range(op.Constant(value_int=0), op.Squeeze(tokens), op.Constant(value_int=1))
    mixed = op.Reshape(group_ids * tokens + token, op.Concat(last, tokens, axis=0))
    mixed, _ = op.TopK(mixed, tokens, axis=-1, largest=0, sorted=1)
    group = mixed / tokens
    order = mixed - group * tokens
    owner, slots, places = _cut_into_tiles(group, groups, size)
    owner = op.Unsqueeze(owner, last)
    queries = op.Unsqueeze(op.GatherElements(order, slots, axis=-1), last)
    keys = op.Reshape(key_ids, op.Concat(last, op.Shape(key_ids, start=2, end=4), op.Constant(value_ints=[1]), axis=0))
    tiles = op.Concat(op.Shape(owner, start=0, end=2), size, channels, axis=0)
    q = op.Reshape(op.GatherND(op.Reshape(query, rows), queries, batch_dims=1), tiles)
    k = op.GatherND(op.GatherND(op.Reshape(key, rows), keys, batch_dims=1), owner, batch_dims=1)
    v = op.GatherND(op.GatherND(op.Reshape(value, rows), keys, batch_dims=1), owner, batch_dims=1)
    score = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    attended = op.MatMul(op.Softmax(score, axis=-1), v)
    attended = op.Reshape(attended, op.Concat(op.Shape(owner, start=0, end=1), last, channels, axis=0))
    back = op.Unsqueeze(op.ScatterElements(order, order, places, axis=-1), last)
    return op.Reshape(op.GatherND(attended, back, batch_dims=1), op.Shape(query))


@script(DOMAIN)
def attend(
    query: FLOAT[...], key: FLOAT[...], value: FLOAT[...], group_ids: INT64[...], key_ids: INT64[...], scale: float
) -> FLOAT[...]:
    """Softmax attention of every query over the keys of its group (Eq. 2): (B, H, L, D)."""
    two = op.Constant(value_ints=[2])
    listed = op.Shape(key_ids, start=2, end=3) + op.Shape(key_ids, start=3, end=4)
    scaled = query * scale
    if op.Squeeze(op.Shape(query, start=2, end=3) <= listed * two):
        output = _attend_dense_masked(scaled, key, value, group_ids, key_ids)
    else:
        output = _attend_gathered(scaled, key, value, group_ids, key_ids)
    return output


FUNCTIONS = (_attend_dense_masked, _attend_gathered, _cut_into_tiles)
"""What the translations call: the graph needs their bodies too."""


def gelu(x: FLOAT[...], approximate: str = "none") -> FLOAT[...]:
    """GELU, its products in the order in which onnxruntime knows them as one operation."""
    if approximate == "tanh":
        inner = op.Mul(op.Add(x, op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return op.Mul(op.Mul(x, op.Add(op.Tanh(inner), 1.0)), 0.5)
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, math.sqrt(2.0))), 1.0)), 0.5)


def adaptive_avg_pool2d(x: FLOAT[...], output_size: Sequence[int]) -> FLOAT[...]:
    """Average pooling to ``output_size``, for any input size: products with the weights of the windows."""
    sides = zip((2, 3), output_size, strict=True)
    rows, columns = (_windows(op.Shape(x, start=axis, end=axis + 1), count) for axis, count in sides)
    return op.MatMul(op.MatMul(rows, x), op.Transpose(columns, perm=[1, 0]))


def _windows(size: INT64[...], count: int) -> FLOAT[...]:
    """Weights (count, size) of averages over ``count`` windows of ``size`` places, as PyTorch lays them."""
    windows, axis = op.Constant(value_ints=[count]), op.Constant(value_ints=[1])
    begin = op.Div(op.Mul(size, op.Constant(value_ints=list(range(count)))), windows)
    end = op.Mul(size, op.Constant(value_ints=list(range(1, count + 1))))
    first = op.Unsqueeze(begin, axis)
    last = op.Unsqueeze(op.Div(op.Sub(end, op.Constant(value_ints=[1])), windows), axis)
    place = op.Range(op.Constant(value_int=0), op.Squeeze(size), op.Constant(value_int=1))
    inside = op.And(op.GreaterOrEqual(place, first), op.LessOrEqual(place, last))
    weights = op.Cast(inside, to=FLOAT.dtype)
    return op.Div(weights, op.ReduceSum(weights, axis, keepdims=1))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.dgt.group_queries.default: group_queries,
    torch.ops.dgt.select_keys.default: select_keys,
    torch.ops.dgt.attend.default: attend,
    torch.ops.aten.gelu.default: gelu,
    torch.ops.aten.adaptive_avg_pool2d.default: adaptive_avg_pool2d,
}
