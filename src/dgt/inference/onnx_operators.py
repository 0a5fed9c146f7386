"""The operator's three steps as functions of standard ONNX operators (opset 18), for any batch,
height and width.

    group_queries:  ArgMax of the scores                  ties to the lowest group, by ONNX's definition of ArgMax
    select_keys:    TopK of the scores                    ties to the lowest key, by ONNX's definition of TopK;
                    of many keys in two steps             first runs of keys, then the keys of these
    attend:         dense masked: all keys of a head under a mask whose rows are picked by group, for few tokens
                    gathered: queries sorted by group into tiles, each with the gathered keys of its group

The shapes, and so which way `attend` goes, are known only where the graph runs: both ways are in
it, under an `If`, by the rule L <= 2 (k + G), as measured on CPUs; a graph of known sizes keeps
one. Masks of padding are no part of it.

The functions are written in ONNX Script: what looks like Python is read as a graph, names are
edges, operators on them are nodes, and ``/`` of integers rounds down. Letters as in :mod:`dgt.ops`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript import FLOAT, INT64, script
from onnxscript import opset18 as op
from onnxscript.values import Opset
from torch import Tensor, nn
from torch.export import ExportedProgram

from dgt.ops import standard
from dgt.ops.residual_keys import attend_to_residual_keys

DOMAIN = Opset("dgt", 1)
TO_TOKENS, TO_IMAGE = [0, 2, 3, 1], [0, 3, 1, 2]
TOKENWISE = ("Add", "Sub", "Mul", "LayerNormalization", "MatMul")  # of three dimensions as of four


@script(DOMAIN)
def group_queries(query: FLOAT[...], centroids: FLOAT[...]) -> INT64[...]:
    """Assign every (B, H, L, D) query to the nearest of the (H, G, D) centroids: (B, H, L)."""
    scores = op.MatMul(centroids, op.Transpose(query, perm=[0, 1, 3, 2]))
    return op.ArgMax(scores, axis=-2, keepdims=0, select_last_index=0)


@script(DOMAIN)
def _best(scores: FLOAT[...], count: INT64[...]) -> INT64[...]:
    """The ``count`` best along L of scores (B, H, L, G), in no order."""
    _, ids = op.TopK(scores, count, axis=-2, largest=1, sorted=0)
    return ids


@script(DOMAIN)
def _best_of_many(scores: FLOAT[...], count: INT64[...]) -> INT64[...]:
    """The same by runs of 8 tokens: all of the best lie in the ``count`` runs with the greatest maxima.

    OpenVINO sorts the axis of a TopK: so it sorts L / 8 and 8 k numbers, not L. Runs are in order,
    ties as they were.
    """
    axis = op.Constant(value_ints=[-2])
    last = op.Constant(value_ints=[-1])
    size = op.Constant(value_ints=[8])
    outer = op.Shape(scores, end=2)
    length = op.Shape(scores, start=2, end=3)
    groups = op.Shape(scores, start=3)
    none = op.Constant(value_ints=[0])
    before = op.Constant(value_ints=[0, 0, 0, 0])
    missing = op.Concat(before, none, none, op.Mod(-length, size), none, axis=0)
    filled = op.Pad(scores, missing, op.Constant(value_float=-3e38))
    runs = op.MaxPool(filled, kernel_shape=[8, 1], strides=[8, 1])
    best, _ = op.TopK(_best(runs, count), count, axis=-2, largest=0, sorted=1)
    nth = op.Unsqueeze(op.Constant(value_ints=[0, 1, 2, 3, 4, 5, 6, 7]), last)
    tokens = op.Unsqueeze(best * size, axis) + nth  # (B, H, k, 8, G)
    tokens = op.Reshape(tokens, op.Concat(outer, last, groups, axis=0))
    return op.GatherElements(
        tokens, _best(op.GatherElements(filled, tokens, axis=-2), count), axis=-2
    )


@script(DOMAIN)
def select_keys(centroids: FLOAT[...], key: FLOAT[...], top_k: int) -> INT64[...]:
    """Select the (B, H, G, min(top_k, L)) best keys of every group, in no order: `attend` needs
    none.
    """
    scores = op.MatMul(key, op.Transpose(centroids, perm=[0, 2, 1]))
    length = op.Shape(key, start=2, end=3)
    count = op.Min(top_k, length)
    if op.Squeeze(length > count * op.Constant(value_ints=[16])):
        ids = _best_of_many(scores, count)
    else:
        ids = _best(scores, count)
    return op.Transpose(ids, perm=[0, 1, 3, 2])


@script(DOMAIN)
def _pick(rows: FLOAT[...], ids: INT64[...]) -> FLOAT[...]:
    """Rows of N lists (N, R, ...) by ids (N, M) in each: (N, M, ...).

    GatherND with `batch_dims` is the same, but for onnxruntime's symbolic shapes, which its
    quantization begins with: they leave that attribute aside.
    """
    last = op.Constant(value_ints=[-1])
    lists = op.Squeeze(op.Shape(rows, start=0, end=1))
    nth = op.Range(op.Constant(value_int=0), lists, op.Constant(value_int=1))
    begin = op.Unsqueeze(nth * op.Shape(rows, start=1, end=2), last)
    joined = op.Reshape(rows, op.Concat(last, op.Shape(rows, start=2), axis=0))
    return op.Gather(joined, ids + begin, axis=0)


@script(DOMAIN)
def _attend_dense_masked(
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    group_ids: INT64[...],
    key_ids: INT64[...],
) -> FLOAT[...]:
    """All queries and keys of a head, under a mask (B, H, G, L) whose rows are picked by group."""
    last = op.Constant(value_ints=[-1])
    lists = op.Concat(op.Shape(key_ids, start=0, end=3), op.Shape(key, start=2, end=3), axis=0)
    hidden = op.Expand(op.Constant(value_float=-1e30), lists)
    shown = op.Expand(op.Constant(value_float=0.0), op.Shape(key_ids))
    rows = op.ScatterElements(hidden, key_ids, shown, axis=-1)
    heads = op.Concat(last, op.Shape(rows, start=2), axis=0)
    ids = op.Reshape(group_ids, op.Concat(last, op.Shape(group_ids, start=2), axis=0))
    score = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))
    score = score + op.Reshape(_pick(op.Reshape(rows, heads), ids), op.Shape(score))
    return op.MatMul(op.Softmax(score, axis=-1), value)


@script(DOMAIN)
def _attend_gathered(
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    group_ids: INT64[...],
    key_ids: INT64[...],
) -> FLOAT[...]:
    """Tiles of 32 queries of one group, each with the selected keys of that group, gathered.

    As many tiles as there could be at most, T = L // 32 + G, so that shapes do not depend on
    values: empty places are computed too, and never read.
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    last = op.Constant(value_ints=[-1])
    size = op.Constant(value_ints=[32])
    tokens = op.Shape(query, start=2, end=3)
    channels = op.Shape(query, start=3, end=4)
    groups = op.Shape(key_ids, start=2, end=3)
    rows = op.Concat(last, tokens, channels, axis=0)
    rows_of_keys = op.Concat(last, op.Shape(key, start=2), axis=0)
    # Sorted by one integer for group and token: all are different, and the value determines both.
    token = op.Range(zero, op.Squeeze(tokens), one)
    mixed = op.Reshape(group_ids * tokens + token, op.Concat(last, tokens, axis=0))
    mixed, _ = op.TopK(mixed, tokens, axis=-1, largest=0, sorted=1)
    group = mixed / tokens  # (B H, L)
    order = mixed - group * tokens
    heads, tiles = op.Shape(group, start=0, end=1), tokens / size + groups
    # A tile begins where a group does, and after every 32 of its queries.
    none = op.Expand(zero, op.Concat(heads, groups, axis=0))
    lengths = op.ScatterElements(
        none, group, op.Expand(one, op.Shape(group)), axis=-1, reduction="add"
    )
    nth = op.Mod(
        token - op.GatherElements(op.CumSum(lengths, one, exclusive=1), group, axis=-1), size
    )
    tile = op.CumSum(op.Cast(nth == zero, to=INT64.dtype), one) - one
    place = tile * size + nth
    empty = op.Expand(zero, op.Concat(heads, tiles * size, axis=0))
    queries = op.ScatterElements(empty, place, order, axis=-1)
    empty = op.Expand(zero, op.Concat(heads, tiles, axis=0))
    owner = op.ScatterElements(empty, tile, group, axis=-1, reduction="max")
    # (B H, G k)
    keys = op.Reshape(key_ids, op.Concat(heads, last, axis=0))
    lists = op.Concat(heads, op.Shape(key_ids, start=2), last, axis=0)
    q = _pick(op.Reshape(query, rows), queries)
    q = op.Reshape(q, op.Concat(heads, tiles, size, channels, axis=0))
    k = _pick(op.Reshape(_pick(op.Reshape(key, rows_of_keys), keys), lists), owner)
    v = _pick(op.Reshape(_pick(op.Reshape(value, rows_of_keys), keys), lists), owner)
    score = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    attended = op.Reshape(
        op.MatMul(op.Softmax(score, axis=-1), v), op.Concat(heads, last, channels, axis=0)
    )
    back = op.ScatterElements(order, order, place, axis=-1)
    return op.Reshape(_pick(attended, back), op.Shape(query))


