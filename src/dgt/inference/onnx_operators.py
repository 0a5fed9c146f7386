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
    scores = op.MatMul(query, op.Transpose(centroids, perm=[0, 2, 1]))
    return op.ArgMax(scores, axis=-1, keepdims=0, select_last_index=0)


@script(DOMAIN)
def select_keys(centroids: FLOAT[...], key: FLOAT[...], top_k: int) -> INT64[...]:
    """Select the (B, H, G, min(top_k, L)) best keys of every group, in no order: `attend` needs none."""
    scores = op.MatMul(centroids, op.Transpose(key, perm=[0, 1, 3, 2]))
    count = op.Min(top_k, op.Shape(key, start=2, end=3))
    _, key_ids = op.TopK(scores, count, axis=-1, largest=1, sorted=0)
    return key_ids


@script(DOMAIN)
def _attend_dense_masked(
    query: FLOAT[...], key: FLOAT[...], value: FLOAT[...], group_ids: INT64[...], key_ids: INT64[...], scale: float
) -> FLOAT[...]:
    """All queries and keys of a head, under a mask (B, H, G, L) whose rows are picked by group."""
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    any_size = op.Constant(value_ints=[-1])
    tokens = op.Shape(key, start=2, end=3)
    hidden = op.Expand(op.Constant(value_float=-1e30), op.Concat(op.Shape(key_ids, start=0, end=3), tokens, axis=0))
    shown = op.Expand(op.Constant(value_float=0.0), op.Shape(key_ids))
    rows = op.Reshape(op.ScatterElements(hidden, key_ids, shown, axis=-1), op.Concat(any_size, tokens, axis=0))
    heads = op.Shape(key_ids, start=0, end=2)
    first = op.Range(zero, op.ReduceProd(heads, keepdims=0), one) * op.Shape(key_ids, start=2, end=3)
    first = op.Reshape(first, op.Concat(heads, op.Constant(value_ints=[1]), axis=0))
    bias = op.Gather(rows, group_ids + first, axis=0)
    score = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])) * scale + bias
    return op.MatMul(op.Softmax(score, axis=-1), value)


@script(DOMAIN)
def _sort_by_group(group_ids: INT64[...], groups: INT64) -> tuple[INT64[...], INT64[...]]:
    """Sort queries by head and group, in order inside a group.

    Returns rows of the flattened queries, (B H L,), and the list of keys that each of them sees, (B H L,) below S.
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    any_size = op.Constant(value_ints=[-1])
    tokens = op.Shape(group_ids, start=2, end=3)
    number = op.Squeeze(tokens)
    token = op.Range(zero, number, one)
    # One integer for group and token: no two are equal, and the sorted values alone tell both.
    mixed = op.Reshape(group_ids * tokens + token, op.Concat(any_size, tokens, axis=0))
    ordered, _ = op.TopK(mixed, tokens, axis=-1, largest=0, sorted=1)
    head = op.Unsqueeze(op.Range(zero, op.Squeeze(op.Shape(ordered, start=0, end=1)), one), any_size)
    group = ordered / number
    order = op.Reshape(ordered - group * number + head * number, any_size)
    return order, op.Reshape(group + head * groups, any_size)


@script(DOMAIN)
def _cut_into_tiles(lists: INT64[...], count: INT64, share: INT64[...]) -> tuple[INT64[...], INT64[...], INT64[...]]:
    """Cut the queries of each of ``count`` lists of keys, ``lists`` ascending, into tiles that straddle no two lists.

    A list has ``share`` queries on average; small ones would leave large tiles half empty. Returns the list of every
    tile (T,), the sorted queries that are in its slots (T, 32 or 64), those of a neighbour in empty ones, and the slot
    of every sorted query.
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    size = op.Squeeze(
        op.Where(share < op.Constant(value_ints=[48]), op.Constant(value_ints=[32]), op.Constant(value_ints=[64]))
    )
    none = op.Expand(zero, op.Unsqueeze(count, zero))
    lengths = op.ScatterElements(none, lists, op.Expand(one, op.Shape(lists)), axis=0, reduction="add")
    tiles = (lengths + size - one) / size
    ends = op.CumSum(tiles, zero)
    starts, first = ends - tiles, op.CumSum(lengths, zero, exclusive=1)
    total = op.ReduceSum(tiles, keepdims=0)
    # A tile's list is the number of lists whose tiles have ended before it.
    ended = op.Expand(zero, op.Unsqueeze(total + one, zero))
    ended = op.ScatterElements(ended, ends, op.Expand(one, op.Shape(ends)), axis=0, reduction="add")
    tile = op.Range(zero, total, one)
    owner = op.Gather(op.CumSum(ended, zero), tile, axis=0)
    corner = op.Gather(first, owner, axis=0) + (tile - op.Gather(starts, owner, axis=0)) * size
    slots = op.Unsqueeze(corner, one) + op.Range(zero, size, one)
    number = op.Squeeze(op.Shape(lists))
    nth = op.Range(zero, number, one) - op.Gather(first, lists, axis=0)
    return owner, op.Min(slots, number - one), op.Gather(starts, lists, axis=0) * size + nth