@script(DOMAIN)
def _attend(
    scaled: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    group_ids: INT64[...],
    key_ids: INT64[...],
) -> FLOAT[...]:
    """Attend in the quicker way, to keys that are multiplied with queries as these are."""
    two = op.Constant(value_ints=[2])
    listed = op.Shape(key_ids, start=2, end=3) + op.Shape(key_ids, start=3, end=4)
    if op.Squeeze(op.Shape(scaled, start=2, end=3) <= listed * two):
        output = _attend_dense_masked(scaled, key, value, group_ids, key_ids)
    else:
        output = _attend_gathered(scaled, key, value, group_ids, key_ids)
    return output


@script(DOMAIN)
def attend(
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    group_ids: INT64[...],
    key_ids: INT64[...],
    scale: float,
) -> FLOAT[...]:
    """Softmax attention of every query over the keys of its group (Eq. 2): (B, H, L, D)."""
    return _attend(op.Mul(query, scale), key, value, group_ids, key_ids)


@script(DOMAIN)
def attend_with_bias(
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    group_ids: INT64[...],
    key_ids: INT64[...],
    key_bias: FLOAT[...],
    scale: float,
) -> FLOAT[...]:
    """The same with a bias on the scores of every key: one channel more, which is 1 in queries."""
    last = op.Constant(value_ints=[-1])
    each = op.Constant(value_ints=[1])
    shape = op.Concat(op.Shape(query, end=3), each, axis=0)
    bias = op.Unsqueeze(key_bias, last)
    queries = op.Concat(query * scale, op.Expand(op.Constant(value_float=1.0), shape), axis=-1)
    keys = op.Concat(key, bias, axis=-1)
    values = op.Concat(value, bias * op.Constant(value_float=0.0), axis=-1)
    attended = _attend(queries, keys, values, group_ids, key_ids)
    channels = op.Shape(value, start=3, end=4)
    return op.Slice(attended, op.Constant(value_ints=[0]), channels, last)


def attend_alone(
    query: Any,
    key: Any,
    value: Any,
    group_ids: Any,
    key_ids: Any,
    scale: float,
    key_bias: Any = None,
    *_: Any,
    **__: Any,
) -> tuple[Any, Any, Any]:
    """Return the output of `attend`, and numbers in the place of what gradients need, which no file reads."""
    tokens = (query, key, value, group_ids, key_ids)
    nothing = op.Constant(value_float=0.0)
    if key_bias is None:
        return attend(*tokens, scale=scale), nothing, nothing
    return attend_with_bias(*tokens, key_bias, scale=scale), nothing, nothing


FUNCTIONS = (_best, _best_of_many, _pick, _attend_dense_masked, _attend_gathered, _attend)
"""What the translations call: the graph needs their bodies too."""


def gelu(x: FLOAT[...], approximate: str = "none") -> FLOAT[...]:
    """GELU, its products in the order in which onnxruntime knows them as one operation."""
    if approximate == "tanh":
        inner = op.Mul(op.Add(x, op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return op.Mul(op.Mul(x, op.Add(op.Tanh(inner), 1.0)), 0.5)
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, math.sqrt(2.0))), 1.0)), 0.5)


def adaptive_avg_pool2d(x: FLOAT[...], output_size: Sequence[int]) -> FLOAT[...]:
    """Average pooling to ``output_size``, for any input size: products with the weights of the
    windows.
    """
    sides = zip((2, 3), output_size, strict=True)
    rows, columns = (
        _windows(op.Shape(x, start=axis, end=axis + 1), count) for axis, count in sides
    )
    return op.MatMul(op.MatMul(rows, x), op.Transpose(columns, perm=[1, 0]))