@script(DOMAIN)
def _attend_gathered(
    query: FLOAT[...], key: FLOAT[...], value: FLOAT[...], group_ids: INT64[...], key_ids: INT64[...], scale: float
) -> FLOAT[...]:
    """Tiles of queries of one group, each with the selected keys of that group, gathered."""
    any_size = op.Constant(value_ints=[-1])
    groups = op.Squeeze(op.Shape(key_ids, start=2, end=3))
    row = op.Concat(any_size, op.Shape(query, start=3, end=4), axis=0)  # shape of rows of D channels
    order, lists = _sort_by_group(group_ids, groups)
    count = op.ReduceProd(op.Shape(key_ids, start=0, end=3), keepdims=0)
    owner, slots, places = _cut_into_tiles(lists, count, op.Shape(group_ids, start=2, end=3) / groups)
    queries = op.Gather(order, slots, axis=0)
    keys = op.Reshape(key_ids, op.Concat(any_size, op.Shape(key_ids, start=3, end=4), axis=0))
    head = op.Unsqueeze(owner / groups, any_size)
    keys = op.Gather(keys, owner, axis=0) + head * op.Shape(key, start=2, end=3)
    q = op.Gather(op.Reshape(query, row), queries, axis=0)
    k = op.Gather(op.Reshape(key, row), keys, axis=0)
    v = op.Gather(op.Reshape(value, row), keys, axis=0)
    score = op.MatMul(q, op.Transpose(k, perm=[0, 2, 1])) * scale
    attended = op.Reshape(op.MatMul(op.Softmax(score, axis=-1), v), row)
    back = op.ScatterElements(order, order, places, axis=0)
    return op.Reshape(op.Gather(attended, back, axis=0), op.Shape(query))


@script(DOMAIN)
def attend(
    query: FLOAT[...], key: FLOAT[...], value: FLOAT[...], group_ids: INT64[...], key_ids: INT64[...], scale: float
) -> FLOAT[...]:
    """Softmax attention of every query over the keys of its group (Eq. 2): (B, H, L, D)."""
    two = op.Constant(value_ints=[2])
    listed = op.Shape(key_ids, start=2, end=3) + op.Shape(key_ids, start=3, end=4)
    if op.Squeeze(op.Shape(query, start=2, end=3) <= listed * two):
        output = _attend_dense_masked(query, key, value, group_ids, key_ids, scale)
    else:
        output = _attend_gathered(query, key, value, group_ids, key_ids, scale)
    return output


FUNCTIONS = (_attend_dense_masked, _attend_gathered, _sort_by_group, _cut_into_tiles)
"""What the translations call: the graph needs their bodies too."""


def gelu(x: FLOAT[...], approximate: str = "none") -> FLOAT[...]:
    """GELU, its products in the order in which onnxruntime knows them as one operation."""
    if approximate == "tanh":
        inner = op.Mul(op.Add(x, op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return op.Mul(op.Mul(x, op.Add(op.Tanh(inner), 1.0)), 0.5)
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, math.sqrt(2.0))), 1.0)), 0.5)


def adaptive_avg_pool2d(x: FLOAT[...], output_size: Sequence[int]) -> FLOAT[...]:
    """Average pooling to ``output_size``, for any input size: products with the weights of the windows."""
    rows, columns = (
        _windows(op.Shape(x, start=axis, end=axis + 1), count) for axis, count in zip((2, 3), output_size, strict=True)
    )
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