def _windows(size: INT64[...], count: int) -> FLOAT[...]:
    """Weights (count, size) of means over windows, i of places p: i size < (p + 1) count, p count <
    (i + 1) size.
    """
    windows, axis = op.Constant(value_ints=[count]), op.Constant(value_ints=[1])
    begin = op.Unsqueeze(op.Mul(size, op.Constant(value_ints=list(range(count)))), axis)
    place = op.Mul(
        op.Range(op.Constant(value_int=0), op.Squeeze(size), op.Constant(value_int=1)), windows
    )
    inside = op.And(op.Less(begin, op.Add(place, windows)), op.Less(place, op.Add(begin, size)))
    weights = op.Cast(inside, to=FLOAT.dtype)
    return op.Div(weights, op.ReduceSum(weights, axis, keepdims=1))


class _OneResidualKey:
    """Steps of attention to one residual key a group, in operators that have translations."""

    summarize_clusters = staticmethod(standard.summarize_clusters)

    @staticmethod
    def attend(*tokens: Any, **named: Any) -> Tensor:
        output: Tensor = torch.ops.dgt.attend(*tokens, **named)[0]
        return output


def attend_to_one_residual_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
    with_logsumexp: bool = False,
    residual_keys: int = 0,
    key_cluster_ids: Tensor | None = None,
) -> Any:
    """Take `dgt::attend` to residual keys apart; empty results stand for those that no file reads."""
    if not residual_keys:
        return NotImplemented
    output = attend_to_residual_keys(
        _OneResidualKey,
        query,
        key,
        value,
        group_ids,
        key_ids,
        scale=scale,
        key_cluster_ids=key_cluster_ids,
        residual_keys=residual_keys,
    )
    return output, query.new_empty(0), query.new_empty(0)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.dgt.attend.default: attend_to_one_residual_key
}
"""What is taken apart before the translation."""

TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.dgt.group_queries.default: group_queries,
    torch.ops.dgt.select_keys.default: select_keys,
    torch.ops.dgt.attend.default: attend_alone,
    torch.ops.aten.gelu.default: gelu,
    torch.ops.aten.adaptive_avg_pool2d.default: adaptive_avg_pool2d,
}


def named_argument(node: Any, name: str) -> Any:
    """An argument of an operator in a graph, by its name; its default where the node leaves it out."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            left_out = node.kwargs.get(name, argument.default_value)
            return node.args[place] if place < len(node.args) else left_out
    raise KeyError(name)


def use_convolutions(program: ExportedProgram) -> None:
    """Make convolutions of 1x1 of the linears in a graph whose tokens are an image at once, in place.

    Runtimes for CPUs keep images in layouts of their own from one convolution to the next. Tokens
    for a linear between two would be copied out of that layout and back.
    """
    graph = program.graph
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target != aten.linear.default or len(node.users) != 1:
            continue
        (image,) = node.users
        if not _permutes(image, TO_IMAGE):
            continue
        tokens, weight, *bias = node.args
        with graph.inserting_before(image):
            if _permutes(tokens, TO_TOKENS):
                taken = tokens.args[0]
            else:
                taken = graph.call_function(aten.permute.default, (tokens, TO_IMAGE))
            if not _reshape_parameter(program, weight):
                for _ in range(2):
                    weight = graph.call_function(aten.unsqueeze.default, (weight, -1))
        image.target = aten.conv2d.default
        image.args = (taken, weight, *bias)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _reshape_parameter(program: ExportedProgram, weight: Any) -> bool:
    """Make (C', C, 1, 1) of a weight (C', C), in place; False if it is no parameter of one use."""
    name = program.graph_signature.inputs_to_parameters.get(weight.name)
    if name is None or len(weight.users) != 1:
        return False
    program.state_dict[name] = nn.Parameter(program.state_dict[name][:, :, None, None])
    weight.meta["val"] = weight.meta["val"][:, :, None, None]
    return True


def _permutes(node: Any, order: list[int]) -> bool:
    """Whether a node of a recorded graph puts dimensions in an order."""
    return node.target == torch.ops.aten.permute.default and list(node.args[1]) == order


def flatten_tokens(graph: Any) -> None:
    """Make the tokens between convolutions (B, H W, C) in a graph of known sizes, in place, unless
    something needs H.

    OpenVINO takes four dimensions for an image, keeps what a convolution yields with its second one
    innermost, and carries that through additions and norms to the next convolution: tokens as (B,
    H, W, C) are brought from one layout to the other, slowly, several times a block. Of three
    dimensions they need no copy, and nothing else changes.
    """
    tokens = {value: tuple(value.shape) for value in _tokens(graph)}
    for node in list(graph):
        if _order(node) == TO_IMAGE and node.inputs[0] in tokens:
            value = node.inputs[0]
            node.replace_input_with(0, _reshape(graph, node, value, tokens[value]))
    for value, (batch, height, width, channels) in tokens.items():
        node, flat = value.producer(), (batch, height * width, channels)
        if node.op_type == "Transpose":
            uses = value.uses()
            reshaped = _reshape(graph, uses[0].node, value, flat)
            for use in uses:
                use.node.replace_input_with(use.idx, reshaped)
        else:
            value.shape = onnx_ir.Shape(flat)
        if node.op_type == "Reshape":
            node.replace_input_with(1, _constant(graph, node, flat))


def _tokens(graph: Any) -> list[Any]:
    """All values that are tokens as (B, H, W, C), in order; None if one is used in a way that needs all four."""
    tokens: list[Any] = []
    for node in graph:
        value = node.outputs[0]
        if not any(taken in tokens for taken in node.inputs):
            if _makes_tokens(node, tokens):
                tokens.append(value)
        elif node.op_type in TOKENWISE:
            if not _keeps_tokens(node, tokens):
                return []
            tokens.append(value)
        elif node.op_type != "Reshape" and _order(node) != TO_IMAGE:
            return []
    if any(output in tokens for output in graph.outputs):
        return []
    return tokens


def _makes_tokens(node: Any, tokens: list[Any]) -> bool:
    """Whether a node that takes no tokens makes some: an image turned, or a shape that tokens have
    already.
    """
    shapes = [token.shape for token in tokens]
    return _order(node) == TO_TOKENS or (
        node.op_type == "Reshape" and node.outputs[0].shape in shapes
    )


def _keeps_tokens(node: Any, tokens: list[Any]) -> bool:
    """Whether a node that works token by token does so: what it multiplies with is a matrix on the
    right, and its other operands are vectors at most, not one for each column.
    """
    if node.op_type == "MatMul":
        return node.inputs[0] in tokens and len(node.inputs[1].shape) == 2
    return all(taken in tokens or len(taken.shape) <= 1 for taken in node.inputs)


def _order(node: Any) -> Any:
    return list(node.attributes["perm"].as_ints()) if node.op_type == "Transpose" else None


def _constant(graph: Any, node: Any, numbers: tuple[int, ...]) -> Any:
    constant = onnx_ir.node("Constant", [], {"value_ints": numbers})
    graph.insert_before(node, constant)
    return constant.outputs[0]


def _reshape(graph: Any, node: Any, value: Any, shape: tuple[int, ...]) -> Any:
    """``value`` in another shape, computed before ``node``."""
    reshape = onnx_ir.node("Reshape", [value, _constant(graph, node, shape)])
    graph.insert_before(node, reshape)
    reshape.outputs[0].shape, reshape.outputs[0].dtype = onnx_ir.Shape(shape), value.dtype
    return reshape.outputs[0]
